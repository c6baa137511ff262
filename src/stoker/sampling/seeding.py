"""Random state: torch's per-worker seeds to the bit, and counter-based seeds per task.

Task seeds make random augmentation a function of (base seed, epoch, task) alone: which worker runs a task, how many
there are, and where a run was resumed cannot change a bit. The counter is spread with SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import pickle
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import _generate_state

try:
    import numpy as np

    from ..core import numpy_state
except ModuleNotFoundError:  # torch works without NumPy, and so do its loader's seeds
    np = None  # type: ignore[assignment]

_MASK = (1 << 64) - 1
_ACCELERATED = not hasattr(torch, "accelerator") or torch.accelerator.current_accelerator() is not None


def splitmix64(x: int) -> int:
    """One step of SplitMix64: 64 bits in, 64 well-mixed bits out."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def task_seed(base_seed: int, epoch: int, task: int) -> int:
    """The 64-bit seed of one task.

    Example:
        >>> task_seed(1, 0, 0) != task_seed(1, 0, 1) != task_seed(1, 1, 0)
        True
    """
    return splitmix64(splitmix64(splitmix64(base_seed & _MASK) ^ epoch) ^ task)


def _seed_torch(seed: int) -> None:
    # torch.manual_seed queues the seed for CUDA with a formatted stack: 2 ms for a new process' first batch, 0.1 ms
    # for every task. A build without accelerators has nobody to read that queue.
    if _ACCELERATED:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class _WhenLoaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Seeds NumPy's legacy generator as soon as ``numpy.random`` is loaded. Loading takes 5 to 8 ms, and a worker whose
    code never asks for it need not wait for that."""

    seed: Any = None

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "numpy.random":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        module.seed(self.seed)


_when_loaded = _WhenLoaded()


def _seed_numpy(seed: Any) -> None:
    if np is None:
        return
    if "numpy.random" in sys.modules:
        np.random.seed(seed)
        return
    _when_loaded.seed = seed
    if _when_loaded not in sys.meta_path:
        sys.meta_path.insert(0, _when_loaded)


def _numpy_seed(seed: int) -> int:
    """Mixed once more: from the same words NumPy's legacy generator, which is Python's, would draw the same numbers,
    and a flip by one be tied to a crop by the other. 32 bits, as torch's own generator takes of its seed: a fifth of
    the 10 us that more of them cost each task."""
    return splitmix64(seed) & 0xFFFFFFFF


def seed_worker(base_seed: int, worker: int) -> int:
    """Seeds Python, torch and NumPy as torch's loader seeds its worker ``worker``. Returns the worker's seed."""
    seed = base_seed + worker
    random.seed(seed)
    _seed_torch(seed)
    if np is not None:
        _seed_numpy(_generate_state(base_seed, worker))
    return seed


class Generators:
    """Random generators of one worker thread, seeded as a worker process seeds the process-wide ones.

    torch's and Python's give what theirs give in a worker process. NumPy's is a ``Generator`` (torch's convention),
    where processes seed the legacy ``RandomState``.
    """

    def __init__(self, base_seed: int, worker: int) -> None:
        self.python = random.Random(base_seed + worker)
        self.torch = torch.Generator()
        self.torch.manual_seed(base_seed + worker)
        self.numpy = np.random.default_rng(_generate_state(base_seed, worker)) if np is not None else None

    def seed_task(self, base_seed: int, epoch: int, task: int) -> None:
        """Seeds them for one task."""
        seed = task_seed(base_seed, epoch, task)
        self.python.seed(seed)
        self.torch.manual_seed(seed)
        if self.numpy is not None:
            self.numpy.bit_generator.state = np.random.PCG64([seed & 0xFFFFFFFF, seed >> 32]).state

    def look(self) -> Any:
        """Their state, to be compared."""
        numpy = self.numpy.bit_generator.state["state"] if self.numpy is not None else None
        return self.python.getstate(), self.torch.get_state().tolist(), numpy

    def as_torch(self) -> Any:
        """torch's container for them, which is ``get_worker_info().rng``."""
        kind: Any = getattr(torch_worker, "_RNG", types.SimpleNamespace)
        return kind(random_generator=self.python, torch_generator=self.torch, numpy_generator=self.numpy)


def seed_task(base_seed: int, epoch: int, task: int) -> None:
    """Seeds Python, torch and NumPy for one task."""
    seed = task_seed(base_seed, epoch, task)
    random.seed(seed)
    _seed_torch(seed)
    _seed_numpy(_numpy_seed(seed))


def seed_here(base_seed: int, epoch: int, task: int) -> None:
    """The same in the script's own process, inside ``unchanged``: a device that is not in use yet is not seeded, for
    torch would keep that seed until it is."""
    seed = task_seed(base_seed, epoch, task)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if _cuda():
        torch.cuda.manual_seed_all(seed)
    _seed_numpy(_numpy_seed(seed))


def _cuda() -> bool:
    return _ACCELERATED and torch.cuda.is_initialized()


def look() -> Any:
    """The state of the three process-wide generators, to be compared."""
    numpy = np.random.get_state(legacy=False) if np is not None and "numpy.random" in sys.modules else None
    return random.getstate(), torch.get_rng_state().tolist(), repr(numpy)


def snapshot() -> bytes:
    """The three process-wide generators as they are; 10 KB, 60 microseconds."""
    numpy: Any = None
    if np is not None and "numpy.random" in sys.modules:  # else nobody has drawn from it
        numpy = np.random.get_state(legacy=False)
    torchs = torch.default_generator.get_state().numpy().tobytes()
    return pickle.dumps((random.getstate(), torchs, numpy), protocol=5)


def restore(state: bytes) -> None:
    """Puts them back. ``state`` comes from ``snapshot`` in a worker of this process."""
    python, torchs, numpy = pickle.loads(state)
    random.setstate(python)
    torch.default_generator.set_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))
    if numpy is not None:
        np.random.set_state(numpy)


@contextmanager
def unchanged() -> Iterator[None]:
    """Puts the three process-wide generators, and CUDA's, back as they were, whatever is drawn inside."""
    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if _cuda() else None
    numpy: Any = numpy_state.save() if np is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if np is not None:
            numpy_state.restore(numpy)
