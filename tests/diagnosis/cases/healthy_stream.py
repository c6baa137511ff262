import time

import torch
from torch.utils.data import DataLoader


class Lines(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(1600):
            yield torch.full((64,), float(i))


if __name__ == "__main__":
    loader = DataLoader(Lines(), batch_size=8, num_workers=1)
    for batch in loader:
        time.sleep(0.02)
