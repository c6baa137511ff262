"""What became of the files that a cache was made from."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from .folder import SOURCES

CONTENT_BYTES = 1 << 20  # read at once


class Sources(NamedTuple):
    """The files that a cache's samples were made from.

    Attributes:
        files: how many.
        changed, gone: of these, since.
        unknown: of these, how many cannot be judged: paths that are relative to some folder, or that may not be read.
    """

    files: int
    changed: list[str]
    gone: list[str]
    unknown: int


def sources_of(path: Path) -> Sources | None:
    """What became of a cache's source files; None where it does not say which they were."""
    try:
        entries = [(str(p), int(n), was) for p, n, was in json.loads((path / SOURCES).read_text())]
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    changed, gone, unknown = [], [], 0
    for source, nbytes, was in entries:
        if not os.path.isabs(source):  # to a folder that nobody noted
            unknown += 1
            continue
        try:
            found = os.stat(source)
            same = found.st_size == nbytes and was == (content(source) if isinstance(was, str) else found.st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError):
            gone.append(source)
        except (OSError, ValueError):
            unknown += 1
        else:
            if not same:
                changed.append(source)
    return Sources(len(entries), changed, gone, unknown)


def content(path: str) -> str:
    """What a file is known by where its content is the key; as ``staging.key`` has it."""
    h = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while part := file.read(CONTENT_BYTES):
            h.update(part)
    return h.hexdigest()
