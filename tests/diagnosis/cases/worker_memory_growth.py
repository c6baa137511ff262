import time

import torch
from planted import Rows
from torch.utils.data import DataLoader


class Data(Rows):
    """A cache that nobody empties."""

    def __init__(self, n):
        super().__init__(n)
        self.kept = {}

    def __getitem__(self, i):
        self.kept[i] = torch.ones(50_000)
        return super().__getitem__(i)


if __name__ == "__main__":
    loader = DataLoader(Data(3000), batch_size=8, num_workers=1)
    for batch in loader:
        time.sleep(0.04)
