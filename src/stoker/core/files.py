"""Files that stoker leaves behind: written whole or not at all, and readable by the user only; and where they go."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import UsageError


def cache_folder(name: str) -> Path:
    """``stoker/<name>`` in the user's cache folder: ``$XDG_CACHE_HOME``, else ``~/.cache`` on Linux. Not made here."""
    from platformdirs import user_cache_path

    return user_cache_path("stoker", appauthor=False) / name


def make_folder(path: Path) -> None:
    """Makes a folder and those above it that are missing, all private to the user (mode 700). Raises OSError."""
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def write(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it when it is complete. A new file is private to the user (mode
    600), because it holds paths, names and settings. An existing file keeps its mode. Pipes and devices, such as
    ``/dev/stdout``, are written to directly. Raises OSError: it cannot be written."""
    path = Path(os.path.realpath(path))
    mode = 0o600
    try:
        existing = path.stat()
    except OSError:
        pass
    else:
        mode = stat.S_IMODE(existing.st_mode)
        if not stat.S_ISREG(existing.st_mode):
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
    """Raises UsageError before the run, not after it, where no file can be written."""
    reason = ""
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "no write access"
    if reason:
        raise UsageError(f"the report cannot be written to {path}: {reason} ({option} FILE names another place)")
