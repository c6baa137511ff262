"""Seeds random state: torch's per-worker seeds, bit for bit, and counter-based seeds per task.

Task seeds make random augmentation a function of (base seed, epoch, task) alone: it does not depend on which worker
runs a task, on the number of workers, or on where a run was resumed. SplitMix64 mixes the counter (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import _generate_state

from ..core import numpy_state
from ..core.random_state import RandomState

_MASK = (1 << 64) - 1
_CUDA_NODES = ("nvidia[0-9c]*", "nvhost-*gpu*", "nvgpu", "nvmap", "dxg", "kfd")  # servers, Tegra, WSL, ROCm: in /dev


def _may_have_accelerator() -> bool:
    """Whether this build of torch may find a device here. Does not ask the driver, because then workers forked later
    could not use CUDA."""
    if hasattr(torch, "accelerator"):
        device = torch.accelerator.current_accelerator()  # the build's; the machine may have none
        kind = "" if device is None else device.type
    else:  # torch < 2.6 does not tell what else it was built for
        kind = "cuda" if torch.backends.cuda.is_built() else "unknown"
    if kind == "cuda" and sys.platform == "linux":
        return any(next(Path("/dev").glob(node), None) for node in _CUDA_NODES)
    return bool(kind)


_ACCELERATED = _may_have_accelerator()


def splitmix64(x: int) -> int:
    """One step of SplitMix64: 64 bits in, 64 well-mixed bits out."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def task_seed(base_seed: int, epoch: int, task: int) -> int:
    """Returns the 64-bit seed of one task."""
    return splitmix64(splitmix64(splitmix64(base_seed & _MASK) ^ epoch) ^ task)


def _seed_torch(seed: int) -> None:
    # torch.manual_seed queues the seed for CUDA with a formatted stack trace: 2 ms for a new process's first batch, and
    # 0.1 ms for every task. Without a device, nothing reads that queue.
    if _ACCELERATED:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _numpy_seed(seed: int) -> int:
    """Returns a seed for NumPy, mixed once more. NumPy's legacy generator is the same as Python's: from the same words,
    both would draw the same numbers, which ties a flip to a crop. 32 bits, as many as torch's own generator uses of its
    seed; more would take 10 us per task, five times as long."""
    return splitmix64(seed) & 0xFFFFFFFF


def seed_worker(base_seed: int, worker: int) -> int:
    """Seeds Python, torch and NumPy as torch's loader seeds its worker ``worker``. Returns the worker's seed."""
    seed = base_seed + worker
    numpy_state.seed(_generate_state(base_seed, worker))
    random.seed(seed)
    _seed_torch(seed)
    return seed


class Generators:
    """Random generators of one worker thread, seeded as a worker process seeds the process-wide ones. torch's and
    Python's draw the same numbers as in a worker process. NumPy's is a ``Generator`` (torch's convention), whereas
    processes seed the legacy ``RandomState``."""

    def __init__(self, base_seed: int, worker: int) -> None:
        self.python = random.Random(base_seed + worker)
        self.torch = torch.Generator()
        self.torch.manual_seed(base_seed + worker)
        self.numpy = np.random.default_rng(_generate_state(base_seed, worker))

    def seed_task(self, base_seed: int, epoch: int, task: int) -> None:
        seed = task_seed(base_seed, epoch, task)
        self.python.seed(seed)
        self.torch.manual_seed(seed)
        self.numpy.bit_generator.state = np.random.PCG64([seed & 0xFFFFFFFF, seed >> 32]).state

    def state(self) -> RandomState:
        """Returns their state, for comparison."""
        return RandomState([("python", self.python), ("torch", self.torch), ("numpy", self.numpy)], ())

    def as_torch(self) -> Any:
        """Returns them in torch's container, for ``get_worker_info().rng``."""
        container = getattr(torch_worker, "_RNG", types.SimpleNamespace)
        return container(random_generator=self.python, torch_generator=self.torch, numpy_generator=self.numpy)


def seed_task(base_seed: int, epoch: int, task: int) -> None:
    seed = task_seed(base_seed, epoch, task)
    random.seed(seed)
    _seed_torch(seed)
    np.random.seed(_numpy_seed(seed))


def seed_here(base_seed: int, epoch: int, task: int) -> None:
    """Like ``seed_task``, but in the training process, inside ``preserved``. Does not seed an uninitialised device,
    because torch would keep that seed until the device is first used."""
    seed = task_seed(base_seed, epoch, task)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if _ACCELERATED and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(_numpy_seed(seed))
