"""Everything that ``stoker tune`` has measured, and the benches that measure it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable

from torch.utils.data.dataloader import _DatasetKind

from ..core import terminal
from ..core.options import Budget
from ..core.types import JsonObject, LoaderLike
from ..loader import engine
from ..loader.auto.bench import BenchWindow, WorkerBench
from ..loader.auto.tasks import MeasuringTasks
from ..loader.variant import variant
from .result import Setting

KNEE = 0.97  # share of the best rate that is good enough: the smallest setting within 3 % wins
WINDOW_S = 0.25  # of one measurement; long enough that a scheduler tick on a busy machine is noise
WINDOWS_IN_BUDGET = 60  # windows are shortened if the budget has no room for this many
BATCHES = 3  # minimum batches per worker in a window
RESERVE = 0.15  # share of the budget reserved for the rest of the result


class Measurements:
    """The measured windows, by setting."""

    def __init__(self, loader: LoaderLike, budget_s: float, progress: Callable[[str], None]) -> None:
        self.loader, self.budget_s = loader, budget_s
        self.began = time.monotonic()
        self.deadline = self.began + budget_s
        self.transport: Budget = engine.budget(loader)
        self.tasks = MeasuringTasks(loader)  # of the loader's own batch size
        self._resized: dict[int, MeasuringTasks] = {}  # by batch size
        self.rates: dict[Setting, list[float]] = {}  # samples per second of each window
        self.windows: dict[Setting, BenchWindow] = {}  # the latest of each setting
        self.tried: list[JsonObject] = []  # all windows, in order, for the JSON
        self.is_stream = loader._dataset_kind == _DatasetKind.Iterable
        self.window_s = min(WINDOW_S, max(0.05, budget_s / WINDOWS_IN_BUDGET))
        self._progress = progress  # called with a line for each window
        self.bench = WorkerBench(loader, self.tasks, self.transport, self.deadline)

    def is_over(self) -> bool:
        """Whether there is no time for another window, apart from the reserve."""
        return self.deadline - time.monotonic() < RESERVE * self.budget_s

    def has_time_for_one(self) -> bool:
        """Whether there is time for another window, of the reserve."""
        return self.deadline - time.monotonic() > 2 * self.window_s

    def measure(self, s: Setting) -> float:
        """One more window of a setting. Returns its samples per second; without workers, those of one that would only
        fetch and collate. Raises BadSample: a sample cannot be loaded; TooSlow: no batch came in the time left."""
        tasks = self._tasks_of(s.batch_size)
        self.bench.use(tasks)
        window = self.bench.window(max(1, s.num_workers), s.prefetch_factor, self.window_s, BATCHES)
        rate = (window.rate if s.num_workers else 1 / window.make_s) * tasks.samples
        self.rates.setdefault(s, []).append(rate)
        self.windows[s] = window
        knobs = {name: getattr(s, name) for name in ("num_workers", "prefetch_factor", "batch_size")}
        self.tried.append({**knobs, "samples_per_s": rate, "at_s": time.monotonic() - self.began})
        self._progress(f"{s.words}: {terminal.rate(rate)} samples/s")
        return rate

    def _tasks_of(self, batch_size: int | None) -> MeasuringTasks:
        if batch_size is None or batch_size == self.loader.batch_size:
            return self.tasks
        if batch_size not in self._resized:
            self._resized[batch_size] = self.tasks.resized(variant(self.loader, batch_size=batch_size))
        return self._resized[batch_size]

    def forget(self, s: Setting) -> None:
        """Drops the measurements of a setting that cannot be chosen."""
        del self.rates[s], self.windows[s]

    def rate(self, s: Setting) -> float:
        """The median of a setting's windows; measures the setting if needed."""
        return statistics.median(self.rates[s]) if s in self.rates else self.measure(s)

    def knee(self, settings: Iterable[Setting]) -> Setting:
        """The smallest setting within 3 % of the fastest, all of which were measured. The loader's own batch size
        stays where it is within that, because another one changes the training."""
        scores = {s: self.rate(s) for s in settings}
        least = KNEE * max(scores.values())
        return min((s for s in scores if scores[s] >= least), key=lambda s: (self._resizing(s.batch_size), *s.size))

    def _resizing(self, batch_size: int | None) -> float:
        """How far a batch size is from the loader's own, as a logarithm."""
        return abs(math.log2((batch_size or 1) / (self.loader.batch_size or batch_size or 1)))

    def alternate(self, settings: list[Setting], rounds: int) -> None:
        """Measures settings alternately, for at most ``rounds`` rounds."""
        for k in range(rounds):
            for s in settings if k % 2 == 0 else settings[::-1]:
                if self.is_over():
                    return
                self.measure(s)

    def nbytes(self, batch_size: int | None) -> int:
        """Bytes of the largest batch of a size as it crosses between processes, in proportion to those measured."""
        each = (w.nbytes * (batch_size or 1) / (s.batch_size or 1) for s, w in self.windows.items())
        return math.ceil(max(each, default=0))

    def close(self) -> None:
        """Ends all workers."""
        self.bench.close()
