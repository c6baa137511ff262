"""Finds the largest batch that fits the accelerator, by doubling and bisection, and the gain in samples/s.

Trials run in this process; out-of-memory errors are caught and cleaned up. The loader's sampler, its generators and the
process' random state are not touched.
"""

from __future__ import annotations

import contextlib
import gc
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..core import nested, resources
from ..core.errors import UsageError, WorkerTimeoutError, one_line
from ..core.random_state import preserved
from ..core.terminal import human_bytes, human_seconds, table
from ..core.types import Batch, JsonObject, LoaderLike, Sample
from ..device.accelerator import accelerator
from ..loader.auto.tasks import SEED, keys_of

SCHEMA = 1
FINE = 16  # the search ends when the bounds differ by less than this fraction
HEADERS = ["", "batch size", "fits", "memory", "samples/s"]
REPEATS = 3  # batches per trial, each of different samples; the first also pays for one-time imports and reads
PATIENCE = 8  # no more repeats once a trial has taken this fraction of the time left
OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|allocate memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE)

Step = Callable[[Batch], object]


@dataclass(frozen=True)
class BatchSizeTrial:
    """One tested batch size."""

    batch_size: int
    fits: bool  # within the budget minus the margin
    peak_bytes: int  # peak bytes above the baseline; a lower bound if the batch did not fit
    samples_per_s: float | None  # rate of making a batch and running the step, in one process; None if it does not fit
    why: str  # reason why it does not fit, or ""


@dataclass(frozen=True)
class BatchSizes:
    """Result of ``largest``. ``best`` is the largest batch size that fits, ``own`` the loader's own. ``budget_bytes``
    is the free memory of ``device``; the share ``margin`` of it stays free. ``bound`` names the limit that ended the
    search."""

    best: int
    trials: tuple[BatchSizeTrial, ...]
    budget_bytes: int
    device: str
    bound: str
    seconds: float
    own: int
    margin: float

    @property
    def gain(self) -> float | None:
        """Ratio of samples/s to the loader's own batch size; None if that was not tried or does not fit."""
        rates = {t.batch_size: t.samples_per_s for t in self.trials}
        before, after = rates.get(self.own), rates.get(self.best)
        return after / before if before and after else None

    def as_dict(self) -> JsonObject:
        """As a dict for JSON."""
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
            gain = "it equals the loader's own"
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
    """Finds the largest batch of ``loader``'s samples that fits the device.

    Args:
        loader: provides dataset and collate_fn; its workers and sampler are not used.
        step: called with each batch on the device, to include the memory of forward and backward. It does train its
            model.
        margin: share of the device's free memory to keep free.
        seconds: time limit for all trials together.
        progress: called with a line of text before each trial.

    Raises:
        UsageError: there is no accelerator, not one sample fits, the dataset, collate_fn or step raises, or an
            argument is wrong.
        WorkerTimeoutError: the time ran out before any batch size was found to fit.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> largest(DataLoader(TensorDataset(torch.zeros(40, 2)), batch_size=4)).best  # doctest: +SKIP
        40
    """
    began = time.monotonic()
    _check(loader, step, margin, seconds)
    device = counted()
    if device is None:
        raise UsageError("the batch size search needs an accelerator, and torch sees none here")
    search = _Search(loader, step, *device, margin, began + seconds)
    own, top, trials = int(loader.batch_size or 0), search.samples, list[BatchSizeTrial]()
    low, high = 0, top + 1  # low fits, high does not
    size: int | None = min(own, top)
    while size is not None and (not trials or time.monotonic() < search.deadline):
        if progress is not None:
            progress(f"trying a batch of {size:,} samples" + (f", {low:,} fit" if low else ""))
        trials.append(search.trial(size))
        low, high = (size, high) if trials[-1].fits else (low, size)
        size = _next(low, high, top)
    if not low and size is not None:
        raise WorkerTimeoutError(f"no batch that fits was found within {seconds:g} s: allow more time")
    if not low:
        raise UsageError(f"not even a single sample fits: {trials[-1].why}, and {search.limit}")
    bound = f"time: the search did not finish within {seconds:g} s" if size else _bound(high, search, trials)
    return BatchSizes(low, tuple(trials), search.budget, search.name, bound, time.monotonic() - began, own, margin)


def _bound(high: int, search: _Search, trials: Sequence[BatchSizeTrial]) -> str:
    """What keeps a batch from having ``high`` samples."""
    if high > search.samples:
        return f"the dataset: it has {search.samples:,} samples"
    why = next(t.why for t in trials if t.batch_size == high)
    return f"memory: a batch of {high:,} does not fit: {why}, and {search.limit}"


def _next(low: int, high: int, top: int) -> int | None:
    """Next batch size to try: ``low`` is the largest known to fit, ``high`` the smallest known not to."""
    if high > top:
        return None if low == top else min(2 * low or top, top)
    return (low + high) // 2 if high - low > max(1, low // FINE) else None


