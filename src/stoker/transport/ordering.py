"""The order in which other processes see reads and writes of shared memory.

x86-64 keeps the order of the program, but for a read that overtakes an earlier write. ARM keeps hardly any, and Python
has no barrier. A lock has one half each time: what stands before its release is done before that, what stands behind
its acquisition is done after that, and an acquisition does not overtake an earlier release (Arm Architecture Reference
Manual, "Barrier-ordered-before"). So a release between two acquisitions is a barrier for all.
"""

from __future__ import annotations

import platform
from threading import Lock

ORDERED = platform.machine() in ("x86_64", "AMD64")


def barrier(ordered: bool = ORDERED, new_lock: type[Lock] = Lock) -> None:
    """Reads and writes before it are done before writes after it, and reads before reads, as other processes see it.
    The arguments stay when the interpreter ends and the module's names do not."""
    if not ordered:
        lock = new_lock()  # a new one each time: another thread may hold one while this process is forked
        lock.acquire()
        lock.release()
        lock.acquire()
