"""Finds workers that were forked while another thread held a lock: in the child that lock stays held (fork(2)).

OpenCV's and OpenMP's thread pools, loggers and network clients have such locks. A deadlocked worker never finishes its
task, and reports no error. The signs: it was forked from a process with threads, and uses next to no processor time.
Its main thread waits in a futex, and its other threads for a futex or a clock: one that waits for a file or a server
may go on. "Next to no" time allows for the sampling thread that ``stoker run`` keeps in each worker.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path

DEADLOCK_S = 20.0  # a worker in this state for this long, before its first batch, is deadlocked
RETREAT_S = 3.0  # the same if the script's own process can make the batches: a false alarm costs little
TICKS = 2  # clock ticks of processor time that still count as idle, plus
TICKS_PER_S = 0.5  # this many per second
CALLS = {  # system call numbers: futex and its newer forms; clock_nanosleep and nanosleep
    "x86_64": (("202", "449", "454", "455"), ("230", "35")),
    "aarch64": (("98", "449", "454", "455"), ("115", "101")),
}


class ForkLockDetector:
    """Checks workers that have not answered yet."""

    def __init__(self) -> None:
        self.threads = 1  # in this process, before the first worker was forked
        with contextlib.suppress(OSError):
            self.threads = len(os.listdir("/proc/self/task"))
        self.closed = False  # new workers are no longer forked; those that were are still checked
        self._idle: dict[int, tuple[int, float]] = {}  # by pid: processor time when it became idle, and when that was
        self._found: set[int] = set()

    def is_deadlocked(self, pid: int, after_s: float | None = None) -> bool:
        """Whether a worker has waited for a lock for ``after_s`` seconds (None: ``DEADLOCK_S``). True only once."""
        if self.threads < 2 or pid in self._found or (self.closed and pid not in self._idle):
            return False
        now, spent = time.monotonic(), _processor_time(pid)
        before = self._idle.get(pid)
        if spent is None or before is None or spent - before[0] > TICKS + TICKS_PER_S * (now - before[1]):
            self._idle[pid] = spent or 0, now
            return False
        if not _waits_for_a_lock(pid):
            self._idle[pid] = spent, now
            return False
        if now - before[1] < (DEADLOCK_S if after_s is None else after_s):
            return False
        self._found.add(pid)
        return True

    def message(self, pid: int) -> str:
        return (
            f"Worker (pid {pid}) is deadlocked on a lock that another thread held when it was forked; this process had "
            f"{self.threads} threads."
        )


def _processor_time(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # utime and stime, of all its threads: proc(5)
    except (OSError, ValueError, IndexError):
        return None


def _waits_for_a_lock(pid: int) -> bool:
    """Whether the main thread of a process waits in a futex, and all others in a futex or for a clock."""
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=lambda tid: tid != str(pid))
        return all(_is_idle(f"/proc/{pid}/task/{tid}", is_main=tid == str(pid)) for tid in threads)
    except OSError:
        return False


def _is_idle(thread: str, is_main: bool) -> bool:
    futexes, clocks = CALLS.get(platform.machine(), ((), ()))
    try:
        call = Path(f"{thread}/syscall").read_text().split()[0]
        return call in futexes or (not is_main and call in clocks)
    except (OSError, IndexError):  # the kernel has no such file, or denies reading it
        where = Path(f"{thread}/wchan").read_text()
        return "futex" in where or (not is_main and "nanosleep" in where)
