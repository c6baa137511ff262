"""The list of samples that failed: one line of JSON each, appended by any number of processes.

Each line is one write(2) to a file that was opened with ``O_APPEND``, so lines of several ranks do not mix. Only its
owner can read it (0600), and no link, pipe, device or file of another user is written to. ``read`` leaves out lines
that are not valid entries: other programs may have written to the file.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from .policy import MAX_ERROR, Failure

MOST = 64 << 20  # bytes that are read
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
KINDS = ("error", "death", "timeout")
PATH = 2000  # characters of a file's name


def append(path: Path, failures: Iterable[Failure], dataset: str) -> None:
    """Adds a line for each failure.

    Raises:
        OSError: no such file can be written to.
    """
    fd = os.open(path, FLAGS, 0o600)
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a regular file of this user")
        if st.st_mode & 0o077:
            os.fchmod(fd, 0o600)
        for f in failures:
            when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            entry = {**f._asdict(), "file": f.file[:PATH], "dataset": dataset, "time": when}
            line = json.dumps(entry).encode() + b"\n"
            if os.write(fd, line) != len(line):
                raise OSError(f"no room for {path}")
    finally:
        os.close(fd)


def read(path: Path) -> list[Failure]:
    """The entries of a file, without lines that are not valid.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PermissionError(f"{path} is not a regular file")
        lines = file.read(MOST).split(b"\n")
    out = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(entry, dict):
            continue
        index, file_, error, kind = (entry.get(k) for k in Failure._fields)
        if type(index) in (int, str) and type(file_) is str and type(error) is str and kind in KINDS:
            index = index if type(index) is int else str(index)[:MAX_ERROR]
            out.append(Failure(index, file_[:PATH], error[:MAX_ERROR], str(kind)))
    return out
