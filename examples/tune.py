"""stoker.tune: a loader's settings, measured. Samples here wait 2 ms for a disk, so more workers than cores pay."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

import stoker


class Distant(Dataset):
    def __len__(self):
        return 5000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.tensor(index)


def main():
    loader = DataLoader(Distant(), batch_size=16, shuffle=True, num_workers=2)  # torch's own: it is not changed
    result = stoker.tune(loader, budget_s=6)
    print(result)
    best = result.best
    print(f"\n{best.num_workers} workers where the loader had {loader.num_workers}: {result.reasons['num_workers']}")


if __name__ == "__main__":
    main()
