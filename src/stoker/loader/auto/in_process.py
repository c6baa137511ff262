"""Whether ``num_workers="auto"`` makes batches in workers or in the script's own process, decided while it iterates.

What a batch would cost here is known from what it costs a worker. Where that is less than what the loop waits for a
worker's, a few batches are made here, and it stays so if they come faster. The dataset is not called here before,
because it may open a file when it is first used, which workers that are forked later would share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

WINDOW_NS = 100_000_000  # one comparison
LEAST = 64  # and at least so many batches
FIRST = 16  # batches after a change that are not counted
TINY_NS = 2_000_000  # CPU time of a batch, above which it is left to workers: they work beside the loop's own step
DELIVERY_NS = 50_000  # what a worker's batch costs the loop beside waiting for it
GAIN = 1.05  # what batches made here have to be faster by
ABORT = 2  # a trial ends early when batches made here take so many times as long
DEARER = 2  # and so does a decision for this process when they come to take so many times the CPU time
SLACK_NS = 300_000  # and so much more at least
SLOWER = 10  # or so many times as long, which on a machine that others use may be their doing
SMALL_NS = 10_000_000  # work of a whole epoch that is less than what starting and ending workers takes
PAUSE_NS = 50_000_000  # the consumer did something else
PAUSE = 8  # if it was also so many times a batch's time
PATIENCE = 8  # windows until the next trial; doubled by each that led to nothing
LONGEST = 1024


class Place:
    """Watches one loader.

    Args:
        may: why batches may not be made here, or ""; asked before each trial, for it may take a millisecond.
        clock: nanoseconds.

    Attributes:
        here: batches are made in this process.
        settled: and that is not a trial.
        possible: they may be; not if that once failed.
        called: some were.
        judged: it is known whether a trial is worth while, so the number of workers may be tried.
        workers, prefetch: the loader's settings with workers.
        reason: what led to the last change.
    """

    def __init__(self, may: Callable[[], str], clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.here = self.settled = self.called = self.judged = False
        self.possible = True
        self.workers, self.prefetch = 1, 2
        self.reason = ""
        self._may, self._clock = may, clock
        self._made = self._made_ns = self._cpu_ns = 0  # here, since the window began
        self._worked = (0, 0, 0)
        self._by_workers = math.inf  # ns for each batch, before the trial; 0: there was none
        self._cost = self._cpu = 0.0  # ns of making a batch here, and of CPU time, when that was decided
        self._dear = False
        self._rest, self._patience = 0, PATIENCE
        self._epoch_ns = self._total_ns = 0
        self._last, self._typical = clock(), 0.0
        self.begin(0, (0, 0, 0))

    def begin(self, waited_ns: int, worked: tuple[int, int, int]) -> None:
        """An epoch begins, or a change was made.

        Args:
            waited_ns: how long the consumer has waited for workers so far.
            worked: tasks that workers have done so far, and the nanoseconds and CPU time of these.
        """
        self._settling = not self.here
        self._window(waited_ns, worked)

    def epoch(self, finished: bool, total_ns: int) -> None:
        """An iterator is about to be made.

        Args:
            finished: the last one went to the end of its epoch.
            total_ns: what all batches so far took to be made.
        """
        worked_ns, self._total_ns, self._epoch_ns = total_ns - self._total_ns, total_ns, 0
        small = finished and self.possible and not self.here and 0 < worked_ns < SMALL_NS
        if small and not self._may():
            self.here = self.settled = True
            self._by_workers = 0.0
            self.reason = f"an epoch takes {worked_ns / 1e6:.2g} ms to make, less than workers take to start"

    def timed(self, make: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
        """``make``, which makes a batch here, with a look at the clock. If it fails no other is made here."""

        def made(number: int, indices: Any) -> Any:
            self.called = True
            began, cpu = self._clock(), time.thread_time_ns()
            try:
                batch = make(number, indices)
            except Exception:
                self.here = self.settled = self.possible = False
                raise
            took = self._clock() - began
            self._made += 1
            self._made_ns += took
            self._cpu_ns += time.thread_time_ns() - cpu
            self._epoch_ns += took
            return batch

        return made

    def stay(self, reason: str) -> None:
        """Here, from now on: workers cannot be started any more."""
        self.here = self.settled = True
        self._by_workers = self._cost = math.inf
        self.reason = reason

    def leave(self, reason: str) -> str:
        """Back to workers."""
        self.here = self.settled = self._dear = False
        self._rest, self._patience = self._patience, min(LONGEST, 2 * self._patience)
        self.reason = reason
        return "workers"

    def _window(self, waited_ns: int, worked: tuple[int, int, int]) -> None:
        self._began, self._waited, self._worked = self._clock(), waited_ns, worked
        self._batches = self._made = self._made_ns = self._cpu_ns = 0

    def step(self, waited_ns: int, worked: tuple[int, int, int]) -> str:
        """A batch was delivered. Returns what is to be done: "here", "stay" (and workers may go), "workers", or "".

        Args:
            waited_ns, worked: see ``begin``.
        """
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap > PAUSE_NS and gap > PAUSE * self._typical > 0:
            self.begin(waited_ns, worked)
            return ""
        if not self.possible:
            return ""
        if self.here:
            return self._step_here(now, waited_ns, worked)
        self._batches += 1
        took = now - self._began
        if not self.judged:
            tasks, work, cpu = (b - a for a, b in zip(self._worked, worked, strict=True))
            self.judged = min(work, cpu) > TINY_NS * tasks > TINY_NS
        if self._batches < (FIRST if self._settling else LEAST) or (took < WINDOW_NS and not self._settling):
            return ""
        settling, self._settling = self._settling, False
        self._typical = took / self._batches
        self._rest = max(0, self._rest - 1)
        self.judged = self.judged or not settling
        tried = not (settling or self._rest) and self._pays_here(waited_ns, worked)
        self._window(waited_ns, worked)
        if not tried:
            return ""
        no = self._may()
        if no:
            self._rest, self._patience = self._patience, min(LONGEST, 2 * self._patience)
            return ""
        self.here, self._by_workers = True, self._typical
        return "here"

    def _pays_here(self, waited_ns: int, worked: tuple[int, int, int]) -> bool:
        """Whether the loop waits longer for a batch than it would take to make it."""
        tasks, work, cpu = (b - a for a, b in zip(self._worked, worked, strict=True))
        if tasks < FIRST or min(work, cpu) > TINY_NS * tasks or work > 2 * ABORT * TINY_NS * tasks:
            return False
        return min(work, cpu) / tasks < (waited_ns - self._waited) / self._batches + DELIVERY_NS

    def _step_here(self, now: int, waited_ns: int, worked: tuple[int, int, int]) -> str:
        if not self._made:  # what workers had in hand comes first
            self._began = now
            return ""
        if self._made == 1 and not self._batches:
            self._began, self._batches, self._made_ns, self._cpu_ns = now, 1, 0, 0
            return ""
        n, took = self._made - 1, now - self._began
        if not n:
            return ""
        if self._cost == math.inf:
            return ""
        if self.settled and not self._by_workers:  # for its epochs were small
            if self._epoch_ns > DEARER * SMALL_NS:
                return self.leave(f"an epoch takes more than {self._epoch_ns / 1e6:.0f} ms to make")
            return ""
        if not self.settled and n >= 2 and took > ABORT * self._by_workers * n and took > ABORT * TINY_NS:
            return self.leave(self._words(took / n))
        if n < LEAST or took < WINDOW_NS:
            return ""
        self._typical, cost, cpu = took / n, self._made_ns / n, self._cpu_ns / n
        self._window(waited_ns, worked)
        if not self.settled:
            if took / n * GAIN > self._by_workers:
                return self.leave(self._words(took / n))
            self.settled, self._cost, self._cpu, self._rest, self._patience = True, cost, cpu, 0, PATIENCE
            self.reason = self._words(took / n)
            return "stay"
        dearer = cpu > max(DEARER * self._cpu, self._cpu + SLACK_NS)
        dear, self._dear = self._dear, dearer or cost > SLOWER * (self._cost + SLACK_NS)
        if dear and self._dear:
            return self.leave(f"a batch takes {cost / 1e6:.2g} ms to make now, and took {self._cost / 1e6:.2g} ms")
        return ""

    def _words(self, ns: float) -> str:
        words = f"without workers a batch takes {ns / 1e6:.2g} ms of the loop's time"
        if self._by_workers == math.inf:
            return words
        return f"{words}, with {self.workers} it took {self._by_workers / 1e6:.2g} ms"
