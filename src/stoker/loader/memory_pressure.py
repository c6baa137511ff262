"""Memory runs short while an epoch is under way: the loader gives back step by step, before the machine swaps or kills.

Looked at: what is available, to the machine and in the cgroup, and the stalls that the kernel accounts for (PSI,
Documentation/accounting/psi.rst). What was given up stays so; taking it back would bring the shortage back.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence

from ..core import resources
from ..core.errors import StokerWarning

logger = logging.getLogger(__name__)
LOOK_S = 0.5  # between two looks, of 0.1 ms each
SETTLE_S = 2.0  # after a step, until it shows
SHARE = 0.05  # of the memory granted: less than that available is short
LEAST = 256 << 20  # bytes; the same for a small machine
STALLED = 20.0  # per cent of the time in which somebody waited for memory, if less than twice SHARE is left, too

Step = Callable[[], str]


class Pressure:
    """Gives up what a loader can do without.

    Args:
        steps: in this order; each says in words what it gave up, "" where it had nothing to give.
        tell: gets each line.
    """

    def __init__(self, steps: Sequence[Step], tell: Callable[[str], None]) -> None:
        self._steps, self._tell = steps, tell
        self._granted = 0
        self._next = time.monotonic() + LOOK_S
        self._warned = self._spent = False

    def look(self) -> None:
        """To be called often; looks now and then, and takes a step where memory is short."""
        now = time.monotonic()
        if now < self._next or self._spent:
            return
        self._next = now + LOOK_S
        short = self._short()
        if short:
            self._next = now + SETTLE_S
            self._give(short)

    def _short(self) -> str:
        self._granted = self._granted or resources.memory_granted()  # not earlier: workers are starting
        available = resources.memory_available()
        low = min(self._granted // 4, max(LEAST, int(SHARE * self._granted)))
        if available < low:
            return f"{available >> 20:,} MB of memory are left"
        if available < 2 * low:
            stalled = resources.pressure().get("memory", 0.0)
            if stalled > STALLED:
                return (
                    f"{available >> 20:,} MB of memory are left, and {stalled:.0f} % of the time somebody waits for it"
                )
        return ""

    def _give(self, short: str) -> None:
        for step in self._steps:
            words = step()
            if words:
                break
        else:
            self._spent = True
            words = "there is nothing more to give up: fewer num_workers, or smaller batches"
        line = f"{short}: {words}"
        logger.warning(line)
        self._tell(line)
        if not self._warned:
            self._warned = True
            warnings.warn(f"{line}. More steps, if any, are in the log.", StokerWarning, stacklevel=5)