def _check(loader: object, step: object, margin: float, seconds: float) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"the loader is of type {type(loader).__name__}, not a DataLoader")
    if loader.batch_size is None:
        raise UsageError(
            "the loader makes its own batches (batch_size=None or a batch_sampler), so their size cannot be changed"
        )
    if step is not None and not callable(step):
        raise UsageError(f"step is of type {type(step).__name__}, which cannot be called with a batch")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("the dataset is iterable, so batches of any size cannot be drawn from it")
    if not 0 <= margin < 1 or not 0 < seconds < float("inf"):
        raise UsageError(
            f"margin must be a share below 1 and seconds must be positive, not margin={margin:g}, seconds={seconds:g}"
        )
    if not keys_of(loader):
        raise UsageError("the dataset is empty")


def counted() -> tuple[ModuleType, torch.device] | None:
    """Returns torch's module for the accelerator, and the device; None if none reports its memory."""
    device = accelerator()
    if device is None or device.type not in ("cuda", "xpu"):
        return None
    module: ModuleType = getattr(torch, device.type)
    return module, torch.device(device.type, module.current_device())


class _Search:
    """Makes batches of a loader's samples, and runs the step on the device."""

    def __init__(
        self,
        loader: LoaderLike,
        step: Step | None,
        module: ModuleType,
        device: torch.device,
        margin: float,
        deadline: float,
    ) -> None:
        self._dataset, self._collate, self._keys = loader.dataset, loader.collate_fn, keys_of(loader)
        self._step, self._module, self._device, self.deadline = step, module, device, deadline
        self.samples = len(self._keys)
        self._doing = ""
        self._host = resources.memory_available() // 2
        self._sample_bytes = 0.0
        self._clear()
        self._start = int(module.memory_allocated())
        self.budget = int(module.mem_get_info()[0] + module.memory_reserved() - self._start)
        self._allowed = int(self.budget * (1 - margin))
        self.limit = f"{human_bytes(self._allowed)} are available ({human_bytes(self.budget)} free, less {margin:.0%})"
        self.name = f"{device} ({module.get_device_name()})"

    def trial(self, n: int) -> BatchSizeTrial:
        """Runs a trial with batches of ``n`` samples. Raises UsageError if the script's code raises."""
        if 2 * n * self._sample_bytes > self._host:  # the samples and the batch made from them exist at the same time
            why = f"making the batch would take more than {human_bytes(self._host)} of RAM"
            return BatchSizeTrial(n, False, 0, None, why)
        self._module.reset_peak_memory_stats()
        random_state = self._module.get_rng_state()
        seconds, why, failed = 1e-9, "", ""
        try:
            with preserved():
                seconds = self._seconds(n)
        except (Exception, SystemExit) as e:  # reduced to text here: its traceback would keep the batch in memory
            why = f"out of memory in {self._doing}" if _is_out_of_memory(e) else ""
            failed = "" if why else f"batch size {n:,}: {self._doing} raised {one_line(e)}"
        with contextlib.suppress(RuntimeError):  # there may still be too little memory for this
            self._module.set_rng_state(random_state)
        peak = int(self._module.max_memory_allocated()) - self._start
        self._clear()
        if failed:
            raise UsageError(failed)
        why = why or (f"it takes {human_bytes(peak)}" if peak > self._allowed else "")
        return BatchSizeTrial(n, not why, peak, None if why else n / max(seconds, 1e-9), why)

    def _seconds(self, n: int) -> float:
        """Median seconds of one batch with its step."""
        patience = (self.deadline - time.monotonic()) / PATIENCE
        times: list[float] = []
        while not times or (len(times) < REPEATS and sum(times) + times[-1] < patience):
            began = time.perf_counter()
            batch = self._batch(random.Random(SEED + len(times)).sample(range(self.samples), n))
            self._doing = "step"
            batch = nested.move(batch, self._device)
            self._sample_bytes = sum(t.nbytes for t in nested.tensors(batch)) / n
            if self._step is not None:
                self._step(batch)
            del batch
            self._module.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median_low(times)

    def _batch(self, places: list[int]) -> Batch:
        self._doing = "the dataset"
        indices = [self._keys[i] for i in places]
        samples: list[Sample] = []
        if getattr(self._dataset, "__getitems__", None):
            samples += self._dataset.__getitems__(indices)
        else:
            for i in indices:
                self._doing = f"sample {i} of the dataset"
                samples.append(self._dataset[i])
        self._doing = "collate_fn"
        return self._collate(samples)

    def _clear(self) -> None:
        gc.collect()
        self._module.empty_cache()


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
            return True
        if isinstance(error, (RuntimeError, OSError)) and OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
