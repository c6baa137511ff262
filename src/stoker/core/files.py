"""Files that stoker leaves behind: where they go, and how they are written atomically and readable by the user only."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .errors import UsageError


def cache_folder(name: str) -> Path:
    """``stoker/<name>`` in the user's cache folder: ``$XDG_CACHE_HOME``, else ``~/.cache`` on Linux. Does not create
    it."""
    from platformdirs import user_cache_path

    return user_cache_path("stoker", appauthor=False) / name


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, all private to the user (mode 700). Raises OSError."""
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def write(path: Path, text: str, named: bool = True) -> None:
    """Writes a file atomically: writes a temporary file, then renames it. A new file is private to the user (mode 600),
    because it holds paths, names and settings; an existing file of the user's keeps its mode. If the user ``named`` the
    path, follows links, and writes directly to pipes and devices such as ``/dev/stdout``; otherwise the file replaces
    them. Raises OSError if it cannot be written."""
    path = Path(os.path.realpath(path)) if named else path
    mode = 0o600
    try:
        existing = path.lstat()
    except OSError:
        pass
    else:
        if stat.S_ISREG(existing.st_mode) and existing.st_uid == os.geteuid():
            mode = stat.S_IMODE(existing.st_mode)
        if named and not stat.S_ISREG(existing.st_mode):
            with open(path, "w", encoding="utf-8") as pipe:
                pipe.write(text)
            return
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temp = Path(name)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, mode)
            file.write(text)
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def check_writable(path: Path, option: str = "--json") -> None:
    """Raises UsageError before the run, not after it, if the file cannot be written."""
    reason = ""
    if os.path.isdir(path):  # unlike Path.is_dir, does not raise without permission
        reason = "it is a directory"
    elif not os.path.isdir(path.parent):
        reason = f"directory {path.parent} does not exist"
    elif not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        reason = "no write access"
    if reason:
        raise UsageError(f"cannot write the report to {path}: {reason}. Choose another file with {option} FILE")
