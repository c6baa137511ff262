import time

import torch
from planted import CORES, Rows
from torch.utils.data import DataLoader


def collate(samples):
    out = torch.zeros(len(samples), 256)
    for i, sample in enumerate(samples):
        for k, value in enumerate(sample.tolist()):
            out[i, k] = value
    return out


if __name__ == "__main__":
    loader = DataLoader(Rows(1600), batch_size=8, num_workers=CORES, collate_fn=collate)
    for batch in loader:
        time.sleep(0.001)
