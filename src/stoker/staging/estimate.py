"""Is it worth keeping? What a cache would cost and bring, measured on a few samples before there is one."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from typing import Any, NamedTuple

from ..core import resources
from .pure_calls import MemoPlan
from .random_state import RandomStates
from .split import Split
from .store.decode import Layout
from .store.encode import take

SAMPLES = 32  # that are timed, at most
SHARE = 0.5  # of the free memory, as ``Staged`` takes


class CacheEstimate(NamedTuple):
    """What keeping the deterministic part of a dataset brings. Seconds are one worker's.

    Attributes:
        samples: of the dataset.
        sample_bytes: what is kept of one.
        nbytes: what is kept of all.
        free: bytes of memory that are free.
        prepare_s: to make what is kept of one sample.
        augment_s: for the rest of one sample, which is done every time.
        keep_s: to put one sample in; the first epoch is so much longer.
        read_s: to take one out again.
        stages: the stages and why, as ``split`` says it.
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
        """Part of the samples that fit into half of what is free."""
        return min(1.0, SHARE * self.free / max(1.0, self.nbytes))

    @property
    def fill_s(self) -> float:
        """Seconds to prepare all of it ahead."""
        return self.prepare_s * self.samples * self.share

    @property
    def saved_s(self) -> float:
        """Seconds that each epoch after the first is shorter."""
        return max(0.0, self.prepare_s - self.read_s) * self.samples * self.share

    @property
    def epochs(self) -> float:
        """Epochs after the first until filling it on the way has paid; infinite where it never does."""
        return self.keep_s * self.samples * self.share / self.saved_s if self.saved_s else float("inf")

    def __str__(self) -> str:
        fits = "all of it" if self.share == 1 else f"{self.share:.0%} of it"
        size, free = (f"{n / 1e6:,.0f} MB" for n in (self.nbytes, self.free))
        return (
            f"{size} for {self.samples:,} samples; {free} are free: {fits} fits\n"
            f"{self.fill_s:,.1f} s of one worker to fill, on the way {self.keep_s * self.samples * self.share:,.2f} s; "
            f"{self.saved_s:,.1f} s saved in each later epoch: it pays after {self.epochs:.2g} more epochs"
        )


def _of_calls(parts: Split, memo: MemoPlan) -> CacheEstimate:
    """What the trial measured, where calls are kept; as many of them as there are samples."""
    n = len(parts.dataset)
    made_s = max(0.0, parts.sample_s - memo.served_s)
    free = resources.memory_available()
    return CacheEstimate(n, memo.nbytes, memo.nbytes * n, free, made_s, memo.served_s, 0.0, 0.0, str(parts))


def worth(dataset: Any, seconds: float = 1.0) -> CacheEstimate:
    """Measures what keeping a dataset's deterministic part would cost and bring.

    Args:
        dataset: map-style, or a ``Staged``.
        seconds: to measure; one sample is timed at least.

    Raises:
        UsageError: nothing can be kept; see ``split``.

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
        parts = Split(dataset)
        if parts.memo is not None:
            return _of_calls(parts, parts.memo)
        stages, prepare, augment = str(parts), parts.prepare, None if parts.exact else parts.augment
    n = len(dataset)
    some = random.Random(0).sample(range(n), min(n, SAMPLES))
    spent: list[list[float]] = []
    nbytes = 0
    states = RandomStates()
    began = time.perf_counter()
    for i in some:
        times = [time.perf_counter()]
        made = prepare(i)
        times.append(time.perf_counter())
        words, leaves = take(made)
        kept = [x.copy() for x in leaves]
        times.append(time.perf_counter())
        again = Layout(words).put(kept)
        times.append(time.perf_counter())
        if augment is not None:
            augment(again)
        times.append(time.perf_counter())
        spent.append([b - a for a, b in itertools.pairwise(times)])
        nbytes += sum(x.nbytes for x in leaves)
        if times[-1] - began > seconds:
            break
    states.restore()
    prepare_s = statistics.fmean(row[0] for row in spent)  # some samples take longer, and that counts
    keep_s, read_s, augment_s = (statistics.median(row[k] for row in spent) for k in (1, 2, 3))
    each = nbytes / len(spent)
    return CacheEstimate(n, each, each * n, resources.memory_available(), prepare_s, augment_s, keep_s, read_s, stages)
