"""The Python stacks of a process's threads: py-spy reads them from outside, or the process writes its own on request.

A process accepts requests if ``stoker run`` started it, or if it is one of stoker's workers (``workers.hangs``). py-spy
is tried first, because it sends no signal and does not pause the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from ...core import packages
from ...core.types import JsonObject
from ...workers import hangs
from . import proc

PY_SPY_S = 20.0  # timeout; reading the symbols of a large interpreter takes about a second
TRIES = 3  # a running process may change while py-spy reads it
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<|\.zip/")

_asking = threading.Lock()  # a loop and its forked workers write to the same file


@dataclass(frozen=True)
class Frame:
    """A call on a stack."""

    function: str
    file: str
    line: int
    # local variables, as ``repr`` shows them; empty if the process wrote the stack itself
    variables: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def users(self) -> bool:
        """Whether the code is the user's: neither stoker's nor from an installed package."""
        return not LIBRARY.search(self.file) and not self.file.startswith(packages.OWN)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} {self.function}"


@dataclass(frozen=True)
class Stacks:
    """The stacks of one process."""

    threads: dict[int, list[Frame]]  # by thread id, innermost call first
    source: str = ""  # "py-spy", "process" or ""
    refused: str = ""  # why there are none; "" if there are some, or if py-spy was not tried


def py_spy() -> str | None:
    """Returns the path of py-spy, from PATH or beside this interpreter; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else None)


def of_process(pid: int) -> Stacks:
    """Returns the stacks of a process, from py-spy or else from the process itself."""
    program = py_spy()
    by_py_spy = _by_py_spy(program, pid) if program else Stacks({})
    if by_py_spy.threads:
        return by_py_spy
    with _asking, contextlib.suppress(OSError):  # the process is gone, or may not be signalled
        if proc.handles(pid, hangs.DUMP_SIGNAL):
            text = hangs.current_thread(hangs.dump(pid, hangs.files(pid)))
            found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', text, re.MULTILINE)
            if found:
                return Stacks({pid: [Frame(name, file, int(line)) for file, line, name in found]}, "process")
    return by_py_spy


def _by_py_spy(program: str, pid: int) -> Stacks:
    line = [program, "dump", "--pid", str(pid), "--json", "--locals", "--nonblocking"]
    refused = ""
    for _ in range(TRIES):
        try:
            p = subprocess.run(line, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            return Stacks({}, refused=f"py-spy: {e}")
        if p.returncode == 0:
            threads = {int(t["os_thread_id"] or 0): [_frame(f) for f in t["frames"]] for t in json.loads(p.stdout)}
            return Stacks(threads, "py-spy")
        refused = next((x for x in reversed(p.stderr.splitlines()) if x.strip()), "it failed").strip()
    return Stacks({}, refused=f"py-spy: {refused}")


def _frame(found: JsonObject) -> Frame:
    variables = {v["name"]: str(v["repr"]) for v in found.get("locals") or () if v.get("repr") is not None}
    return Frame(found["name"], found["filename"], int(found["line"]), variables)


def sample(frames: list[Frame]) -> str:
    """Returns the index that the outermost dataset was asked for; "" if unknown."""
    for frame in reversed(frames):
        if frame.function.rpartition(".")[2] in ("__getitem__", "__getitems__") and frame.users:
            return next((value for name, value in frame.variables.items() if name != "self"), "")
    return ""


def place(frames: list[Frame]) -> str:
    """Returns the user's innermost line, or else the innermost line; "" for an empty stack."""
    found = next((f for f in frames if f.users), frames[0] if frames else None)
    return str(found) if found else ""


def inside(frames: list[Frame], files: str | tuple[str, ...]) -> bool:
    """Returns whether the name of one of the frames' files ends with ``files`` or one of them."""
    return any(f.file.endswith(files) for f in frames)
