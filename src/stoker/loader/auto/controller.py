"""The number of workers while an epoch runs: more while the consumer waits and it pays, fewer while it does not wait.

Hill climbing with one knob. Each change is a trial: it is kept only if the next window shows that it paid, and not
repeated before the load has changed. Decisions are rationed by a token bucket, so that a noisy machine moves nothing to
and fro. The scheduler carries a decision out between two tasks; no batch changes by it.

::

             a window of batches is over                the trial paid, or was undone
    SETTLING ------------------------> MEASURING -> decide -> SETTLING
       ^                                                |
       +------------- a change was made, a pause -------+
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

WINDOW_NS = 400_000_000  # one measurement; long enough that a scheduler tick of a busy machine is noise
SETTLE_NS = 150_000_000  # after a change, and until what was in flight then has come
TASKS = 4  # and at least so many batches for each worker
PAUSE_NS = 500_000_000  # the consumer did something else: an evaluation, a checkpoint
PAUSE = 8  # if it was also so many times a batch's time
WAITS = 0.1  # share of the time that the consumer waits, above which more workers are tried
FLOWS = 0.01  # and below which fewer are, after
CALM = 4  # windows of that
PAYS = 1.05  # more workers have to bring 5 %
UNSURE = 0.05  # so near to that, a window as long again decides
LINEAR = 0.8  # what doubling brought of what it could have, for the next step to double again
CHANGED = 1.3  # the load is another one when the rate has moved by so much
PATIENCE = 4  # windows between two changes of the load; doubled when there was nothing to be had
RETRY = 12  # windows at rest until what did not pay is tried once more, for one window may have been a bad one; doubled
LONGEST = 128
BURST = 16  # decisions that may follow each other
PER_MINUTE = 4  # and what they are refilled by: the bound on a machine that never comes to rest


class Decision(NamedTuple):
    """How many workers there are to be, and why."""

    workers: int
    reason: str


class Trial(NamedTuple):
    """What there was before a change that is being tried: workers, batches/s, the share of time that was waited."""

    workers: int
    rate: float
    wait: float


class State(Enum):
    """SETTLING: what arrives is still from before a change. MEASURING: a window is being counted."""

    SETTLING = 1
    MEASURING = 2


class Controller:
    """Watches one loader.

    Args:
        workers: how many there are.
        most: how many there may be; asked each time, because it depends on what the workers do.
        measured: whether the count is known to be the knee already.
        prefetch: batches in flight for each worker.
        clock: nanoseconds.

    Attributes:
        workers: as many as there are to be now.
    """

    def __init__(
        self,
        workers: int,
        most: Callable[[], int],
        measured: bool = False,
        prefetch: int = 8,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.workers = workers
        self._prefetch, self._most, self._clock = prefetch, most, clock
        self._trial: Trial | None = None
        self._more_may_pay = not measured
        self._fewer_may_do = True
        self._past_knee = False  # the last step up brought less than it could: fewer may make as much
        self._stride = workers  # of the next step up
        self._calm_windows = 0
        self._settled_rate = 0.0  # batches/s when it came to rest
        self._windows_since_wake = 0
        self._patience = PATIENCE
        self._moved = True  # since the load changed, something was changed for good
        self._twice_as_long = False  # the window goes on, because its answer was too close
        self._windows_at_rest = 0
        self._retry = RETRY
        self._last = clock()  # delivery
        self._typical_ns = 0.0  # between two deliveries
        self._tokens = float(BURST)
        self._refilled = clock()
        self.begin(0)

    def begin(self, waited_ns: int) -> None:
        """An epoch begins, or a change was made: what is in flight still comes from before."""
        self._state = State.SETTLING
        self._window(waited_ns)
        self._enough = self.workers * (self._prefetch + 1)

    def _window(self, waited_ns: int) -> None:
        self._began = self._clock()
        self._waited = waited_ns
        self._batches = 0
        self._enough = TASKS * self.workers

    def step(self, waited_ns: int) -> Decision | None:
        """A batch was delivered.

        Args:
            waited_ns: how long the consumer has waited for workers, all in all.
        """
        now = self._clock()
        gap, self._last = now - self._last, now
        self._batches += 1
        if gap > PAUSE_NS and gap > PAUSE * self._typical_ns > 0:
            self.begin(waited_ns)  # what was made meanwhile comes at once, and would pass for a faster loader
            return None
        if self._batches < self._enough:
            return None
        took = now - self._began
        if self._state is State.SETTLING:
            if took >= SETTLE_NS:
                self._state = State.MEASURING
                self._window(waited_ns)
            return None
        if took < WINDOW_NS * (1 + self._twice_as_long):
            self._enough = self._batches + self.workers
            return None
        self._typical_ns = took / self._batches
        rate, wait = self._batches / took * 1e9, (waited_ns - self._waited) / took
        if self._is_unsure(rate) and not self._twice_as_long:
            self._twice_as_long = True
            self._enough = 2 * self._batches
            return None
        self._twice_as_long = False
        decision = self._decide(rate, wait)
        (self._window if decision is None else self.begin)(waited_ns)
        return decision

    def _is_unsure(self, rate: float) -> bool:
        t = self._trial
        return t is not None and t.workers < self.workers and abs(rate / t.rate / PAYS - 1) < UNSURE

    def _decide(self, rate: float, wait: float) -> Decision | None:
        self._windows_since_wake += 1
        trial, self._trial = self._trial, None
        if trial is not None:
            undone = self._judge(trial, rate, wait)
            if undone is not None:
                return undone
        elif self._settled_rate and not 1 / CHANGED < rate / self._settled_rate < CHANGED:
            self._wake()
        self._settled_rate = self._settled_rate or rate
        self._calm_windows = self._calm_windows + 1 if wait < FLOWS else 0
        if not self._may_try():
            return None
        n, most = self.workers, self._most()
        if wait > WAITS and self._more_may_pay and n < most:
            return self._try(min(most, n + max(1, self._stride)), rate, wait)
        if wait > WAITS and self._past_knee and n > 1:
            return self._try(n - max(1, n // 4), rate, wait)
        if self._calm_windows >= CALM and self._fewer_may_do and n > 1:
            return self._try(n - 1, rate, wait)
        self._windows_at_rest += 1
        if wait > WAITS and self._windows_at_rest >= self._retry:
            self._windows_at_rest, self._retry = 0, min(LONGEST, 2 * self._retry)
            self._more_may_pay = True
            self._stride = max(1, n // 4)
        return None

    def _may_try(self) -> bool:
        """Whether there are tokens for a trial and its undoing."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._refilled) / 60e9 * PER_MINUTE)
        self._refilled = now
        return self._tokens >= 2

    def _judge(self, trial: Trial, rate: float, wait: float) -> Decision | None:
        """Keeps what a trial changed, or undoes it."""
        now, before = self.workers, trial.workers
        words = f"{now} made {rate:.3g} batches/s, {trial.rate:.3g} before"
        if now < before:
            slower = rate * PAYS < trial.rate
            if slower or (wait > trial.wait + FLOWS and trial.wait < WAITS):
                self._fewer_may_do = self._past_knee = False
                if trial.wait < WAITS:
                    words = f"with {now} the consumer waited {wait:.0%} of its time"
                return self._set(before, words)
        elif rate < PAYS * trial.rate:
            self._stride //= 2
            if not self._stride or now - before == 1:
                self._more_may_pay = False
            return self._set(before, words)
        else:
            linear = rate / trial.rate >= LINEAR * now / before
            self._stride = now if linear else max(1, now // 4)
            self._past_knee = self._past_knee or not linear
            self._retry = RETRY
        self._moved = True
        self._settled_rate = rate
        return None

    def _wake(self) -> None:
        """The load is another one. The more often that led nowhere, the longer until it is believed again."""
        if self._windows_since_wake < self._patience:
            return
        self._patience = PATIENCE if self._moved else min(LONGEST, 2 * self._patience)
        self._windows_since_wake = 0
        self._moved = False
        self._more_may_pay = self._fewer_may_do = self._past_knee = True
        self._stride = max(1, self.workers // 4)
        self._windows_at_rest = 0
        self._retry = RETRY
        self._settled_rate = 0.0

    def _try(self, workers: int, rate: float, wait: float) -> Decision:
        self._trial = Trial(self.workers, rate, wait)
        share = f"{wait:.1%}" if wait < FLOWS else f"{wait:.0%}"
        return self._set(workers, f"the consumer waits {share} of its time")

    def _set(self, workers: int, reason: str) -> Decision:
        before, self.workers = self.workers, workers
        self._calm_windows = self._windows_at_rest = 0
        self._tokens -= 1
        return Decision(workers, f"{before} -> {workers} workers: {reason}")
