"""Samples that are views of the dataset's own memory. The loop writes into them, and relies on it."""

import os

import numpy as np
import torch
from seen import Seen
from torch.utils.data import DataLoader, Dataset


class Bank(Dataset):
    def __init__(self, path):
        raw = np.fromfile(path, dtype="<f4").reshape(-1, 257)[:200, 1:]
        self.features = torch.from_numpy(raw.copy())
        self.visits = torch.zeros(len(raw), dtype=torch.long)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, i):
        return self.features[i], self.visits[i : i + 1], i


def main():
    torch.manual_seed(27)
    bank = Bank(os.path.join(os.environ["DATA"], "records.bin"))
    one_by_one = DataLoader(bank, batch_size=None, shuffle=True)
    batches = DataLoader(bank, batch_size=20, shuffle=True)
    seen, stacked = Seen(), Seen()
    for _ in range(3):
        for features, visits, i in one_by_one:
            seen.add([i], [visits.item()], features[None])
            features.mul_(0.5)
            visits.add_(1)
        seen.epoch()
        for features, visits, i in batches:
            stacked.add(i, visits[:, 0], features)
            features.zero_()  # a copy: this must not reach the bank
        stacked.epoch("batches")
    print("visits", bank.visits.unique().tolist())


if __name__ == "__main__":
    main()
