"""Adapts the number of workers during an epoch by hill climbing while the consumer takes batches.

More workers are tried while the consumer waits, fewer while it does not. Each change is a trial: the next window of
batches keeps it or undoes it. Steps up double while they pay off fully, and are halved after one that did not. When no
step is left, or fewer workers made the consumer wait, the number rests, longer each time, until the load changes. A
token bucket limits the rate of changes, so that a noisy machine does not cause oscillation. The scheduler applies a
decision between two tasks; no batch changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

WINDOW_NS = 400_000_000  # one measurement; long enough that a scheduler tick on a busy machine is noise
TRIAL_WINDOWS = 2  # a trial's window is longer by this factor
SETTLE_NS = 150_000_000  # minimum time after a change; batches then in flight must also have arrived
TASKS = 4  # minimum batches per worker in a window
PAUSE_NS = 500_000_000  # the consumer did something else, such as an evaluation or a checkpoint
PAUSE = 8  # provided it also took this many times as long as a batch
WAITS = 0.1  # share of time the consumer waits, above which more workers are tried
FLOWS = 0.01  # and below which fewer are tried, after
CALM = 4  # this many such windows
PAYS = 1.05  # minimum gain from more workers: 5 %
LINEAR = 0.85  # minimum share of the linear gain that adding several workers must reach
CHANGED = 1.3  # the load has changed if the rate has moved by this factor
RETRY = 12  # windows at rest before another trial, in case the last one had a bad window; doubled each time
RETRY_MOST = 128
BURST = 16  # changes in immediate succession, at most
PER_MINUTE = 4  # changes granted per minute: the bound on a machine that never settles


class Decision(NamedTuple):
    """The new number of workers, and why."""

    workers: int
    reason: str


class ArrivalWindow(NamedTuple):
    """One measurement: batches per second, and the share of time that the consumer waited."""

    rate: float
    wait: float


class WorkersTrial(NamedTuple):
    """A change on trial: the previous number of workers, and the window that led to the change."""

    workers: int
    before: ArrivalWindow


class Windows:
    """Measures successive windows, excluding batches in flight at a change or accumulated during a pause."""

    def __init__(self, prefetch: int, clock: Callable[[], int]) -> None:
        self._prefetch, self._clock = prefetch, clock
        self._last = clock()  # time of the last delivery
        self._batch_ns = 0.0  # between two deliveries, in the last window
        self.settle(0, 1)

    def settle(self, waited_ns: int, workers: int) -> None:
        """Call when an epoch begins, or the number of workers has changed: the next window starts once the batches in
        flight have arrived."""
        self._is_settling, self._workers = True, workers  # arriving batches may predate the change
        self._begin(waited_ns)

    def _begin(self, waited_ns: int) -> None:
        self._began, self._waited, self._batches = self._clock(), waited_ns, 0

    def step(self, waited_ns: int, length_ns: int) -> ArrivalWindow | None:
        """Call for each delivered batch. Returns the window that it completes, if any."""
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap > PAUSE_NS and gap > PAUSE * self._batch_ns > 0:
            self.settle(waited_ns, self._workers)  # batches made in the meantime would make the loader seem faster
            return None
        self._batches += 1
        took = now - self._began
        if self._is_settling:
            if took >= SETTLE_NS and self._batches >= self._workers * (self._prefetch + 1):
                self._is_settling = False
                self._begin(waited_ns)
            return None
        # Whole turns: workers in step deliver in bursts, and part of a burst would distort the rate.
        if took < length_ns or self._batches < TASKS * self._workers or self._batches % self._workers:
            return None
        self._batch_ns = took / self._batches
        window = ArrivalWindow(self._batches / took * 1e9, (waited_ns - self._waited) / took)
        self._begin(waited_ns)
        return window


class Controller:
    """Watches one loader. ``most``: returns the maximum number of workers; called each time, because it depends on what
    they do. ``prefetch``: batches in flight per worker. ``clock``: nanoseconds."""

    def __init__(
        self, workers: int, most: Callable[[], int], prefetch: int = 8, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.workers = workers  # current target number of workers
        self._most, self._clock = most, clock
        self._windows = Windows(prefetch, clock)
        self._trial: WorkersTrial | None = None
        self._stride = workers  # of the next step up
        self._halving = False  # a step up did not pay off
        self._settled_rate = 0.0  # batches/s after the last change; 0: unknown
        self._calm_windows = 0
        self._rest, self._retry = 0, RETRY  # windows until the next trial, and of the next rest
        self._tokens, self._refilled = float(BURST), clock()
        self.begin(0)

    def begin(self, waited_ns: int) -> None:
        """Call when an epoch begins, or the number of workers has changed: batches in flight predate it."""
        self._windows.settle(waited_ns, self.workers)

    def step(self, waited_ns: int) -> Decision | None:
        """Call for each delivered batch. ``waited_ns``: total time that the consumer has waited for workers."""
        window = self._windows.step(waited_ns, WINDOW_NS * (1 if self._trial is None else TRIAL_WINDOWS))
        if window is None:
            return None
        decision = self._decide(window)
        if decision is not None:
            self.begin(waited_ns)
        return decision

    def _decide(self, window: ArrivalWindow) -> Decision | None:
        trial, self._trial = self._trial, None
        if trial is not None:
            undone = self._judge(trial, window)
            if undone is not None:
                return undone
        elif self._settled_rate and not 1 / CHANGED < window.rate / self._settled_rate < CHANGED:
            self._end_search(0)  # what did not pay off before may do so now
            self._settled_rate = 0.0
        self._settled_rate = self._settled_rate or window.rate
        self._calm_windows = self._calm_windows + 1 if window.wait < FLOWS else 0
        if self._rest:
            self._rest -= 1
            return None
        n, wanted = self.workers, self.workers
        if window.wait > WAITS:
            wanted = max(n, min(self._most(), n + self._stride))
        elif self._calm_windows >= CALM:
            wanted = max(1, n - 1)
        return self._try(wanted, window) if wanted != n and self._may_try() else None

    def _judge(self, trial: WorkersTrial, window: ArrivalWindow) -> Decision | None:
        """Keeps or undoes the change of a trial."""
        now, before, was = self.workers, trial.workers, trial.before
        words = f"{now} made {window.rate:.3g} batches/s, {was.rate:.3g} before"
        gain = window.rate / was.rate
        if now > before:
            if gain < PAYS or (now - before > 1 and gain < LINEAR * now / before):
                self._halving, self._stride = True, (now - before) // 2
                if not self._stride:
                    self._end_search(self._retry)
                return self._set(before, words)
            self._stride = max(1, (now - before) // 2) if self._halving else now
        elif (window.wait > was.wait + FLOWS and was.wait < WAITS) or gain * PAYS < 1:
            self._end_search(self._retry)
            if was.wait < WAITS:
                words = f"with {now} the consumer waited {window.wait:.0%} of its time"
            return self._set(before, words)
        self._retry, self._settled_rate = RETRY, window.rate
        return None

    def _end_search(self, rest: int) -> None:
        """Ends the search; the next one begins with small steps after ``rest`` windows."""
        self._rest, self._retry = rest, min(RETRY_MOST, 2 * self._retry) if rest else RETRY
        self._stride, self._halving = max(1, self.workers // 4), False

    def _may_try(self) -> bool:
        """Whether there are tokens for a trial and for undoing it."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._refilled) / 60e9 * PER_MINUTE)
        self._refilled = now
        return self._tokens >= 2

    def _try(self, workers: int, window: ArrivalWindow) -> Decision:
        self._trial = WorkersTrial(self.workers, window)
        share = f"{window.wait:.1%}" if window.wait < FLOWS else f"{window.wait:.0%}"
        return self._set(workers, f"the consumer waits {share} of its time")

    def _set(self, workers: int, reason: str) -> Decision:
        before, self.workers = self.workers, workers
        self._calm_windows = 0
        self._tokens -= 1
        return Decision(workers, f"{before} -> {workers} workers: {reason}")
