"""Where a worker is that takes too long: it writes its stack when it is asked, whatever it does (faulthandler)."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

ASK = signal.SIGRTMIN + 9  # a real-time signal, which nobody else is likely to use
ANSWER_S = 1.0  # how long is waited for a stack; what sleeps in the kernel does not answer
SETTLED_S = 0.02  # without another line
LINES = 16  # of a stack
OURS = re.compile(r"[/\\\\](stoker|torch[/\\\\]utils[/\\\\]data|multiprocessing)[/\\\\]")


def offer() -> int:
    """In the worker: from now on it answers. Returns its descriptor of the file to which it does."""
    fd = os.memfd_create("stoker-stack", os.MFD_CLOEXEC)
    faulthandler.register(ASK, file=fd, all_threads=True, chain=False)
    return fd


def stack(pid: int, fd: int) -> str:
    """In the parent: where the worker is, innermost first; never empty."""
    text = ""
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{pid}/fd/{fd}")
        before = path.stat().st_size
        os.kill(pid, ASK)
        deadline = time.monotonic() + ANSWER_S
        size, since = before, time.monotonic()
        while time.monotonic() < deadline and (size == before or time.monotonic() - since < SETTLED_S):
            time.sleep(SETTLED_S / 4)
            now = path.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
        text = path.read_bytes()[before:].decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.startswith("  File")]
    own = next((k for k, line in enumerate(lines) if OURS.search(line)), len(lines))
    found = "\n".join(lines[: max(1, min(own, LINES))])
    if found:
        return found
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n")
        if where not in ("", "0"):
            return f"  in the kernel, {where}"
    return "  in the kernel, it gave no answer"
