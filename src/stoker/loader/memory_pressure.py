"""Reacts to a shortage of memory during an epoch: first frees caches in memory, then prefetches fewer batches. Reports
both, before the machine swaps or the kernel kills a process.

Watches two numbers: available memory, of the machine and in the cgroup, and memory stalls (PSI,
Documentation/accounting/psi.rst). The window stays small afterwards; a larger one would bring the shortage back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..core import reclaim, resources
from ..core.warn import warn_user
from ..workers.process_pool import ProcessPool
from ..workers.thread_pool import ThreadPool
from .scheduler import Scheduler

logger = logging.getLogger(__name__)
CHECK_S = 0.5  # between two checks, of 0.1 ms each
STALLED = 20.0  # per cent of the time in which a task waited for memory; counts only if little memory is left


class MemoryPressure:
    """Checks the memory until it is short and no cache is left; then shrinks the loader, once."""

    def __init__(self, shrink: Callable[[], None], report: Callable[[str], None]) -> None:
        self._shrink = shrink
        self._report = report
        self._low = 0
        self._next_check = time.monotonic() + CHECK_S
        self._done = False

    def check(self) -> None:
        """Call for each batch; checks every ``CHECK_S``."""
        if self._done or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CHECK_S
        shortage = self._shortage()
        if not shortage:
            return
        given = reclaim.give_back(shortage)
        if given:
            self._say(f"{shortage}: freed the cache's {given >> 20:,} MB", "Nothing more will be cached")
            return
        self._done = True
        self._shrink()
        line = f"{shortage}: from now on each worker prefetches one batch only, and unused slots are freed"
        self._say(line, "If that is not enough, use fewer workers or smaller batches")

    def _say(self, line: str, hint: str) -> None:
        logger.warning(line)
        self._report(line)
        warn_user(f"{line}. {hint}.")

    def _shortage(self) -> str:
        self._low = low = self._low or resources.memory_low()  # not earlier: workers are starting
        available = resources.memory_available()
        if available < low:
            return f"{available >> 20:,} MB of memory are left"
        stalled = resources.pressure().get("memory", 0.0) if available < 2 * low else 0.0
        if stalled <= STALLED:
            return ""
        return f"{available >> 20:,} MB of memory are left, and {stalled:.0f} % of the time a task waits for memory"


def shrink(scheduler: Scheduler, workers: ProcessPool | ThreadPool) -> None:
    """Reduces an iterator's memory. No batch changes."""
    scheduler.make_one_ahead()
    if isinstance(workers, ProcessPool):
        workers.shrink()
