"""Knobs and Budget: the settings handed to the engine, as frozen dataclasses that validate themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from .errors import UsageError
from .types import Attributes

BATCH_SIZE = 32  # for a dataset given without a loader


def worker_word(method: str) -> str:
    """Translates ``worker_method=`` to stoker's terms: torch's proposal calls "process" "multiprocessing"."""
    return "process" if method == "multiprocessing" else method


class Workers(int):
    """The worker count of a ``stoker.DataLoader``: an int that carries the loader's other settings. Frameworks such as
    Accelerate build torch loaders from the attributes of a loader. All of them copy the number of workers, and stoker's
    settings with it. Pickling turns it into a plain int."""

    settings: Attributes | None = None  # by name
    dataset: object = None  # the loader's. A loader of another dataset ignores the settings

    @classmethod
    def carrying(cls, n: int, settings: Attributes, dataset: object) -> Workers:
        """Wraps a count, as ``AutoWorkers`` if it was one, together with settings."""
        out = (AutoWorkers if isinstance(n, AutoWorkers) else Workers)(n)
        out.settings, out.dataset = settings, dataset
        return out

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def __copy__(self) -> Workers:
        return self


class AutoWorkers(Workers):
    """The worker count of a loader built with ``num_workers="auto"``.

    Frameworks rebuild loaders from their attributes (Lightning: ``type(dl)(**attributes)``). They read ``num_workers``
    as a plain number and pass it to the constructor, which recognises "auto" by this type."""

    def __reduce__(self) -> tuple[type[AutoWorkers], tuple[int]]:
        return AutoWorkers, (int(self),)


@dataclass(frozen=True)
class Knobs:
    """The engine's settings for one loader."""

    num_workers: int  # worker processes, at least 1
    prefetch_factor: int = 2  # tasks in flight per worker, at least 1
    in_order: bool = True  # deliver in the sampler's order
    persistent: bool = False  # keep workers between epochs
    timeout: float = 0.0  # seconds to wait for a batch; 0 for no limit
    task_seeds: bool = False  # seed the random state per task, not per worker (``num_workers="auto"``)
    shared: bool = False  # any free worker takes the next task; only with task seeds
    # tasks in flight per worker while batches are small, so that a slow sample does not stall the others. 0:
    # ``prefetch_factor``
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"num_workers must be at least 1 for worker processes, not {self.num_workers}")
        if self.prefetch_factor < 1:
            raise UsageError(f"prefetch_factor must be at least 1, not {self.prefetch_factor}")

    @cached_property  # both are read for each batch
    def window(self) -> int:
        """Upper bound of tasks in flight over all workers."""
        return self.num_workers * max(self.ahead, self.prefetch_factor)

    @cached_property
    def usual(self) -> int:
        """Tasks in flight over all workers, for batches of any size."""
        return self.num_workers * self.prefetch_factor


@dataclass(frozen=True)
class Budget:
    """How much memory the transport may hold."""

    lease_bytes: int  # bytes of slots that the consumer may keep; beyond that, batches are copied out of their slots
    lease_slots: int = 512  # the same bound as a count, because every slot is a memory mapping
    flight_bytes: int = 1 << 62  # bytes of prefetched batches, over all workers; one batch is always allowed
    strict: bool = False  # the user set ``flight_bytes``: a batch that does not fit is an error

    def __post_init__(self) -> None:
        if self.lease_bytes < 0 or self.lease_slots < 0 or self.flight_bytes < 0:
            raise UsageError(
                f"budgets must not be negative: lease_bytes={self.lease_bytes}, lease_slots={self.lease_slots}, "
                f"flight_bytes={self.flight_bytes}"
            )


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(value: int | float | str, of: int, name: str = "budget") -> int:
    """Parses an amount of memory as a user writes it: bytes, ``"4GB"``, ``"512 MiB"``, or a share of ``of`` as a float.
    Raises UsageError for anything else."""
    nbytes: float = -1
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            nbytes = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(value, float):
        nbytes = value * of if 0 < value <= 1 else -1
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    if nbytes < 1:
        raise UsageError(
            f'{name} must be bytes, a size such as "4GB", or a share of the available memory between 0 and 1, not '
            f"{value!r}"
        )
    return int(nbytes)
