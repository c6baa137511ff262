"""Is it worth keeping? What a cache would cost and bring, measured on a few samples before there is one."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from typing import Any, NamedTuple

from .. import machine
from ..cache.leaves import Layout, take
from .border import PICTURES, Split
from .chance import States
from .shrink import offer

SAMPLES = 32  # that are timed, at most
SHARE = 0.5  # of the free memory, as ``Staged`` takes


class Worth(NamedTuple):
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
        border: the stages and why, as ``split`` says it.
        offer: in words, what decoding pictures small would bring and change; "" where it would not.
    """

    samples: int
    sample_bytes: float
    nbytes: float
    free: int
    prepare_s: float
    augment_s: float
    keep_s: float
    read_s: float
    border: str
    offer: str = ""

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
        words = (
            f"{size} for {self.samples:,} samples; {free} are free: {fits} fits\n"
            f"{self.fill_s:,.1f} s of one worker to fill, on the way {self.keep_s * self.samples * self.share:,.2f} s; "
            f"{self.saved_s:,.1f} s saved in each later epoch: it pays after {self.epochs:.2g} more epochs"
        )
        return f"{words}\n{self.offer}" if self.offer else words


def worth(dataset: Any, seconds: float = 1.0) -> Worth:
    """Measures what keeping a dataset's deterministic part would cost and bring.

    Args:
        dataset: map-style, or a ``Staged``.
        seconds: to measure; one sample is timed at least.

    Raises:
        UsageError: no border can be found; see ``split``.

    Example:
        >>> import time
        >>> class Slow:
        ...     def __len__(self): return 1000
        ...     def __getitem__(self, i): time.sleep(0.001); return bytes(100)
        >>> found = worth(Slow())
        >>> found.samples, found.saved_s > 0.5, found.epochs < 0.5
        (1000, True, True)
    """
    parts: Any = dataset
    border = ""
    if not hasattr(type(dataset), "_stoker_batches"):
        parts = Split(dataset)
        parts.fit(SHARE * machine.memory_available())
        border = str(parts)
    prepare, augment = (parts.prepare, parts.augment) if border else (parts._prepare, parts._augment)
    if border and parts.exact:
        augment = None
    n = len(dataset)
    some = random.Random(0).sample(range(n), min(n, SAMPLES))
    spent: list[list[float]] = []
    nbytes = 0
    states = States()
    began = time.perf_counter()
    for i in some:
        marks = [time.perf_counter()]
        made = prepare(i)
        marks.append(time.perf_counter())
        words, leaves = take(made)
        kept = [x.copy() for x in leaves]
        marks.append(time.perf_counter())
        again = Layout(words).put(kept)
        marks.append(time.perf_counter())
        if augment is not None:
            augment(again)
        marks.append(time.perf_counter())
        spent.append([b - a for a, b in itertools.pairwise(marks)])
        nbytes += sum(x.nbytes for x in leaves)
        if marks[-1] - began > seconds:
            break
    states.restore()
    prepare_s = statistics.fmean(row[0] for row in spent)  # some samples are dearer, and that counts
    keep_s, read_s, augment_s = (statistics.median(row[k] for row in spent) for k in (1, 2, 3))
    each = nbytes / len(spent)
    free = machine.memory_available()
    small = parts.offer if border else offer(prepare, some[:PICTURES])
    return Worth(n, each, each * n, free, prepare_s, augment_s, keep_s, read_s, border, small)
