"""Detects remote storage that a dataset reads: fsspec filesystems and server addresses. Never imports fsspec."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator

from .object_tree import children, is_filesystem, walk

NEAR = {"file", "local", "memory", "data"}  # fsspec protocols that need no connection
ADDRESS = re.compile("(https?|s3a?|gs|gcs|az|abfss?|hf|oss)://")


def is_far(dataset: object) -> bool:
    """Whether a dataset holds a filesystem that reads from servers, or an address of one."""
    for _, x in walk(dataset):
        if is_filesystem(x) and not NEAR.issuperset(_protocols(x)):
            return True
        if any(isinstance(value, str) and ADDRESS.match(value) for _, value in children(x)):
            return True
    return False


def opened(dataset: object) -> Iterator[tuple[str, object]]:
    """Yields the asynchronous fsspec filesystems in a dataset and the files opened on them, each with its path. A
    forked child lacks the thread that serves them: there a file blocks forever and a filesystem raises. See
    ``reopen``."""
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is None:
        return
    for path, x in walk(dataset):
        fs = x if is_filesystem(x) else getattr(x, "fs", None) if isinstance(x, io.IOBase) else None
        if isinstance(fs, asyn.AsyncFileSystem) and getattr(fs, "_loop", None) is not None:
            yield path, x


def reopen(dataset: object) -> None:
    """Recreates a dataset's asynchronous filesystems in a forked child, from their arguments, as unpickling would."""
    for _, fs in opened(dataset):
        if is_filesystem(fs) and vars(fs)["_pid"] != os.getpid():
            anew, args, kwargs = type(fs), vars(fs)["storage_args"], vars(fs)["storage_options"]
            vars(fs).update(vars(anew(*args, **kwargs)))


def _protocols(fs: object) -> set[str]:
    found = getattr(fs, "protocol", ())
    return {found} if isinstance(found, str) else set(found)
