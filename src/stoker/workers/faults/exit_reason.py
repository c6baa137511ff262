"""Describes why a worker process ended: signal or exit code, the kernel's out-of-memory killer, memory in use."""

from __future__ import annotations

import signal

from ...core import resources
from ...core.terminal import human_bytes

MEANING = {
    "SIGSEGV": "a crash in native code",
    "SIGILL": "a crash in native code",
    "SIGFPE": "a crash in native code",
    "SIGABRT": "native code called abort",
    "SIGBUS": "a mapped file was truncated, or shared memory ran out",
}
_kills: int | None = None  # by the out-of-memory killer in this process's cgroup, at the last reading


def begin() -> None:
    """Reads the counter of the out-of-memory killer, for comparison with later readings."""
    global _kills
    if _kills is None:
        _kills = resources.oom_kills()


def why(exitcode: int | None, nbytes: int) -> str:
    """Describes how a worker process ended. ``nbytes``: its memory when last measured; 0 if it never was."""
    text = _ended(exitcode)
    if nbytes:
        limit = resources.memory_limit()
        of = f" of a limit of {human_bytes(limit)}" if limit else ""
        text += f"; last measured memory: {human_bytes(nbytes)}{of}"
    return text


def _ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "ended with an unknown exit code"
    if exitcode >= 0:
        return f"ended with exit code {exitcode} (os._exit, sys.exit, or an error during startup)"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if name != "SIGKILL":
        return f"was killed by {name}" + (f" ({MEANING[name]})" if name in MEANING else "")
    global _kills
    before, _kills = _kills, resources.oom_kills()
    if before is not None and _kills is not None and _kills > before:
        return f"was killed by SIGKILL: out of memory (oom_kill in memory.events rose from {before} to {_kills})"
    asked = "memory.events shows no out-of-memory kill" if _kills is not None else "no cgroup shows why"
    return f"was killed by SIGKILL ({asked}: kill -9 by another process, or a limit outside this container)"
