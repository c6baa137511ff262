"""Files that stoker leaves behind: written whole or not at all, and for nobody else's eyes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import UsageError


def write(path: Path, text: str) -> None:
    """Writes a file under another name and gives it its own when it is whole.

    A new one is private to the user (mode 600): paths, names and settings of somebody's work are in it. One that is
    there keeps its mode. What is no file, a pipe or ``/dev/stdout``, is written to.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(os.path.realpath(path))
    mode = 0o600
    try:
        there = path.stat()
    except OSError:
        pass
    else:
        mode = stat.S_IMODE(there.st_mode)
        if not stat.S_ISREG(there.st_mode):
            with open(path, "w", encoding="utf-8") as pipe:
                pipe.write(text)
            return
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, mode)
            file.write(text)
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def check_writable(path: Path, option: str = "--json") -> None:
    """Raises before the run what would otherwise be raised after it.

    Args:
        path: where the report is to be written.
        option: of the command line, which names another place.

    Raises:
        UsageError: no file can be written there.
    """
    why = ""
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "no write access"
    if why:
        raise UsageError(f"the report cannot be written to {path}: {why} ({option} FILE names another place)")
