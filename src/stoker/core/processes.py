"""Processes: what starts them, and the one order in which everything is torn down.

Told to leave (stop flag, STOP record, end of pipes) -> joined under one deadline for all -> SIGTERM -> SIGKILL. Slots
need no step of their own: their memory is anonymous and goes with the last mapping.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

LEAVE_S = 5.0  # for all workers together; a sample that is being loaded may end in that time. torch: 5 s for each
TERM_S = 1.0  # between SIGTERM and SIGKILL; nothing of the user's is left to be saved then


def starts_processes(context: Any) -> bool:
    """Whether a multiprocessing context starts processes by fork, spawn or forkserver. Others may start anything: in
    MONAI's ``ThreadDataLoader(use_thread_workers=True)`` a ``Process`` is a thread.

    Args:
        context: of a loader; None stands for ``torch.multiprocessing``.
    """
    if context is None:
        return True
    process = getattr(context, "Process", None)
    known = method_of(context) in ("fork", "spawn", "forkserver")
    return known and isinstance(process, type) and issubclass(process, BaseProcess)


def method_of(context: Any) -> str:
    """By which method a multiprocessing context starts processes."""
    return str(getattr(context, "get_start_method", lambda: "")())


def alive(process: Any) -> bool:
    """Whether a process runs. Somebody else may reap this process' children (SIGCHLD ignored, a ``waitpid(-1)`` in a
    thread); ``is_alive`` then says so for ever, though its sentinel went with it.

    Args:
        process: a ``multiprocessing.Process`` of this process.
    """
    if not process.is_alive():
        return False
    poll = select.poll()
    poll.register(process.sentinel, select.POLLIN)
    return not (poll.poll(0) and _reaped(process.pid))


def kill(pid: int) -> None:
    """Ends a child of this process and reaps it, unless somebody else has: its id may be another's then."""
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


def join(processes: Sequence[Any], leave_s: float = LEAVE_S) -> None:
    """Waits for processes that have been told to leave, and ends those that do not.

    Args:
        processes: ``multiprocessing.Process`` objects of this process.
        leave_s: seconds for all of them together.
    """
    deadline = time.monotonic() + leave_s
    try:
        for p in processes:
            p.join(max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C must not leave anybody behind
        rest = [p for p in processes if alive(p)]
        for p in rest:
            p.terminate()
        deadline = time.monotonic() + TERM_S
        for p in rest:
            p.join(max(0.0, deadline - time.monotonic()))
            if alive(p):
                p.kill()
                p.join()
