"""The largest batch that fits the accelerator, by doubling and bisection, and what it brings in samples/s.

Trials run in this process; out of memory is caught and cleaned up. The loader's sampler, its generators and the random
state of the process are not touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch.utils.data import DataLoader, IterableDataset

from ..core.errors import UsageError, WorkerTimeoutError
from ..core.terminal import human_bytes, human_seconds, table
from ..core.types import JsonObject
from .batch_size_trial import Accelerator, Source, Step, Trial, counted

SCHEMA = 1
FINE = 16  # the search ends where what fits and what does not are this part apart
HEADERS = ["", "batch size", "fits", "memory", "samples/s"]


@dataclass(frozen=True)
class BatchSizes:
    """What ``largest`` found.

    Attributes:
        best: the largest batch size that fits.
        trials: in the order they were made.
        budget_bytes: free memory of the device; trials may take it less ``margin``, a share.
        device: the accelerator.
        bound: which limit ended the search, in words.
        seconds: how long it took.
        own: the loader's own batch size.
        margin: the share of the budget that is kept free.
    """

    best: int
    trials: tuple[Trial, ...]
    budget_bytes: int
    device: str
    bound: str
    seconds: float
    own: int
    margin: float

    @property
    def gain(self) -> float | None:
        """Samples/s against the loader's own batch size, as a factor; None where that was not tried or does not fit."""
        rates = {t.batch_size: t.samples_per_s for t in self.trials}
        before, after = rates.get(self.own), rates.get(self.best)
        return after / before if before and after else None

    def as_dict(self) -> JsonObject:
        """For JSON."""
        return {"schema": SCHEMA, **asdict(self), "gain": self.gain}

    def _rows(self) -> list[list[str]]:
        rows = []
        for t in sorted(self.trials, key=lambda t: t.batch_size):
            mark = "->" if t.batch_size == self.best else ""
            rate = "" if t.samples_per_s is None else f"{t.samples_per_s:,.4g}"
            memory = human_bytes(t.peak_bytes) if t.peak_bytes else ""
            rows.append([mark, f"{t.batch_size:,}", "yes" if t.fits else "no", memory, rate])
        return rows

    def _words(self) -> list[str]:
        own_was_tried = any(t.batch_size == self.own for t in self.trials)
        if self.best == self.own:
            gain = "it is the loader's own"
        elif self.gain is None:
            gain = f"the loader's own is {self.own:,}{', which does not fit' if own_was_tried else ''}"
        else:
            gain = f"{self.gain:.2f}x the samples/s of the loader's own {self.own:,}"
        return [
            f"batch size {self.best:,} is the largest that fits; {gain}",
            f"bound by {self.bound}",
            f"{human_seconds(self.seconds)} on {self.device}",
        ]

    def __str__(self) -> str:
        return "\n".join([table(HEADERS, self._rows(), 80), "", *self._words()])


def largest(
    loader: DataLoader[object],
    step: Step | None = None,
    margin: float = 0.1,
    seconds: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> BatchSizes:
    """The largest batch of ``loader``'s samples that fits the device.

    Args:
        loader: its dataset and its collate_fn make the batches; its workers and its sampler are not used.
        step: called with each batch on the device, for the memory of forward and backward. A model that it trains is
            trained.
        margin: share of the device's free memory that is kept free.
        seconds: for all trials together.
        progress: called with a line of text before each trial.

    Raises:
        UsageError: there is no accelerator, not one sample fits, the dataset, collate_fn or step raises, or an
            argument is wrong.
        WorkerTimeoutError: the time was over before any batch was made.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> largest(DataLoader(TensorDataset(torch.zeros(40, 2)), batch_size=4)).best  # doctest: +SKIP
        40
    """
    began = time.monotonic()
    source = _checked(loader, step, margin, seconds)
    device = counted()
    if device is None:
        raise UsageError("the largest batch is found for the memory of an accelerator, and torch sees none here")
    place = Accelerator(*device, margin)
    own = int(loader.batch_size or 0)
    top = source.count
    low, high, trials = 0, top + 1, list[Trial]()  # low fits, high does not
    size: int | None = min(own, top)
    while size is not None and (not trials or time.monotonic() < began + seconds):
        if progress is not None:
            progress(f"trying a batch of {size:,} samples" + (f", {low:,} fit" if low else ""))
        trials.append(place.trial(source, step, size, began + seconds))
        low, high = (size, high) if trials[-1].fits else (low, size)
        size = _next(low, high, top)
    if not low:
        raise _none_fits(place, trials[-1], None if size is None else seconds)
    bound = _bound(place, trials, high, top)
    if size is not None:
        bound = f"time: {seconds:g} s were over before the search was"
    return BatchSizes(low, tuple(trials), place.budget, place.name, bound, time.monotonic() - began, own, margin)


def _limit(place: Accelerator) -> str:
    margin = 1 - place.allowed / place.budget
    return f"{human_bytes(place.allowed)} are allowed ({human_bytes(place.budget)} were free, less {margin:.0%})"


def _none_fits(place: Accelerator, last: Trial, seconds: float | None) -> Exception:
    if seconds is not None:
        return WorkerTimeoutError(f"{seconds:g} s were over before a batch was found that fits: give it more time")
    least = "at least " if last.peak_bytes <= place.allowed else ""
    needs = f"it takes {least}{human_bytes(last.peak_bytes)}, and " if last.peak_bytes else ""
    return UsageError(f"not even one sample fits: {needs}{_limit(place)}; {last.why}")


def _bound(place: Accelerator, trials: list[Trial], high: int, top: int) -> str:
    """Which limit ended the search, in words."""
    if high <= top:
        why = next(t.why for t in trials if t.batch_size == high)
        return f"memory: a batch of {high:,} does not fit: {why}, and {_limit(place)}"
    return f"the dataset: it has {top:,} samples"


def _next(low: int, high: int, top: int) -> int | None:
    """The batch size to try: ``low`` is the largest known to fit, ``high`` the smallest known not to."""
    if high > top:
        return None if low == top else min(2 * low or top, top)
    return (low + high) // 2 if high - low > max(1, low // FINE) else None


def _checked(loader: object, step: object, margin: float, seconds: float) -> Source:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"the loader is of type {type(loader).__name__}, which is no DataLoader")
    if loader.batch_size is None:
        raise UsageError("the loader makes its own batches (batch_size=None or a batch_sampler): their size is its own")
    if step is not None and not callable(step):
        raise UsageError(f"step is of type {type(step).__name__}, which cannot be called with a batch")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("the dataset is iterable: batches of other samples cannot be drawn from it")
    if not 0 <= margin < 1 or not 0 < seconds < float("inf"):
        raise UsageError(f"margin={margin:g}, seconds={seconds:g}: a share below 1, and more than 0 seconds")
    source = Source(loader)
    if source.count == 0:
        raise UsageError("the dataset is empty")
    return source
