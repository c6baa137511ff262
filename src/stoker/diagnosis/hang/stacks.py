"""Where in Python the threads of a process are: py-spy reads it from outside, or the process writes it when asked.

A process can be asked if ``stoker run`` started it, or if it is a worker of stoker's (``workers.hangs``). py-spy comes
first: it sends no signal, and it reads without a pause of the process.
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

PY_SPY_S = 20.0  # it reads the symbols of a large interpreter in one
TRIES = 3  # a process that runs may change while it is read
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<|\.zip/")

_asking = threading.Lock()  # a loop and the workers that it has forked write to one file


@dataclass(frozen=True)
class Frame:
    """A call."""

    function: str
    file: str
    line: int
    # its local variables, as ``repr`` shows them; empty where the process wrote the stack itself
    variables: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def users(self) -> bool:
        """Whether the code is neither stoker's nor of an installed package."""
        return not LIBRARY.search(self.file) and not self.file.startswith(packages.OWN)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} {self.function}"


@dataclass(frozen=True)
class Stacks:
    """The stacks of one process."""

    threads: dict[int, list[Frame]]  # by thread id, innermost call first
    source: str = ""  # "py-spy", "process" or ""
    refused: str = ""  # why there are none; "": nothing was tried


def py_spy() -> str | None:
    """The path of py-spy, on PATH or beside this interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else None)


def of_process(pid: int) -> Stacks:
    """The stacks of a process, by whatever gives them."""
    program = py_spy()
    by_py_spy = _by_py_spy(program, pid) if program else Stacks({})
    if by_py_spy.threads:
        return by_py_spy
    with _asking, contextlib.suppress(OSError):  # it is gone, or may not be signalled
        if proc.handles(pid, hangs.DUMP_SIGNAL):
            written = _frames(hangs.current_thread(hangs.dump(pid, hangs.files(pid))))
            if written:
                return Stacks({pid: written}, "process")
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


def _frames(text: str) -> list[Frame]:
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', text, re.MULTILINE)
    return [Frame(name, file, int(line)) for file, line, name in found]


def sample(frames: list[Frame]) -> str:
    """The index that the outermost dataset is asked for; "" where the variables are not known."""
    for frame in reversed(frames):
        if frame.function.rpartition(".")[2] in ("__getitem__", "__getitems__") and frame.users:
            return next((value for name, value in frame.variables.items() if name != "self"), "")
    return ""


def place(frames: list[Frame]) -> str:
    """The user's line that is innermost, or else the innermost one; "" where there is none."""
    found = next((f for f in frames if f.users), frames[0] if frames else None)
    return str(found) if found else ""


def inside(frames: list[Frame], part: str) -> bool:
    """Whether one of the files has a name that ends so."""
    return any(f.file.endswith(part) for f in frames)
