"""What ``stoker run`` executes: a script, a module or a command; if there is none, what to type instead."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..core.errors import UsageError


def command_line(command: Sequence[str], module: bool) -> list[str]:
    """The command line to execute: this Python, with its flags (``python -O -m stoker run ...``), runs a script or a
    module; other commands are looked up on PATH. If there is none, raises UsageError with what to type instead."""
    if not command:
        raise UsageError("name a script, for example: stoker run train.py")
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    if module:
        return [*python, "-m", *command]
    path = Path(command[0])
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook: put %load_ext stoker into one of its cells, and %%stoker into the first line of "
            "the cell that trains (stoker explain docs/notebooks.md)"
        )
    if shutil.which(command[0]) and not is_script(path):
        return list(command)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"{path} is a folder; {_instead('train.py', path.glob('*.py'), 'name a script in it')}")
    if not path.exists() and command[0] != "-":
        commands = (Path(each.name) for each in Path(sys.executable).parent.iterdir())  # such as torchrun
        beside = [*path.parent.glob("*.py"), *commands]
        raise UsageError(f"there is no {path}; {_instead(path.name, beside, 'check its path')}")
    return [*python, *command]


def is_script(path: Path) -> bool:
    """Returns whether Python runs this file, rather than the system."""
    return path.suffix == ".py" or (path.is_file() and not os.access(path, os.X_OK))


def _instead(name: str, there: Iterable[Path], otherwise: str) -> str:
    """Returns the path of the file whose name is closest to ``name``, as a question; or else what to do."""
    files = {path.name: path for path in there}
    close = difflib.get_close_matches(name, files, 1)
    return f"did you mean {files[close[0]]}?" if close else otherwise
