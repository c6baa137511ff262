"""The number of workers, and how far ahead they work, while an epoch runs: more while the consumer waits and it pays,
fewer while it does not wait. And where batches are so short that to be woken for each costs a part of it, how many are
waited for together (interrupt coalescing: Mogul and Ramakrishnan, "Eliminating receive livelock in an interrupt-driven
kernel", USENIX 1996).

One knob at a time, each change kept only if the next window shows that it paid, and none repeated before the load has
changed; and decisions are rationed (a token bucket), so that a restless machine moves nothing to and fro. The
scheduler carries a decision out between two tasks; no batch changes by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

WINDOW_NS = 400_000_000  # one look; long enough that a scheduler tick of a busy machine is noise
SETTLE_NS = 150_000_000  # after a change, and until what was in flight then has come
TASKS = 4  # and at least so many batches for each worker
PAUSE_NS = 500_000_000  # the consumer did something else: an evaluation, a checkpoint
PAUSE = 8  # if it was also so many times a batch's time
WAITS = 0.1  # share of the time that the consumer waits, above which more is tried
FLOWS = 0.01  # and below which less is, after
CALM = 4  # windows of that
PAYS = 1.05  # more workers have to bring 5 %
PAYS_DEEPER = 1.02  # more in flight, which cost memory that has a budget, and no core
UNSURE = 0.05  # so near to that, a window as long again decides
SHORT_NS = 500_000  # batches that come so close together may be waited for together
COALESCE = 3  # then a third of those in flight are: nobody runs dry meanwhile
LATEST_US = 1000  # and none comes later than by this
LINEAR = 0.8  # what doubling brought of what it could have, for the next step to double again
CHANGED = 1.3  # the load is another one when the rate has moved by so much
DEEPEST = 8  # prefetch_factor
USUAL = 2  # torch's; with less a worker stands still until its batch is fetched, so that is tried first
PATIENCE = 4  # windows between two changes of the load; doubled when there was nothing to be had
RETRY = 12  # windows at rest until what did not pay is tried once more, for one window may have been a bad one; doubled
LONGEST = 128
BURST = 16  # decisions that may follow each other
PER_MINUTE = 4  # and what they are refilled by: the bound on a machine that never comes to rest


# What a knob is called here, and in a decision.
_KNOBS = {
    "num_workers": ("workers", "workers"),
    "prefetch_factor": ("prefetch", "in flight for each worker"),
    "coalesce_us": ("coalesce", "us in which batches gather before the consumer wakes"),
}


def _pays(knob: str) -> float:
    return PAYS if knob == "num_workers" else PAYS_DEEPER


class Decision(NamedTuple):
    """What is to be done with a knob, and why."""

    knob: str
    value: int
    reason: str


class _Trial(NamedTuple):
    knob: str
    before: int
    rate: float
    wait: float


class Controller:
    """Watches one loader.

    Args:
        workers: how many there are.
        most: how many there may be; asked each time, because it depends on what the workers do.
        measured: whether the count is known to be the knee already.
        prefetch: batches in flight for each worker.
        clock: nanoseconds.

    Attributes:
        workers, prefetch: as they are to be now.
        coalesce: microseconds that the consumer sleeps when it has to wait, before it looks at what has come.
    """

    def __init__(
        self,
        workers: int,
        most: Callable[[], int],
        measured: bool = False,
        prefetch: int = DEEPEST,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.workers, self.prefetch, self.coalesce = workers, prefetch, 0
        self._most, self._clock = most, clock
        self._trial: _Trial | None = None
        self._more = not measured  # worth trying
        self._deeper = self._fewer = self._together = True
        self._down = False  # whether fewer make as much, though the consumer waits
        self._stride = workers
        self._calm = 0
        self._settled = 0.0
        self._since, self._patience, self._moved = 0, PATIENCE, True
        self._longer = False
        self._rest, self._retry = 0, RETRY
        self._last, self._typical = clock(), 0.0
        self._ration, self._refilled = float(BURST), clock()
        self.begin(0)

    def begin(self, waited_ns: int) -> None:
        """An epoch begins, or a change was made: what is in flight still comes from before."""
        self._settling = True
        self._window(waited_ns)
        self._look = self.workers * (self.prefetch + 1)

    def _window(self, waited_ns: int) -> None:
        self._began, self._waited = self._clock(), waited_ns
        self._batches, self._look = 0, TASKS * self.workers

    def step(self, waited_ns: int) -> Decision | None:
        """A batch was delivered.

        Args:
            waited_ns: how long the consumer has waited for workers, all in all.
        """
        now = self._clock()
        gap, self._last = now - self._last, now
        self._batches += 1
        if gap > PAUSE_NS and gap > PAUSE * self._typical > 0:
            self.begin(waited_ns)  # what was made meanwhile comes at once, and would pass for a faster loader
            return None
        if self._batches < self._look:
            return None
        took = now - self._began
        if self._settling:
            if took >= SETTLE_NS:
                self._settling = False
                self._window(waited_ns)
            return None
        if took < WINDOW_NS * (1 + self._longer):
            self._look = self._batches + self.workers
            return None
        self._typical = took / self._batches
        rate, wait = self._batches / took * 1e9, (waited_ns - self._waited) / took
        if self._is_unsure(rate) and not self._longer:
            self._longer = True
            self._look = 2 * self._batches
            return None
        self._longer = False
        decision = self._decide(rate, wait)
        (self._window if decision is None else self.begin)(waited_ns)
        return decision

    def _is_unsure(self, rate: float) -> bool:
        t = self._trial
        return t is not None and t.before < self._value(t.knob) and abs(rate / t.rate / _pays(t.knob) - 1) < UNSURE

    def _value(self, knob: str) -> int:
        return int(getattr(self, _KNOBS[knob][0]))

    def _decide(self, rate: float, wait: float) -> Decision | None:
        self._since += 1
        trial, self._trial = self._trial, None
        if trial is not None:
            undone = self._judge(trial, rate, wait)
            if undone is not None:
                return undone
        elif self._settled and not 1 / CHANGED < rate / self._settled < CHANGED:
            self._wake()
        self._settled = self._settled or rate
        self._calm = self._calm + 1 if wait < FLOWS else 0
        now = self._clock()
        self._ration = min(BURST, self._ration + (now - self._refilled) / 60e9 * PER_MINUTE)
        self._refilled = now
        if self._ration < 2:  # a trial, and its undoing
            return None
        if self.coalesce and self._typical > SHORT_NS:
            return self._set("coalesce_us", 0, "batches take longer now")
        most = self._most()
        if wait > WAITS and self._deeper and self.prefetch < USUAL:
            return self._try("prefetch_factor", USUAL, rate, wait)
        if wait > WAITS and self._more and self.workers < most:
            return self._try("num_workers", min(most, self.workers + max(1, self._stride)), rate, wait)
        if wait > WAITS and self._deeper and self.prefetch < DEEPEST:
            return self._try("prefetch_factor", min(DEEPEST, 2 * self.prefetch), rate, wait)
        if wait > WAITS and self._together and self._typical <= SHORT_NS:
            us = min(LATEST_US, int(self._typical / 1e3 * self.workers * self.prefetch / COALESCE))
            if us > 1.5 * self.coalesce:
                return self._try("coalesce_us", us, rate, wait)
        if wait > WAITS and self._down and self.workers > 1:
            return self._try("num_workers", self.workers - max(1, self.workers // 4), rate, wait)
        if self._calm >= CALM and self._fewer and self.workers > 1:
            return self._try("num_workers", self.workers - 1, rate, wait)
        self._rest += 1
        if wait > WAITS and self._rest >= self._retry:
            self._rest, self._retry = 0, min(LONGEST, 2 * self._retry)
            self._more = self._deeper = self._together = True
            self._stride = max(1, self.workers // 4)
        return None

    def _judge(self, trial: _Trial, rate: float, wait: float) -> Decision | None:
        """Keeps what a trial changed, or undoes it."""
        now = self._value(trial.knob)
        words = f"{now} made {rate:.3g} batches/s, {trial.rate:.3g} before"
        if now > trial.before:
            if rate < _pays(trial.knob) * trial.rate:
                self._stride //= 2
                if trial.knob == "prefetch_factor":
                    self._deeper = False
                elif trial.knob == "coalesce_us":
                    self._together = False
                elif not self._stride or now - trial.before == 1:
                    self._more = False
                return self._set(trial.knob, trial.before, words)
            if trial.knob == "num_workers":
                could = now / trial.before
                linear = rate / trial.rate >= LINEAR * could
                self._stride = now if linear else max(1, now // 4)
                self._down = self._down or not linear  # it may have gone past the knee
                self._deeper = self._together = True
            self._moved, self._retry = True, RETRY
        elif (wait > trial.wait + FLOWS and trial.wait < WAITS) or rate * PAYS < trial.rate:
            self._fewer = self._down = False
            if trial.wait < WAITS:
                words = f"with {now} the consumer waited {wait:.0%} of its time"
            return self._set(trial.knob, trial.before, words)
        else:
            self._moved = True
        self._settled = rate
        return None

    def _wake(self) -> None:
        """The load is another one. The more often that led nowhere, the longer until it is believed again."""
        if self._since < self._patience:
            return
        self._patience = PATIENCE if self._moved else min(LONGEST, 2 * self._patience)
        self._since, self._moved = 0, False
        self._more = self._deeper = self._together = self._fewer = self._down = True
        self._stride = max(1, self.workers // 4)
        self._rest, self._retry = 0, RETRY
        self._settled = 0.0

    def _try(self, knob: str, value: int, rate: float, wait: float) -> Decision:
        self._trial = _Trial(knob, self._value(knob), rate, wait)
        share = f"{wait:.1%}" if wait < FLOWS else f"{wait:.0%}"
        return self._set(knob, value, f"the consumer waits {share} of its time")

    def _set(self, knob: str, value: int, reason: str) -> Decision:
        before = self._value(knob)
        attribute, words = _KNOBS[knob]
        self._calm = self._rest = 0
        self._ration -= 1
        setattr(self, attribute, value)
        return Decision(knob, value, f"{before} -> {value} {words}: {reason}")
