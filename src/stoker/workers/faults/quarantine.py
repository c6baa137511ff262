"""Lists samples that failed: one line of JSON each, appended by any number of processes.

Each line is one write(2) to a file opened with ``O_APPEND``, so lines of several ranks do not mix. Only the owner can
read the file (0600), and links, pipes, devices and other users' files are not written to.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from .policy import Failure

FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
PATH = 2000  # characters kept of a file's name


def append(path: Path, failures: Iterable[Failure], dataset: str) -> None:
    """Appends a line for each failure. Raises OSError if the file cannot be written to."""
    fd = os.open(path, FLAGS, 0o600)
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a regular file owned by this user")
        if st.st_mode & 0o077:
            os.fchmod(fd, 0o600)
        for f in failures:
            when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            entry = {**f._asdict(), "file": f.file[:PATH], "dataset": dataset, "time": when}
            line = json.dumps(entry).encode() + b"\n"
            if os.write(fd, line) != len(line):
                raise OSError(f"no space left for {path}")
    finally:
        os.close(fd)
