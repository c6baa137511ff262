"""Reads the stack of a worker that takes too long: on a signal, the process writes its stack (faulthandler)."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

from ..core import packages

DUMP_SIGNAL = signal.SIGRTMIN + 9  # a real-time signal that other code is unlikely to use
FILE = "stoker-stack"  # the name of the anonymous file
ANSWER_S = 1.0  # how long to wait for a stack; a process that sleeps in the kernel does not answer
SETTLED_S = 0.02  # a stack is complete when no line has come for this long
MAX_LINES = 16  # of a stack
MAX_BYTES = 1 << 20  # read from a process, which may be anybody's
MAX_FILES = 8
_ENGINE = tuple(  # as faulthandler writes paths
    f'  File "{path}'.encode("ascii", "backslashreplace").decode()
    for path in (*packages.OWN, packages.torch_file("utils", "data", ""))
)


def dump_on_request(all_threads: bool = True) -> int:
    """In the worker: enables dumps on ``DUMP_SIGNAL``. Returns the descriptor of the file that they are written to."""
    fd = os.memfd_create(FILE, os.MFD_CLOEXEC)
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=all_threads, chain=False)
    return fd


def files(pid: int) -> list[Path]:
    """Returns the files to which a process may write its stack: its own, and any inherited from its parent at fork."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{FILE}"):
                    found.append(path)
    return found[:MAX_FILES]


def dump(pid: int, paths: list[Path]) -> str:
    """Makes a process that has called ``dump_on_request`` write its stacks; returns "" if it does not answer."""
    with contextlib.ExitStack() as opened:
        fds = []
        for path in paths:
            fds.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            opened.callback(os.close, fds[-1])
        before = [os.fstat(fd).st_size for fd in fds]
        if not before:
            return ""
        os.kill(pid, DUMP_SIGNAL)
        deadline = time.monotonic() + ANSWER_S
        sizes, since = before, time.monotonic()
        while time.monotonic() < deadline and (sizes == before or time.monotonic() - since < SETTLED_S):
            time.sleep(SETTLED_S / 4)
            now = [os.fstat(fd).st_size for fd in fds]
            if now != sizes:
                sizes, since = now, time.monotonic()
        written = [os.pread(fd, MAX_BYTES, start) for fd, start in zip(fds, before, strict=True)]
    return b"".join(written).decode(errors="replace")


def current_thread(text: str) -> str:
    """Returns the part of a dump about the thread that got the signal: the main thread, unless it blocks the signal."""
    parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return next((part for part in parts if part.startswith(("Current thread", "Stack"))), "")


def stack(pid: int, fd: int) -> str:
    """In the parent: describes where the worker is, innermost frame first; never empty."""
    text = ""
    with contextlib.suppress(OSError):
        text = dump(pid, [Path(f"/proc/{pid}/fd/{fd}")])
    threads = [lines for part in re.split(r"^\w.*", text, flags=re.MULTILINE) if (lines := _frames(part))]
    fetches = next((t for t in threads if any(f.startswith(_ENGINE) for f in t)), None)
    if threads:
        return "\n".join(_user_frames(fetches or threads[0]))
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n")
        if where not in ("", "0"):
            return f"  in the kernel, {where}"
    return "  in the kernel; it did not answer"


def _frames(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.startswith("  File")]


def _user_frames(frames: list[str]) -> list[str]:
    """Drops the engine's frames that called the user's code: cuts at the first engine frame after the user's frames."""
    first = next((k for k, f in enumerate(frames) if not f.startswith(_ENGINE)), 0)
    end = next((k for k in range(first, len(frames)) if frames[k].startswith(_ENGINE)), len(frames))
    return frames[: max(1, min(end, MAX_LINES))]
