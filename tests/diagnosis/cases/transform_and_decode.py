import time
import zlib

import numpy as np
import torch
from planted import CORES, Rows, burn
from torch.utils.data import DataLoader


class Blur:
    def __call__(self, x):
        burn(2)
        return x


class Packed(Rows):
    """Half of the time is decompression, half is one transform."""

    transform = Blur()

    def __init__(self, n):
        super().__init__(n)
        noise = np.random.default_rng(0).integers(0, 12, 100_000, dtype=np.uint8)
        self.file = zlib.compress(noise.tobytes())

    def __getitem__(self, i):
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            data = zlib.decompress(self.file)
        return self.transform(torch.frombuffer(bytearray(data[:1024]), dtype=torch.uint8))


if __name__ == "__main__":
    loader = DataLoader(Packed(1600), batch_size=8, num_workers=CORES)
    for batch in loader:
        time.sleep(0.002)
