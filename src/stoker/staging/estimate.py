"""What a cache would cost and save, measured on a few samples before there is one."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core import resources
from ..core.types import Sample
from .pure_calls import MemoPlan
from .random_state import RandomStates
from .split import Split
from .store.decode import Layout
from .store.encode import take

SAMPLES = 32  # that are timed, at most
RAM_SHARE = 0.5  # of the free memory, as ``Staged`` takes


class CacheEstimate(NamedTuple):
    """What caching the deterministic part of a dataset costs and saves. Seconds are one worker's.

    Attributes:
        samples: of the dataset.
        sample_bytes: that are stored of one.
        nbytes: that are stored of all.
        free: bytes of memory.
        prepare_s: to make the deterministic part of one sample.
        augment_s: for the random part of one sample.
        keep_s: to store one sample; the first epoch is that much longer.
        read_s: to read one.
        stages: the stages and why, as ``split`` prints them.
    """

    samples: int
    sample_bytes: float
    nbytes: float
    free: int
    prepare_s: float
    augment_s: float
    keep_s: float
    read_s: float
    stages: str

    @property
    def share(self) -> float:
        """Of the samples, that fits into half of what is free."""
        return min(1.0, RAM_SHARE * self.free / max(1.0, self.nbytes))

    @property
    def fill_s(self) -> float:
        """Seconds to prepare all that fits ahead."""
        return self.prepare_s * self.samples * self.share

    @property
    def saved_s(self) -> float:
        """Seconds by which each epoch after the first is shorter."""
        return max(0.0, self.prepare_s - self.read_s) * self.samples * self.share

    @property
    def epochs(self) -> float:
        """Epochs after the first until filling the cache has paid; infinite where it never does."""
        return self.keep_s * self.samples * self.share / self.saved_s if self.saved_s else float("inf")

    def __str__(self) -> str:
        fits = "all of it" if self.share == 1 else f"{self.share:.0%} of it"
        size, free = (f"{n / 1e6:,.0f} MB" for n in (self.nbytes, self.free))
        return (
            f"{size} for {self.samples:,} samples; {free} are free: {fits} fits\n"
            f"{self.fill_s:,.1f} s of one worker to fill, on the way {self.keep_s * self.samples * self.share:,.2f} s; "
            f"{self.saved_s:,.1f} s saved in each later epoch: it pays after {self.epochs:.2g} more epochs"
        )


def _of_calls(split: Split, memo: MemoPlan) -> CacheEstimate:
    """What the trial measured, where calls are cached; as many of them as there are samples."""
    n = len(split.dataset)
    made_s = max(0.0, split.sample_s - memo.served_s)
    free = resources.memory_available()
    return CacheEstimate(n, memo.nbytes, memo.nbytes * n, free, made_s, memo.served_s, 0.0, 0.0, str(split))


def worth(dataset: Any, seconds: float = 1.0) -> CacheEstimate:
    """Measures what caching a dataset's deterministic part would cost and save.

    Args:
        dataset: map-style, or a ``Staged``.
        seconds: to measure; one sample is timed at least.

    Raises:
        UsageError: it has no deterministic part; see ``split``.

    Example:
        >>> import time
        >>> class Slow:
        ...     def __len__(self): return 1000
        ...     def __getitem__(self, i): time.sleep(0.001); return bytes(100)
        >>> found = worth(Slow())
        >>> found.samples, found.saved_s > 0.5, found.epochs < 0.5
        (1000, True, True)
    """
    if hasattr(type(dataset), "_stoker_batches"):
        stages, prepare, augment = "", dataset._prepare, dataset._augment
    else:
        split = Split(dataset)
        if split.memo is not None:
            return _of_calls(split, split.memo)
        stages, prepare, augment = str(split), split.prepare, None if split.exact else split.augment
    n = len(dataset)
    rows: list[_Seconds] = []
    nbytes = 0
    states = RandomStates()
    began = time.perf_counter()
    for i in random.Random(0).sample(range(n), min(n, SAMPLES)):
        row, sample_bytes = _measure(i, prepare, augment)
        rows.append(row)
        nbytes += sample_bytes
        if time.perf_counter() - began > seconds:
            break
    states.restore()
    each = nbytes / len(rows)
    return CacheEstimate(
        samples=n,
        sample_bytes=each,
        nbytes=each * n,
        free=resources.memory_available(),
        prepare_s=statistics.fmean(row.prepare for row in rows),  # some samples take longer, and that counts
        augment_s=statistics.median(row.augment for row in rows),
        keep_s=statistics.median(row.store for row in rows),
        read_s=statistics.median(row.read for row in rows),
        stages=stages,
    )


class _Seconds(NamedTuple):
    """Of one sample."""

    prepare: float
    store: float
    read: float
    augment: float


def _measure(
    i: int, prepare: Callable[[int], Sample], augment: Callable[[Sample], Sample] | None
) -> tuple[_Seconds, int]:
    """What one sample takes, and its bytes."""
    times = [time.perf_counter()]
    part = prepare(i)
    times.append(time.perf_counter())
    type_spec, leaves = take(part)
    stored = [x.copy() for x in leaves]
    times.append(time.perf_counter())
    part = Layout(type_spec).put(stored)
    times.append(time.perf_counter())
    if augment is not None:
        augment(part)
    times.append(time.perf_counter())
    return _Seconds(*(b - a for a, b in itertools.pairwise(times))), sum(x.nbytes for x in leaves)
