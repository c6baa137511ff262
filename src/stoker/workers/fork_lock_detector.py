"""A worker that was forked while another thread held a lock: in the child that lock is held for ever (fork(2)).

OpenCV's and OpenMP's pools, loggers and clients have such locks. The worker never finishes its first task; nothing is
wrong that anybody could see. It is known by what it does: nothing, in a futex, since it was forked from a process with
threads.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from ..core.picklable import refused

STUCK_S = 20.0  # without a moment of processor time, before the first batch
FUTEX = {"x86_64": "202", "aarch64": "98"}  # the system call's number


class Watchdog:
    """Looks at workers that have not answered yet.

    Attributes:
        threads: of this process when the first of them was forked.
        closed: from now on workers are started in another way; those that were forked are still looked at.
    """

    def __init__(self) -> None:
        self.threads = _threads()
        self.closed = False
        self._idle: dict[int, tuple[int, float]] = {}

    def stuck(self, pid: int) -> bool:
        """Whether a worker has done nothing for ``STUCK_S``, and waits for a lock. To be asked now and then."""
        if self.threads < 2 or (self.closed and pid not in self._idle):
            return False
        now, spent = time.monotonic(), _processor_time(pid)
        before = self._idle.get(pid)
        if spent is None or before is None or before[0] != spent:
            self._idle[pid] = spent or 0, now
            return False
        if now - before[1] < STUCK_S or not _waits_for_a_lock(pid):
            return False
        self._idle[pid] = spent, now + 1e9  # said once
        return True

    def words(self, pid: int) -> str:
        """What to say of it."""
        return (
            f"A worker (pid {pid}) waits for a lock since it was forked, and will for ever: this process had "
            f"{self.threads} threads then, and a lock that another thread holds at that moment is never released in "
            f'the child. multiprocessing_context="forkserver" starts workers from a process without threads'
        )


def may_start_anew(dataset: Any) -> bool:
    """Whether workers could be started from another interpreter: what they need can be pickled, and the main module
    can be imported without running the script again."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        guarded = path is None or "__name__" in Path(path).read_text(errors="replace")
    except OSError:
        return False
    return guarded and refused(dataset, to_start=True) is None


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
