"""Lists and removes caches on disk, for ``stoker cache``.

Listing writes nothing, unpickles nothing, and does not count as a use.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.errors import UsageError
from .encode import CacheError
from .folder import MANIFEST, PART, REMOVED, discard, manifest_of

NAME = re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{16}(?:\.part)?")  # folder name of a cache, see ``folder.open_for``


class CacheFolder(NamedTuple):
    """One cache."""

    path: Path
    samples: int  # length of the dataset; 0 if it cannot be read
    state: str  # "complete", "filling", or "damaged": the next run recreates it
    nbytes: int  # on disk; holes take none
    used: float  # when a run last opened it, in s since the epoch


def listed(base: Path) -> list[CacheFolder]:
    """All caches in a folder, most recently used first. Raises UsageError if the folder cannot be listed."""
    try:
        found = [p for p in base.iterdir() if NAME.fullmatch(p.name) and os.access(p / MANIFEST, os.R_OK)]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UsageError(f"cannot list {base}: {e.strerror}") from e
    looked = (_look(path) for path in found)
    return sorted((c for c in looked if c is not None), key=lambda c: (-c.used, c.path))


def _look(path: Path) -> CacheFolder | None:
    """None: a run has just renamed or removed it."""
    files, blocks = {}, 0
    with contextlib.suppress(FileNotFoundError):
        blocks = path.lstat().st_blocks * 512
        for file in path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # one that was being made
                files[file.name] = file.lstat()
    if MANIFEST not in files:
        return None
    samples, state = 0, "filling" if path.suffix == PART else "complete"
    try:
        samples = int(manifest_of(path)["key"]["samples"])
    except (CacheError, ValueError, TypeError, LookupError, OverflowError):
        state = "damaged"
    opened = files.get("head.npy") or files[MANIFEST]
    nbytes = sum(file.st_blocks * 512 for file in files.values()) + blocks
    return CacheFolder(path, samples, state, nbytes, max(opened.st_atime, opened.st_mtime))


def find(caches: Sequence[CacheFolder], name: str) -> CacheFolder:
    """The only cache whose name equals, or begins with, ``name``. Raises UsageError if there is none, or several."""
    found = [c for c in caches if c.path.name == name] or [c for c in caches if name and c.path.name.startswith(name)]
    if len(found) != 1:
        names = ", ".join(sorted(c.path.name for c in found))
        raise UsageError(
            f"{name!r} is ambiguous: {names}" if found else f"no cache is named {name!r}: stoker cache ls lists them"
        )
    return found[0]


def remove_remnants(base: Path) -> None:
    """Removes what interrupted removals left."""
    for removed in base.glob(f"{REMOVED}*"):
        with contextlib.suppress(OSError):
            if all(NAME.fullmatch(p.name) for p in removed.iterdir()):
                shutil.rmtree(removed, ignore_errors=True)


def remove(base: Path, caches: Sequence[CacheFolder]) -> list[CacheFolder]:
    """Removes caches, and remnants of interrupted removals. Returns those that could not be removed."""
    remove_remnants(base)
    for cache in caches:
        discard(cache.path)
    return [cache for cache in caches if cache.path.exists()]
