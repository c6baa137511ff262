"""Whether ``num_workers="auto"`` makes batches in workers or in the script's own process, decided while it iterates.

What a batch would cost here is known from what it costs a worker. If that is less than the loop waits for a worker's
batch, a few batches are made here. It stays so if they come faster. The dataset is not called here before, because it
may open a file when it is first used, which workers that are forked later would share.

::

                 a batch costs less than waiting for it          and they come faster
    WORKERS <------------------------------------------> TRIAL ----------------------> HERE
       |  ^         they do not come faster                                             |
       |  +-----------------------------------------------------------------------------+
       |  |                           a batch has become dear
       |  +------------- SMALL_EPOCHS: an epoch takes less than workers take to start
       |
       +-> ONLY_WORKERS: a batch failed here        ONLY_HERE: workers cannot be started any more
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from ...core.types import Batch, Index

WINDOW_NS = 100_000_000  # one comparison
LEAST = 64  # batches in it, at least
FIRST = 16  # batches after a change that are not counted
TINY_NS = 2_000_000  # CPU time of a batch, above which it is left to workers: they work beside the loop's own step
DELIVERY_NS = 50_000  # what a worker's batch costs the loop beside waiting for it
GAIN = 1.05  # what batches made here have to be faster by
ABORT = 2  # a trial ends early when batches made here take this many times as long
DEARER = 2  # batches go back to workers when they come to take this many times the CPU time
SLACK_NS = 300_000  # and this much more at least
SLOWER = 10  # or this many times as long, which on a shared machine others may cause
SMALL_NS = 10_000_000  # work of a whole epoch that is less than what starting and ending workers takes
PAUSE_NS = 50_000_000  # the consumer did something else
PAUSE = 8  # if it also took this many times as long as a batch
PATIENCE = 8  # windows until the next trial; doubled by each that led to nothing
LONGEST = 1024

MakeBatch = Callable[[int, Index], Batch]


class State(Enum):
    """Who makes the next batch, and why."""

    WORKERS = "workers"
    ONLY_WORKERS = "workers, because a batch that was made here failed"
    TRIAL = "this process, to compare"
    HERE = "this process, where they come faster"
    SMALL_EPOCHS = "this process, because an epoch takes less than workers take to start"
    ONLY_HERE = "this process, because workers cannot be started any more"


class Change(Enum):
    """What the loader has to do."""

    TRY_HERE = "make the next batches here, and keep the workers"
    STAY_HERE = "let the workers go"
    TO_WORKERS = "have workers make the next batches"


class Worked(NamedTuple):
    """Tasks that have been done so far, and the nanoseconds of wall and CPU time that they took."""

    tasks: int
    wall_ns: int
    cpu_ns: int

    def cost_since(self, before: Worked) -> tuple[int, float, float]:
        """How many tasks, and the wall and the CPU time of one of them; the lesser of both is what it would cost here,
        for a worker may wait for a core."""
        tasks = self.tasks - before.tasks
        each = max(1, tasks)
        return tasks, (self.wall_ns - before.wall_ns) / each, (self.cpu_ns - before.cpu_ns) / each


NONE = Worked(0, 0, 0)


class Place:
    """Watches one loader.

    Args:
        why_not: why batches may not be made here, or ""; asked before each trial, for it may take a millisecond.
        clock: nanoseconds.

    Attributes:
        state: who makes the next batch.
        was_called: some batches were made here.
        knows_cost: whether a trial is worth while is known, so the number of workers may be tried.
        workers, prefetch: the loader's settings with workers.
        reason: what led to the last change.
    """

    def __init__(self, why_not: Callable[[], str], clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.state = State.WORKERS
        self.was_called = self.knows_cost = False
        self.workers, self.prefetch = 1, 2
        self.reason = ""
        self._why_not, self._clock = why_not, clock
        self._by_workers_ns = math.inf  # for each batch, before the trial
        self._cost_ns = self._cpu_ns = 0.0  # of a batch made here, when that was decided
        self._rest, self._patience = 0, PATIENCE  # windows
        self._epoch_ns = self._total_ns = 0
        self._last, self._batch_ns = clock(), 0.0
        self.begin(0, NONE)

    @property
    def here(self) -> bool:
        """This process makes the next batch."""
        return self.state not in (State.WORKERS, State.ONLY_WORKERS)

    def begin(self, waited_ns: int, worked: Worked) -> None:
        """An epoch begins, or a change was made.

        Args:
            waited_ns: how long the consumer has waited for workers so far.
            worked: by workers, so far.
        """
        self._skip = 0 if self.here else FIRST
        self._window(waited_ns, worked)

    def _window(self, waited_ns: int, worked: Worked) -> None:
        self._began, self._waited, self._worked = self._clock(), waited_ns, worked
        self._batches = 0
        self._made = NONE

    def epoch(self, finished: bool, total_ns: int) -> None:
        """An iterator is about to be made.

        Args:
            finished: the last one went to the end of its epoch.
            total_ns: what all batches so far took to be made.
        """
        took, self._total_ns, self._epoch_ns = total_ns - self._total_ns, total_ns, 0
        if finished and self.state is State.WORKERS and 0 < took < SMALL_NS and not self._why_not():
            self.state = State.SMALL_EPOCHS
            self.reason = f"an epoch takes {took / 1e6:.2g} ms to make, less than workers take to start"

    def timed(self, make: MakeBatch) -> MakeBatch:
        """``make``, which makes a batch here, with a look at the clock. If it fails no other is made here."""

        def made(number: int, indices: Index) -> Batch:
            self.was_called = True
            began, cpu = self._clock(), time.thread_time_ns()
            try:
                batch = make(number, indices)
            except Exception:
                self.state = State.ONLY_WORKERS
                raise
            took = self._clock() - began
            so_far = self._made
            cpu_ns = so_far.cpu_ns + time.thread_time_ns() - cpu
            self._made = Worked(so_far.tasks + 1, so_far.wall_ns + took, cpu_ns)
            self._epoch_ns += took
            return batch

        return made

    def stay(self, reason: str) -> None:
        """Here, from now on: workers cannot be started any more."""
        self.state, self.reason = State.ONLY_HERE, reason

    def step(self, waited_ns: int, worked: Worked) -> Change | None:
        """A batch was delivered. Returns what is to be done.

        Args:
            waited_ns, worked: see ``begin``.
        """
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap > PAUSE_NS and gap > PAUSE * self._batch_ns > 0:
            self.begin(waited_ns, worked)
            return None
        if self.state is State.WORKERS:
            return self._step_workers(now - self._began, waited_ns, worked)
        if self.state is State.SMALL_EPOCHS:
            if self._epoch_ns > DEARER * SMALL_NS:
                return self._leave(f"an epoch takes more than {self._epoch_ns / 1e6:.0f} ms to make")
        elif self.state in (State.TRIAL, State.HERE):
            return self._step_here(now, waited_ns, worked)
        return None

    def _step_workers(self, took: int, waited_ns: int, worked: Worked) -> Change | None:
        self._batches += 1
        if not self.knows_cost:
            tasks, wall, cpu = worked.cost_since(self._worked)
            self.knows_cost = tasks > 1 and min(wall, cpu) > TINY_NS
        if self._skip:
            self._skip -= 1
            if not self._skip:
                self._batch_ns = took / self._batches
                self._window(waited_ns, worked)
            return None
        if self._batches < LEAST or took < WINDOW_NS:
            return None
        self._batch_ns = took / self._batches
        self.knows_cost = True
        self._rest = max(0, self._rest - 1)
        pays = not self._rest and self._pays_here(waited_ns, worked)
        self._window(waited_ns, worked)
        if not pays:
            return None
        if self._why_not():
            self._wait_longer()
            return None
        self.state, self._by_workers_ns = State.TRIAL, self._batch_ns
        return Change.TRY_HERE

    def _pays_here(self, waited_ns: int, worked: Worked) -> bool:
        """Whether the loop waits longer for a batch than it would take to make it."""
        tasks, wall, cpu = worked.cost_since(self._worked)
        if tasks < FIRST or min(wall, cpu) > TINY_NS or wall > 2 * ABORT * TINY_NS:
            return False
        return min(wall, cpu) < (waited_ns - self._waited) / self._batches + DELIVERY_NS

    def _step_here(self, now: int, waited_ns: int, worked: Worked) -> Change | None:
        if not self._made.tasks:  # what workers had in hand comes first
            self._began = now
            return None
        if not self._batches:  # the first batch made here also pays for what is set up once
            self._began, self._batches, self._made = now, 1, NONE
            return None
        n, took = self._made.tasks, now - self._began
        if not n:
            return None
        if self.state is State.TRIAL and n >= 2 and took > ABORT * max(self._by_workers_ns * n, TINY_NS):
            return self._leave(self._words(took / n))
        if n < LEAST or took < WINDOW_NS:
            return None
        self._batch_ns = took / n
        _, cost, cpu = self._made.cost_since(NONE)
        self._window(waited_ns, worked)
        if self.state is State.TRIAL:
            if self._batch_ns * GAIN > self._by_workers_ns:
                return self._leave(self._words(self._batch_ns))
            self.state, self._cost_ns, self._cpu_ns, self._rest, self._patience = State.HERE, cost, cpu, 0, PATIENCE
            self.reason = self._words(self._batch_ns)
            return Change.STAY_HERE
        if cpu > max(DEARER * self._cpu_ns, self._cpu_ns + SLACK_NS) or cost > SLOWER * (self._cost_ns + SLACK_NS):
            return self._leave(f"a batch takes {cost / 1e6:.2g} ms to make now, and took {self._cost_ns / 1e6:.2g} ms")
        return None

    def _leave(self, reason: str) -> Change:
        self.state, self.reason = State.WORKERS, reason
        self._wait_longer()
        return Change.TO_WORKERS

    def _wait_longer(self) -> None:
        self._rest, self._patience = self._patience, min(LONGEST, 2 * self._patience)

    def _words(self, ns: float) -> str:
        words = f"without workers a batch takes {ns / 1e6:.2g} ms of the loop's time"
        if self._by_workers_ns == math.inf:
            return words
        return f"{words}, with {self.workers} it took {self._by_workers_ns / 1e6:.2g} ms"
