"""Why a worker process ended, in words: signal or exit code, the kernel's out-of-memory killer, its memory."""

from __future__ import annotations

import signal

from ...core import resources

MEANS = {
    "SIGSEGV": "a crash in native code",
    "SIGILL": "a crash in native code",
    "SIGFPE": "a crash in native code",
    "SIGABRT": "native code gave up (abort)",
    "SIGBUS": "a file that was cut while it was mapped, or no shared memory left",
}
_kills: int | None = None  # of the out-of-memory killer, in this process' cgroup, as it was seen last


def begin() -> None:
    """From now on the out-of-memory killer is watched."""
    global _kills
    if _kills is None:
        _kills = resources.oom_kills()


def why(exitcode: int | None, nbytes: int) -> str:
    """What became of a worker process.

    Args:
        exitcode: negative: a signal's number.
        nbytes: its memory when it was measured last; 0: it was not.
    """
    words = _ended(exitcode)
    if nbytes:
        limit = resources.memory_limit()
        of = f" of a limit of {_size(limit)}" if limit else ""
        words += f"; its memory was {_size(nbytes)}{of} when it was measured last"
    return words


def _ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "ended, nobody knows how"
    if exitcode >= 0:
        return f"left with exit code {exitcode} (os._exit, sys.exit, or an error while it started)"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if name != "SIGKILL":
        return f"was killed by {name}" + (f" ({MEANS[name]})" if name in MEANS else "")
    global _kills
    before, _kills = _kills, resources.oom_kills()
    if before is not None and _kills is not None and _kills > before:
        return f"was killed by SIGKILL: out of memory (memory.events: oom_kill was {before} and is {_kills})"
    asked = "memory.events counts no out-of-memory kill here" if _kills is not None else "no cgroup says more"
    return f"was killed by SIGKILL ({asked}: somebody's kill -9, or a limit outside of this container)"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
