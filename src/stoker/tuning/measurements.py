"""Settings measured against each other: warm benches, short windows in turns, a stop when the difference is sure."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from ..core.options import Budget
from ..loader import engine
from ..loader.auto.bench import Bench, PoolBench, Window
from ..loader.auto.model import KNEE
from ..loader.auto.remote import Remote
from ..loader.auto.tasks import Tasks
from ..loader.variant import variant
from .result import Setting, figure
from .statistics import gain, paired

WINDOW_S = 0.25  # one measurement; long enough that a scheduler tick of a busy machine is noise
TASKS = 3  # and at least so many batches of each worker
PAIRS = 1  # in which two settings meet, at most
BLOCKS = 8  # of a race, at most
MUCH = 1.05  # faster by this
DECIDES = 1.28  # normal quantile of the interval that ends a contest: 80 %; what is shown is 95 %
RESERVE = 0.1  # share of the budget that is left for the last window, and for the answer
RACE_RESERVE = 0.45  # and for the last race, until that begins


@dataclass
class Seen:
    """All that was measured of one setting."""

    rates: list[float] = field(default_factory=list)
    window: Window | None = None

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


class Measurements:
    """What was measured, and what measures it.

    Args:
        loader: what to tune.
        budget_s: seconds it may take.
        progress: called with a line for each measurement.

    Attributes:
        seen: by setting.
        tried: all windows, in order.
        streams: the dataset is iterable.
    """

    def __init__(self, loader: Any, budget_s: float, progress: Callable[[str], None]) -> None:
        self.loader, self.progress = loader, progress
        self.began = time.monotonic()
        self.deadline = self.began + budget_s
        self.budget_s = budget_s
        self.budget: Budget = engine.budget(loader)
        self.tasks = Tasks(loader)
        self.seen: dict[Setting, Seen] = {}
        self.tried: list[dict[str, Any]] = []
        self.streams = loader._dataset_kind == _DatasetKind.Iterable
        self._benches: dict[tuple[str, int | None], Bench] = {}
        self.reserve = RACE_RESERVE
        self._met: dict[tuple[Setting, Setting], tuple[list[float], list[float]]] = {}
        self._running: Bench | None = None
        self._last: list[Setting] = []  # two, at most
        self._loaders: dict[int | None, Any] = {loader.batch_size: loader}
        self._tasks: dict[int | None, Tasks] = {loader.batch_size: self.tasks}

    def left(self) -> float:
        """Seconds left."""
        return self.deadline - time.monotonic()

    def bench(self, s: Setting) -> Bench:
        method = s.worker_method if s.num_workers else "inline"
        key = method, s.batch_size
        bench = self._benches.get(key)
        if bench is None:
            loader, tasks = self.of(s)
            if method == "process":
                bench = PoolBench(loader, tasks, method, self.budget, self.deadline)
            else:
                bench = Remote(loader, tasks, method, self.budget, self.deadline)
            self._benches[key] = bench
        if self._running is not None and self._running is not bench:
            self._running.rest()
        self._running = bench
        return bench

    def of(self, s: Setting) -> tuple[Any, Tasks]:
        size = s.batch_size
        if size not in self._loaders:
            self._loaders[size] = variant(self.loader, batch_size=size, num_workers=0)
            self._tasks[size] = Tasks(self._loaders[size])
            self._tasks[size].fresh = self.tasks.fresh
        return self._loaders[size], self._tasks[size]

    def measure(self, s: Setting) -> Seen:
        """One window more of a setting."""
        w = self.bench(s).window(s.num_workers, s.prefetch_factor, self.window_s(), TASKS)
        seen = self.seen.setdefault(s, Seen())
        rate = w.rate * self.of(s)[1].samples
        seen.rates.append(rate)
        seen.window = w
        self._last = [*self._last[-1:], s]
        self.tried.append({**knobs_of(s), "samples_per_s": rate, "at_s": time.monotonic() - self.began})
        self.progress(f"{words_of(s)}: {figure(rate)} samples/s")
        return seen

    def window_s(self) -> float:
        return min(WINDOW_S, max(0.05, self.budget_s / 60))

    def over(self) -> bool:
        """Whether there is no time for another window: what the last ones took is what the next will take."""
        return self.left() < self.reserve * self.budget_s

    def better(self, a: Setting, b: Setting, by: float) -> bool:
        """Whether ``b`` is faster than ``a`` by the factor ``by``. What is known may be enough; else they are measured
        one right after the other, for a machine that is slow for a second is slow for both."""
        for s in (a, b):
            if s not in self.seen:
                self.measure(s)
        ratio, low, high = gain(self.seen[a].rates, self.seen[b].rates, DECIDES)
        x, y = self._met.setdefault((a, b), ([], []))
        if x:
            ratio, low, high = paired(x, y, DECIDES)
        while not self.over():
            alone = high < by and len(self.seen[b].rates) < 2  # one bad window is no verdict
            if not alone and not (low <= by <= high and len(x) < PAIRS):
                break
            if not x and not alone and set(self._last) == {a, b}:
                rates = {s: self.seen[s].rates[-1] for s in (a, b)}
            else:
                rates = {s: self.measure(s).rates[-1] for s in ((a, b) if self._last[-1] != b else (b, a))}
            x.append(rates[a])
            y.append(rates[b])
            ratio, low, high = paired(x, y, DECIDES)
        return ratio > by

    def race(self, entrants: list[Setting], until: float, size: Callable[[Setting], Any]) -> Setting | None:
        """The smallest within 3 % of the fastest. A block is a window of each, one right after the other. Who is surely
        slower than that leaves; it is over when surely nobody is much faster than who would win now (O. Maron, A. W.
        Moore, "Hoeffding Races", 1993; with blocks instead of independent samples). Where that stays open until the
        time is over, the smaller one does not win.

        Args:
            entrants: two or more.
            until: ``time.monotonic()`` after which no block begins.
            size: what "smallest" goes by.

        Returns:
            None where there was no time for one block.
        """
        rates: dict[Setting, list[float]] = {s: [] for s in entrants}
        winner = None
        for block in range(BLOCKS):
            if time.monotonic() > until or self.over():
                break
            for s in rates if block % 2 == 0 else list(rates)[::-1]:
                rates[s].append(self.measure(s).rates[-1])
            lead = max(rates, key=lambda s: math.prod(rates[s]))
            spans = {s: paired(rates[lead], rates[s], DECIDES) for s in rates}
            near = [s for s in rates if spans[s][0] >= KNEE]
            winner = min(near, key=size)
            if block:
                if all(paired(rates[winner], r, DECIDES)[2] < MUCH for r in rates.values()):
                    break
                winner = min((s for s in near if s is lead or spans[s][1] > 1 / MUCH), key=size)
                rates = {s: r for s, r in rates.items() if spans[s][2] >= KNEE}
        return winner

    def rest(self) -> None:
        """Nothing runs until the next measurement."""
        if self._running is not None:
            self._running.rest()

    def restart_s(self, s: Setting) -> float:
        """Seconds from no workers to the first batch."""
        self.rest()
        loader, tasks = self.of(s)
        bench = PoolBench(loader, tasks, s.worker_method, self.budget, self.deadline)
        began = time.monotonic()
        try:
            bench.first(s.num_workers)
            return time.monotonic() - began
        finally:
            bench.close()

    def close(self) -> None:
        """Ends all workers."""
        for bench in self._benches.values():
            bench.close()


def knobs_of(s: Setting) -> dict[str, Any]:
    return {
        "num_workers": s.num_workers,
        "worker_method": s.worker_method,
        "prefetch_factor": s.prefetch_factor,
        "batch_size": s.batch_size,
    }


def words_of(s: Setting) -> str:
    if not s.num_workers:
        return "no workers"
    size = "" if s.batch_size is None else f", batch {s.batch_size}"
    kind = "thread" if s.worker_method == "thread" else "process"
    if s.num_workers > 1:
        kind += "s" if kind == "thread" else "es"
    return f"{s.num_workers} {kind}, prefetch {s.prefetch_factor}{size}"
