"""What the planted scripts share: work of a known size."""

import os
import time

import torch
from torch.utils.data import Dataset

CORES = len(os.sched_getaffinity(0))


def burn(ms):
    """Computes, in Python, for so many milliseconds of this thread's CPU time, whoever else is on the machine."""
    end = time.thread_time() + ms / 1e3
    while time.thread_time() < end:
        sum(range(200))


class Rows(Dataset):
    def __init__(self, n=400):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.full((256,), float(i))
