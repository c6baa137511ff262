"""Finds workers that were forked while another thread held a lock: in the child that lock stays held (fork(2)).

OpenCV's and OpenMP's pools, loggers and clients have such locks. Such a worker never finishes its task, and reports no
error. It is recognised by this: forked from a process with threads, it uses next to no processor time, its main thread
waits in a futex, and no thread of it waits for anything but a futex or a clock: one that waits for a file or a server
may go on. Next to none, because ``stoker run`` has a thread in each worker that takes a sample now and then.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

DEADLOCK_S = 20.0  # of that, before the first batch
RETREAT_S = 3.0  # the same, where the script's own process can make the batches: being wrong costs little
TICKS = 2  # of processor time that count as none, beside
TICKS_PER_S = 0.5  # these
CALLS = {  # system calls by number: futex and its newer forms, and clock_nanosleep and nanosleep
    "x86_64": (("202", "449", "454", "455"), ("230", "35")),
    "aarch64": (("98", "449", "454", "455"), ("115", "101")),
}


class ForkLockDetector:
    """Checks workers that have not answered yet."""

    def __init__(self) -> None:
        self.threads = _threads()  # of this process when the first of them was forked
        self.closed = False  # new workers are started in another way; those that were forked are still checked
        self._idle: dict[int, tuple[int, float]] = {}  # by pid: processor time used when it became idle, and when
        self._found: set[int] = set()

    def is_deadlocked(self, pid: int, after_s: float | None = None) -> bool:
        """Whether a worker has done nothing for ``after_s`` (None: ``DEADLOCK_S``), and waits for a lock. True once for
        each."""
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
        """What to tell the user about it."""
        return (
            f"Worker (pid {pid}) is deadlocked on a lock that another thread held when it was forked; this process had "
            f"{self.threads} threads."
        )


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
    """Whether the main thread of a process waits in a futex, and the others wait there or for a clock."""
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
    except (OSError, IndexError):  # a kernel without it, or without the right to read it
        where = Path(f"{thread}/wchan").read_text()
        return "futex" in where or (not is_main and "nanosleep" in where)
