"""What the planted scripts share: work of a known size."""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

CORES = len(os.sched_getaffinity(0))
NOT_HERE = 77  # the exit code of a script whose cause this machine does not allow


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


def device():
    """A CUDA device, or this script cannot plant its cause here."""
    if not torch.cuda.is_available():
        sys.exit(NOT_HERE)
    return torch.device("cuda")


def compute(device, ms):
    """A function that asks the device for so many milliseconds of work, and returns at once with its result."""
    side = 2048
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    (a @ b).sum().item()  # cuBLAS is loaded
    began, n = time.perf_counter(), 50
    for _ in range(n):
        a @ b
    torch.cuda.synchronize()
    times = max(1, round(ms / ((time.perf_counter() - began) / n * 1e3)))

    def step():
        for _ in range(times):
            c = a @ b
        return c.sum()

    return step


class Shared(Dataset):
    """Batches that lie in shared memory already, so that none costs anything before it is there."""

    def __init__(self, n, megabytes):
        self.n, self.rows = n, torch.empty(8, megabytes << 18).share_memory_()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.rows[i % len(self.rows)]


@contextlib.contextmanager
def small_container(limit):
    """This process and its children in a memory cgroup of their own, version 1 or 2."""
    base = Path("/sys/fs/cgroup/memory")
    base, file = (base, "memory.limit_in_bytes") if base.exists() else (base.parent, "memory.max")
    here = base / f"planted-{os.getpid()}"
    try:
        here.mkdir()
        (here / file).write_text(str(limit))
        (here / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        sys.exit(NOT_HERE)
    yield here
    with contextlib.suppress(OSError):
        (base / "cgroup.procs").write_text(str(os.getpid()))
        here.rmdir()
