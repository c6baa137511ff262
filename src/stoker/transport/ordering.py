"""A memory barrier: fixes the order in which other processes see reads and writes of shared memory.

x86-64 keeps program order, except that a read may overtake an earlier write. ARM guarantees almost no order, and Python
has no barrier. A lock provides two half barriers: accesses before its release complete before the release, and accesses
after its acquisition come after it. An acquisition does not overtake an earlier release (Arm Architecture Reference
Manual, "Barrier-ordered-before"). So a release followed by an acquisition is a full barrier.
"""

from __future__ import annotations

import platform
from threading import Lock

ORDERED = platform.machine() in ("x86_64", "AMD64")


def barrier(ordered: bool = ORDERED, new_lock: type[Lock] = Lock) -> None:
    """Orders earlier reads and writes before later writes, and earlier reads before later reads, as other processes see
    them. The default arguments survive interpreter shutdown; the module's names do not."""
    if not ordered:
        lock = new_lock()  # new each time: a shared lock might be held by another thread at a fork
        lock.acquire()
        lock.release()
        lock.acquire()
