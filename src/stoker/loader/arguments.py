"""Arguments of ``DataLoader`` that torch does not have: their checks, and what torch's constructor gets instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import dataloader as torch_loader
from torch.utils.data.sampler import Sampler

from ..core import resources
from ..core.elsewhere import elsewhere, kinds
from ..core.errors import UsageError
from ..core.options import AutoWorkers, parse_bytes
from ..core.types import Index
from ..sampling.order import FeistelSampler
from ..workers.faults.validate import ConfiguredLoader
from .auto.limits import first_count
from .engine import SUPPORTED

SHUFFLES: dict[str, Callable[..., Sampler[int]]] = {"feistel": FeistelSampler}
METHODS = ("process", "thread")


def check_own(loader: ConfiguredLoader, context: object, shuffle: object, pin_memory: object) -> None:
    """Raises UsageError for invalid values of the arguments that torch does not have."""
    name, address = elsewhere(loader.worker_method) or ("", "")
    if name in (others := kinds() if name else []):
        from ..workers.elsewhere import load

        load(name).check(address)
    elif loader.worker_method not in METHODS:
        allowed = ", ".join(map(repr, (*METHODS, *others)))
        raise UsageError(f"worker_method must be one of {allowed}, not {loader.worker_method!r}")
    if loader.worker_method == "thread":
        if context is not None:
            raise UsageError(
                'worker_method="thread" starts no processes, so it cannot be combined with '
                f"multiprocessing_context={context!r}. Remove one of the two"
            )
        if not SUPPORTED:
            raise UsageError(f'worker_method="thread" is supported on Linux only, not on {sys.platform}')
    if loader.budget is not None:
        parse_bytes(loader.budget, resources.memory_granted())
    every = loader.snapshot_every_n_steps
    if isinstance(every, bool) or not isinstance(every or 0, int):
        raise UsageError(f"snapshot_every_n_steps must be an integer or None, not {every!r}")
    if (every or 0) < 0:
        raise UsageError(f"snapshot_every_n_steps must be at least 0, not {every}")
    if loader.transform_on_device is not None and loader.device is None:
        raise UsageError(
            'transform_on_device= needs device=. Pass device="cpu" to run the transform without an accelerator'
        )
    if isinstance(shuffle, str) and shuffle not in SHUFFLES:
        allowed = " or ".join(f'"{name}"' for name in SHUFFLES)
        raise UsageError(f"shuffle must be True, False, None, {allowed}, not {shuffle!r}")
    if isinstance(pin_memory, str) and pin_memory != "auto":
        raise UsageError(f'pin_memory must be True, False or "auto", not {pin_memory!r}')


def auto_workers(num_workers: int | str, dataset: object) -> int | str:
    """Replaces "auto" by a first guess. Returns other values unchanged; torch raises for other strings."""
    if isinstance(num_workers, str) and num_workers.strip().lower() == "auto":
        if num_workers != "auto":
            raise UsageError(f'num_workers must be an integer or "auto", not {num_workers!r}')
        num_workers = AutoWorkers(0)
    if not isinstance(num_workers, AutoWorkers) or num_workers:
        return num_workers
    return first_count(dataset)  # a loader rebuilt from one that ended with 0 workers passes 0 as well


def once(
    batch_size: int | None, shuffle: bool | str | None, sampler: Iterable[Index] | None, batch_sampler: Any
) -> tuple[int | None, bool | str | None, Iterable[Index] | None, Any]:
    """Drops order arguments that repeat another one. A framework that rebuilds a loader from its attributes passes the
    samplers that the loader made, beside the arguments they were made from. Only these are dropped; a real
    contradiction by the user still raises torch's error."""
    if getattr(batch_sampler, "_stoker_default", False) and batch_sampler.sampler is sampler:
        batch_sampler = None
    if getattr(sampler, "_stoker_default", False):
        shuffle = None
        if batch_sampler is not None:
            sampler, batch_size = None, 1 if batch_size is None else batch_size
        elif isinstance(sampler, torch_loader._InfiniteConstantSampler):
            sampler = None
    return batch_size, shuffle, sampler, batch_sampler
