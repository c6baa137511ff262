"""A mapped dataset of 480 MB in a container of 416: what is dropped for want of memory is read again at once."""

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from planted import small_container
from torch.utils.data import DataLoader, Dataset

LIMIT, ROWS, WIDTH = 416 << 20, 1920, 256 << 10


class Mapped(Dataset):
    def __init__(self, path):
        self.rows = np.memmap(path, np.uint8, "r", shape=(ROWS, WIDTH))

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return torch.from_numpy(self.rows[i].copy())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, small_container(LIMIT):
        path = Path(folder) / "rows"
        with open(path, "wb") as file:
            for _ in range(ROWS):
                file.write(os.urandom(WIDTH))
        for epoch in range(4):
            for batch in DataLoader(Mapped(path), batch_size=8, shuffle=True, num_workers=2):
                time.sleep(0.002)
