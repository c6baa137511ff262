import time

import torch
from planted import CORES, Rows
from torch.utils.data import DataLoader


def pad(samples):
    longest = max(len(s) for s in samples)
    return torch.tensor([s.tolist() + [0.0] * (longest - len(s)) for s in samples])


class Ragged(Rows):
    def __getitem__(self, i):
        return torch.zeros(2000 + i % 500)


if __name__ == "__main__":
    loader = DataLoader(Ragged(4000), batch_size=16, num_workers=CORES, collate_fn=pad)
    for batch in loader:
        time.sleep(0.001)
