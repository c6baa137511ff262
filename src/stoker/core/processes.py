"""Worker processes: how they are started, and the single order in which they are shut down.

Ask to leave (stop flag, STOP message, end of pipes) -> join all under one deadline -> SIGTERM -> SIGKILL. Slots need no
step of their own: their memory is anonymous and is freed with the last mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.context as multiprocessing_context
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

LEAVE_S = 5.0  # for all workers together, to finish the current sample. torch allows 5 s for each worker
TERM_S = 1.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1
# resolved before a fork, so that the child writes to fewer pages
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with_parent(parent: int = 0) -> None:
    """Has the kernel send SIGKILL to this process when its parent ends (prctl(2)). ``parent``: its pid, if known; if it
    has already ended, this process exits at once."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(1)


def core_wait_s() -> float:
    """Seconds for which this thread was runnable but had no core; 0.0 if the system does not report it."""
    try:
        with open("/proc/thread-self/schedstat") as f:
            return int(f.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def starts_processes(context: object) -> bool:
    """Whether a multiprocessing context starts processes by fork, spawn or forkserver. Other contexts may not: in
    MONAI's ``ThreadDataLoader(use_thread_workers=True)`` a ``Process`` is a thread. ``context``: a loader's; None
    stands for ``torch.multiprocessing``."""
    if context is None:
        return True
    process = getattr(context, "Process", None)
    known = method_of(context) in ("fork", "spawn", "forkserver")
    return known and isinstance(process, type) and issubclass(process, BaseProcess)


def method_of(context: object) -> str:
    """Start method of a multiprocessing context; "" if it does not report one. Asking multiprocessing itself would fix
    its default, and the script could no longer choose another."""
    ask = getattr(context, "get_start_method", None)
    if ask is None:
        return ""
    if getattr(ask, "__self__", None) is multiprocessing_context._default_context:
        return str(ask(allow_none=True) or multiprocessing.get_all_start_methods()[0])
    return str(ask())


def alive(process: BaseProcess) -> bool:
    """Whether a process runs. If user code reaps this process' children (SIGCHLD ignored, ``waitpid(-1)`` in a thread),
    ``is_alive`` stays true forever although the sentinel is closed."""
    if not process.is_alive():
        return False
    poll = select.poll()
    poll.register(process.sentinel, select.POLLIN)
    if not poll.poll(0):
        return True
    pid = process.pid  # None: the process that should have forked it has ended
    return pid is not None and not _reaped(pid)


def kill(pid: int) -> None:
    """Kills and reaps a child of this process, unless it was reaped already: its id may belong to another process by
    now."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        if not _reaped(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _reaped(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def join(processes: Sequence[BaseProcess], leave_s: float = LEAVE_S) -> None:
    """Waits for processes that were told to leave, and kills those that do not."""
    deadline = time.monotonic() + leave_s
    try:
        for p in processes:
            p.join(max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C must not leave processes behind
        rest = [p for p in processes if alive(p)]
        for p in rest:
            p.terminate()
        deadline = time.monotonic() + TERM_S
        for p in rest:
            p.join(max(0.0, deadline - time.monotonic()))
            if alive(p):
                p.kill()
                p.join()
