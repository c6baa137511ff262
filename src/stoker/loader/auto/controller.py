"""Who decides the number of workers in mid-epoch: hill climbing with one knob, while the consumer takes batches.

More workers are tried while the consumer waits, fewer while it does not. Each change is a trial: the next window of
batches keeps it or undoes it. A token bucket rations changes, so that a noisy machine does not move the number to and
fro. The scheduler carries a decision out between two tasks; no batch changes by it.

::

    GROWING ---> FLATTENING ---> NARROWING ---> RESTING      the consumer waits: more workers, until they do not pay;
       |  ^          |               |           ^   |       then fewer, if the last steps up brought little
       v  |          |               |           |   |
    SHRINKING <------+---------------+           |   |       the consumer does not wait: fewer workers
       |                                         |   |
       +-----------------------------------------+   |       with fewer it waits
                                                     |
    GROWING or SHRINKING <---------------------------+       after a while, one more trial

    any state ---> GROWING                                   the load has changed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

WINDOW_NS = 400_000_000  # one measurement; long enough that a scheduler tick of a busy machine is noise
TRIAL_WINDOWS = 2  # a trial is judged by a window that is longer by this factor
SETTLE_NS = 150_000_000  # after a change, and until what was in flight then has come
TASKS = 4  # batches of each worker in a window, at least
PAUSE_NS = 500_000_000  # the consumer did something else: an evaluation, a checkpoint
PAUSE = 8  # if it also took this many times as long as a batch
WAITS = 0.1  # share of the time that the consumer waits, above which more workers are tried
FLOWS = 0.01  # and below which fewer are, after
CALM = 4  # windows of that
PAYS = 1.05  # more workers have to bring 5 %
LINEAR = 0.8  # what doubling brought of what it could have, for the next step to double again
CHANGED = 1.3  # the load is another one when the rate has moved by this factor
RETRY = 12  # windows at rest until one more trial, for the last one may have had a bad window; doubled each time
RETRY_MOST = 128
BURST = 16  # changes that may follow each other
PER_MINUTE = 4  # changes that are granted anew: the bound on a machine that never comes to rest


class State(Enum):
    """What may be tried next."""

    GROWING = "more workers may pay"
    FLATTENING = "more may pay, but the last step up brought less than it could"
    NARROWING = "more do not pay, and fewer may make as much"
    SHRINKING = "the consumer does not wait, and fewer may do"
    RESTING = "neither more nor fewer are better"


MOVES = {
    State.GROWING: {State.GROWING, State.FLATTENING, State.SHRINKING, State.RESTING},
    State.FLATTENING: {State.GROWING, State.FLATTENING, State.NARROWING, State.SHRINKING},
    State.NARROWING: {State.GROWING, State.SHRINKING, State.RESTING},
    State.SHRINKING: {State.GROWING, State.RESTING},
    State.RESTING: {State.GROWING, State.SHRINKING},
}


class Decision(NamedTuple):
    """How many workers there are to be, and why."""

    workers: int
    reason: str


class Window(NamedTuple):
    """One measurement: batches per second, and the share of the time that the consumer waited."""

    rate: float
    wait: float


class Trial(NamedTuple):
    """A change that is being tried: the number of workers before it, and the window that led to it."""

    workers: int
    before: Window


class Phase(Enum):
    """Whether what arrives is still from before a change, or a window is being counted."""

    SETTLING = 1
    MEASURING = 2


class Windows:
    """Measures one window after the other, without what was in flight at a change or piled up in a pause.

    Args:
        prefetch: batches in flight for each worker.
        clock: nanoseconds.
    """

    def __init__(self, prefetch: int, clock: Callable[[], int]) -> None:
        self._prefetch, self._clock = prefetch, clock
        self._last = clock()  # delivery
        self._batch_ns = 0.0  # between two deliveries, in the last window
        self.settle(0, 1)

    def settle(self, waited_ns: int, workers: int) -> None:
        """An epoch begins, or there are now ``workers``: the next window begins when what is in flight has come."""
        self._phase, self._workers = Phase.SETTLING, workers
        self._begin(waited_ns)

    def _begin(self, waited_ns: int) -> None:
        self._began, self._waited, self._batches = self._clock(), waited_ns, 0

    def step(self, waited_ns: int, length_ns: int) -> Window | None:
        """A batch was delivered. Returns the window that ends with it, if one does."""
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap > PAUSE_NS and gap > PAUSE * self._batch_ns > 0:
            self.settle(waited_ns, self._workers)  # what was made meanwhile would pass for a faster loader
            return None
        self._batches += 1
        took = now - self._began
        if self._phase is Phase.SETTLING:
            if took >= SETTLE_NS and self._batches >= self._workers * (self._prefetch + 1):
                self._phase = Phase.MEASURING
                self._begin(waited_ns)
            return None
        # Whole turns: workers in step deliver in bursts, and part of a burst would falsify the rate.
        if took < length_ns or self._batches < TASKS * self._workers or self._batches % self._workers:
            return None
        self._batch_ns = took / self._batches
        window = Window(self._batches / took * 1e9, (waited_ns - self._waited) / took)
        self._begin(waited_ns)
        return window


class Controller:
    """Watches one loader.

    Args:
        workers: how many there are.
        most: how many there may be; asked each time, because it depends on what the workers do.
        measured: ``stoker tune`` has found the number, so the first trial can wait.
        prefetch: batches in flight for each worker.
        clock: nanoseconds.

    Attributes:
        workers: as many as there are to be now.
        state: what may be tried next.
    """

    def __init__(
        self,
        workers: int,
        most: Callable[[], int],
        measured: bool = False,
        prefetch: int = 8,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.workers, self.state = workers, State.RESTING if measured else State.GROWING
        self._most, self._clock = most, clock
        self._windows = Windows(prefetch, clock)
        self._trial: Trial | None = None
        self._stride = workers  # of the next step up
        self._settled_rate = 0.0  # batches/s after the last change; 0: not known
        self._calm_windows = 0
        self._windows_at_rest, self._retry = 0, RETRY
        self._tokens, self._refilled = float(BURST), clock()
        self.begin(0)

    def begin(self, waited_ns: int) -> None:
        """An epoch begins, or the number of workers was changed: what is in flight still comes from before."""
        self._windows.settle(waited_ns, self.workers)

    def step(self, waited_ns: int) -> Decision | None:
        """A batch was delivered.

        Args:
            waited_ns: how long the consumer has waited for workers, all in all.
        """
        window = self._windows.step(waited_ns, WINDOW_NS * (1 if self._trial is None else TRIAL_WINDOWS))
        if window is None:
            return None
        decision = self._decide(window)
        if decision is not None:
            self.begin(waited_ns)
        return decision

    def _decide(self, window: Window) -> Decision | None:
        trial, self._trial = self._trial, None
        if trial is not None:
            undone = self._judge(trial, window)
            if undone is not None:
                return undone
        elif self._settled_rate and not 1 / CHANGED < window.rate / self._settled_rate < CHANGED:
            self._wake()
        self._settled_rate = self._settled_rate or window.rate
        self._calm_windows = self._calm_windows + 1 if window.wait < FLOWS else 0
        return self._next_trial(window) if self._may_try() else None

    def _next_trial(self, window: Window) -> Decision | None:
        n = self.workers
        waits, calm = window.wait > WAITS, self._calm_windows >= CALM
        if self.state is State.RESTING:
            self._windows_at_rest += 1
            if self._windows_at_rest < self._retry or not (waits or calm):
                return None
            self._retry = min(RETRY_MOST, 2 * self._retry)
            self._go(State.GROWING if waits else State.SHRINKING)
        elif waits and self.state is State.SHRINKING:
            self._go(State.GROWING)
        elif calm and self.state is not State.SHRINKING:
            self._go(State.SHRINKING)
        if waits and self.state in (State.GROWING, State.FLATTENING):
            most = self._most()
            if n < most:
                return self._try(min(most, n + self._stride), window)
            self._go(State.RESTING if self.state is State.GROWING else State.NARROWING)
        if waits and self.state is State.NARROWING:
            if n > 1:
                return self._try(n - max(1, n // 4), window)
            self._go(State.RESTING)
        if calm and self.state is State.SHRINKING and n > 1:
            return self._try(n - 1, window)
        return None

    def _judge(self, trial: Trial, window: Window) -> Decision | None:
        """Keeps what a trial changed, or undoes it."""
        now, before, was = self.workers, trial.workers, trial.before
        words = f"{now} made {window.rate:.3g} batches/s, {was.rate:.3g} before"
        if now > before:
            if window.rate < PAYS * was.rate:
                self._stride //= 2
                if not self._stride or now - before == 1:
                    self._go(State.RESTING if self.state is State.GROWING else State.NARROWING)
                return self._set(before, words)
            is_linear = window.rate / was.rate >= LINEAR * now / before
            if not is_linear:
                self._go(State.FLATTENING)
            self._stride, self._retry = now if is_linear else max(1, now // 4), RETRY
        else:
            waits_now = window.wait > was.wait + FLOWS and was.wait < WAITS
            if waits_now or window.rate * PAYS < was.rate:
                self._go(State.RESTING)
                if was.wait < WAITS:
                    words = f"with {now} the consumer waited {window.wait:.0%} of its time"
                return self._set(before, words)
        self._settled_rate = window.rate
        return None

    def _wake(self) -> None:
        """The load has changed: what did not pay before may pay now."""
        self._go(State.GROWING)
        self._retry = RETRY
        self._settled_rate = 0.0

    def _go(self, state: State) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.state = state
        self._windows_at_rest = 0
        if state is State.GROWING:
            self._stride = max(1, self.workers // 4)

    def _may_try(self) -> bool:
        """Whether there are tokens for a trial and its undoing."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._refilled) / 60e9 * PER_MINUTE)
        self._refilled = now
        return self._tokens >= 2

    def _try(self, workers: int, window: Window) -> Decision:
        self._trial = Trial(self.workers, window)
        share = f"{window.wait:.1%}" if window.wait < FLOWS else f"{window.wait:.0%}"
        return self._set(workers, f"the consumer waits {share} of its time")

    def _set(self, workers: int, reason: str) -> Decision:
        before, self.workers = self.workers, workers
        self._calm_windows = 0
        self._tokens -= 1
        return Decision(workers, f"{before} -> {workers} workers: {reason}")
