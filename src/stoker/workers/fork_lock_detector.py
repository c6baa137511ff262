"""Finds workers that were forked while another thread held a lock: in the child that lock stays held (fork(2)).

OpenCV's and OpenMP's pools, loggers and clients have such locks. Such a worker never finishes its first task, and
reports no error. It is recognised by this: forked from a process with threads, it uses no processor time and waits in a
futex.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

from ..core.picklable import refused

DEADLOCK_S = 20.0  # without any processor time, before the first batch
FUTEX = {"x86_64": "202", "aarch64": "98"}  # the system call's number


class ForkLockDetector:
    """Checks workers that have not answered yet."""

    def __init__(self) -> None:
        self.threads = _threads()  # of this process when the first of them was forked
        self.closed = False  # new workers are started in another way; those that were forked are still checked
        self._idle: dict[int, tuple[int, float]] = {}  # by pid: processor time used, and since when it has not changed

    def is_deadlocked(self, pid: int) -> bool:
        """Whether a worker has done nothing for ``DEADLOCK_S``, and waits for a lock. True once for each."""
        if self.threads < 2 or (self.closed and pid not in self._idle):
            return False
        now, spent = time.monotonic(), _processor_time(pid)
        before = self._idle.get(pid)
        if spent is None or before is None or before[0] != spent:
            self._idle[pid] = spent or 0, now
            return False
        if now - before[1] < DEADLOCK_S or not _waits_for_a_lock(pid):
            return False
        self._idle[pid] = spent, now + 1e9
        return True

    def message(self, pid: int) -> str:
        """What to tell the user about it."""
        return (
            f"Worker (pid {pid}) is deadlocked on a lock that another thread held when it was forked; this process had "
            f"{self.threads} threads."
        )


def can_start_elsewhere(dataset: object) -> bool:
    """Whether what workers need can be pickled, and the main module imported without running the script."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        guarded = path is None or "__name__" in Path(path).read_text(errors="replace")
    except OSError:
        return False
    return guarded and refused(dataset) is None


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _processor_time(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # utime and stime, of all its threads: proc(5)
    except (OSError, ValueError, IndexError):
        return None


def _waits_for_a_lock(pid: int) -> bool:
    try:
        if Path(f"/proc/{pid}/syscall").read_text().split()[0] == FUTEX.get(platform.machine()):
            return True
    except (OSError, IndexError):
        pass
    try:
        return "futex" in Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
