"""loader.resize(n) in the middle of an epoch, as a callback would: the batches stay the same to the bit."""

import hashlib
import time

import torch
from torch.utils.data import Dataset

import stoker


class Remote(Dataset):
    """Samples that come from far away: two milliseconds of waiting, and a random shift."""

    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((8, 8), float(index)) + torch.rand(())


def epoch(changes):
    torch.manual_seed(0)
    loader = stoker.DataLoader(Remote(), batch_size=16, shuffle=True, num_workers="auto")
    loader.resize(1)
    digest, began = hashlib.sha256(), time.perf_counter()
    for step, batch in enumerate(loader):
        digest.update(batch.numpy().tobytes())
        if step in changes:
            loader.resize(changes[step])
    return digest.hexdigest()[:12], time.perf_counter() - began


def main():
    for words, changes in (("1 worker", {}), ("1, then 4, then 2", {5: 4, 30: 2})):
        digest, seconds = epoch(changes)
        print(f"{words:18} {seconds:.2f} s  batches {digest}")


if __name__ == "__main__":
    main()
