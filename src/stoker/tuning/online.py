"""The number of workers while an epoch runs: more while the consumer waits and it pays, fewer while it does not wait.

One change at a time, each kept only if the next window shows that it paid, and none repeated before the load has
changed. The scheduler carries a decision out between two tasks; no batch changes by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

WINDOW_NS = 500_000_000  # one look; long enough that a scheduler tick of a busy machine is noise
TASKS = 8  # and at least so many batches for each worker
WAITS = 0.1  # share of the time that the consumer waits, above which more workers are tried
FLOWS = 0.01  # and below which fewer are, after
CALM = 4  # windows of that
PAYS = 1.05  # a worker more has to bring 5 %
CHANGED = 1.3  # the load is another one when the rate has moved by so much


class Decision(NamedTuple):
    """What is to be done with a knob, and why."""

    knob: str
    value: int
    reason: str


class _Trial(NamedTuple):
    workers: int
    rate: float
    wait: float


class Controller:
    """Watches one loader.

    Args:
        workers: how many there are.
        most: how many there may be; asked each time, because it depends on what the workers do.
        measured: whether the count is known to be the knee already.
        clock: nanoseconds.
    """

    def __init__(
        self,
        workers: int,
        most: Callable[[], int],
        measured: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.workers = workers
        self._most, self._clock = most, clock
        self._trial: _Trial | None = None
        self._more = not measured  # worth trying
        self._fewer = True
        self._calm = 0
        self._settled = 0.0
        self._fresh = True
        self.begin(0)

    def begin(self, waited_ns: int) -> None:
        """A window begins: an epoch did, or the last window is over."""
        self._began, self._waited = self._clock(), waited_ns
        self._batches, self._look = 0, TASKS * self.workers

    def step(self, waited_ns: int) -> Decision | None:
        """A batch was delivered.

        Args:
            waited_ns: how long the consumer has waited for workers, all in all.
        """
        self._batches += 1
        if self._batches < self._look:
            return None
        now = self._clock()
        took = now - self._began
        if took < WINDOW_NS:
            self._look = self._batches + TASKS * self.workers
            return None
        rate, wait = self._batches / took * 1e9, (waited_ns - self._waited) / took
        self.begin(waited_ns)
        if self._fresh:  # the first window after a change has its start in it
            self._fresh = False
            return None
        return self._decide(rate, wait)

    def _decide(self, rate: float, wait: float) -> Decision | None:
        trial, self._trial = self._trial, None
        if trial is not None and trial.workers < self.workers:
            if rate < PAYS * trial.rate:
                self._more = False
                return self._set(trial.workers, f"{self.workers} made {rate:.3g} batches/s, {trial.rate:.3g} before")
            self._settled = rate
        elif trial is not None:
            if wait > trial.wait + FLOWS or rate * PAYS < trial.rate:
                self._fewer = False
                return self._set(trial.workers, f"with {self.workers} the consumer waited {wait:.0%} of its time")
            self._settled = rate
        if self._settled and not 1 / CHANGED < rate / self._settled < CHANGED:
            self._more = self._fewer = True
            self._settled = 0.0
        self._settled = self._settled or rate
        self._calm = self._calm + 1 if wait < FLOWS else 0
        most = self._most()
        if wait > WAITS and self._more and self.workers < most:
            self._trial = _Trial(self.workers, rate, wait)
            n = min(most, self.workers + max(1, self.workers // 4))
            return self._set(n, f"the consumer waits {wait:.0%} of its time")
        if self._calm >= CALM and self._fewer and self.workers > 1:
            self._trial = _Trial(self.workers, rate, wait)
            return self._set(self.workers - 1, f"the consumer waits {wait:.1%} of its time")
        return None

    def _set(self, workers: int, reason: str) -> Decision:
        words = f"{self.workers} -> {workers} workers: {reason}"
        self.workers, self._fresh, self._calm = workers, True, 0
        return Decision("num_workers", workers, words)
