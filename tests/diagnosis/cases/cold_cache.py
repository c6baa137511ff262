"""Small records here and there in a file: the first epoch has them from a disk, the others from what the kernel kept."""

import os
import tempfile
import time

import torch
from torch.utils.data import DataLoader, Dataset

RECORDS, SIZE, EACH = 24576, 4096, 64


class Records(Dataset):
    """A sample is some records that do not lie next to each other."""

    def __init__(self, path):
        self.path = path
        self.file = None

    def __len__(self):
        return RECORDS // EACH

    def __getitem__(self, i):
        if self.file is None:
            self.file = os.open(self.path, os.O_RDONLY)
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)
        parts = [os.pread(self.file, SIZE, SIZE * (i + k * len(self))) for k in range(EACH)]
        return torch.tensor([part[0] for part in parts])


def write(path):
    with open(path, "wb") as f:
        f.write(os.urandom(RECORDS * SIZE))
        f.flush()
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = os.path.join(folder, "records.bin")
        write(path)
        loader = DataLoader(Records(path), batch_size=4, num_workers=2, persistent_workers=True)
        for epoch in range(3):
            for batch in loader:
                time.sleep(0.002)
