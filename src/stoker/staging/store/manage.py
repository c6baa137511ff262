"""Caches on disk for ``stoker cache``: which there are, and their removal.

Listing writes nothing, unpickles nothing, and does not count as use.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.errors import UsageError
from ...core.types import JsonObject
from .encode import CacheError
from .folder import MANIFEST, PART, REMOVED, discard, manifest_of, read_table
from .head import NUMBERS, SPEC_BYTES, Head, State

NAME = re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{16}(?:\.part)?")  # of the folder of a cache, see ``folder.open_for``
NAMED = 10  # caches that an error names
TIME = "%Y-%m-%d %H:%M:%S"
# What reading damaged files may raise.
UNREADABLE = (CacheError, OSError, ValueError, TypeError, LookupError, RecursionError)


class Cache(NamedTuple):
    """One cache.

    Attributes:
        path: its folder.
        samples: of the dataset; 0 where that cannot be read.
        filled: of these, in the cache.
        nbytes: on the disk.
        made: date and time.
        used: when a run last opened it, in s since the epoch.
        state: "complete", "filling", "full", "refused" (its samples cannot be cached) or "damaged" (the next run makes
            it anew).
        reason: why it is full, refused or damaged; else "".
    """

    path: Path
    samples: int
    filled: int
    nbytes: int
    made: str
    used: float
    state: str
    reason: str

    def as_dict(self) -> JsonObject:
        """For JSON."""
        used = time.strftime(TIME, time.localtime(self.used))
        return {**self._asdict(), "name": self.path.name.removesuffix(PART), "path": str(self.path), "used": used}


def listed(base: Path) -> list[Cache]:
    """All caches in a folder, the newest first. Other entries of the folder are ignored.

    Raises:
        UsageError: the folder cannot be listed.
    """
    return sorted(map(look, _paths(base)), key=lambda c: (c.made, c.path), reverse=True)


def find(base: Path, name: str) -> Path:
    """The folder of the one cache whose name is, or begins with, ``name``.

    Raises:
        UsageError: none, or several; the message names them.
    """
    paths = _paths(base)
    found = [p for p in paths if p.name == name] or [p for p in paths if name and p.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(p.name for p in (found or paths)[:NAMED])
    if found:
        raise UsageError(f"{name!r} may be any of {names}")
    raise UsageError(f"there is no cache {name!r} in {base}; it has {names or 'none'}")


def look(path: Path) -> Cache:
    """One cache. Damage is reported in its ``state`` and ``reason``."""
    found = _lstat(path / "head.npy") or _lstat(path)
    used, made = (max(found.st_atime, found.st_mtime), found.st_mtime) if found is not None else (0.0, 0.0)
    text, samples, filled = time.strftime(TIME, time.localtime(made)), 0, 0
    try:
        manifest = manifest_of(path)
        text = str(manifest.get("made", text))
        number = manifest["key"].get("samples")
        samples = number if type(number) is int and number > 0 else 0
        for file in path.glob("*.npy"):
            read_table(file)
        head = _read_head(path)
        filled = min(max(0, head.filled), samples)
        state, reason = _state(head)
    except UNREADABLE as e:
        state, reason = "damaged", str(e)
    return Cache(path, samples, filled, nbytes_of(path), text, used, state, reason)


def nbytes_of(path: Path) -> int:
    """Bytes that a folder's files take on the disk; holes take none."""
    try:
        found = [_lstat(file) for file in path.iterdir()]
    except OSError:
        return 0
    return sum(file.st_blocks * 512 for file in found if file is not None and stat.S_ISREG(file.st_mode))


def remove(base: Path, caches: Sequence[Cache]) -> list[Cache]:
    """Removes caches, and what is left of removals that were interrupted. Returns those that could not be removed."""
    for removed in base.glob(f"{REMOVED}*"):
        with contextlib.suppress(OSError):
            if all(NAME.fullmatch(p.name) for p in removed.iterdir()):
                shutil.rmtree(removed, ignore_errors=True)
    for cache in caches:
        discard(cache.path)
    return [cache for cache in caches if cache.path.exists()]


def _paths(base: Path) -> list[Path]:
    try:
        found = [p for p in base.iterdir() if NAME.fullmatch(p.name) and p.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UsageError(f"{base} cannot be listed: {e.strerror}") from e
    return sorted(p for p in found if _lstat(p / MANIFEST) or _lstat(p / "head.npy"))


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _read_head(path: Path) -> Head:
    """The head of a cache; zeros where nothing was stored yet."""
    if path.suffix == PART and not (path / "head.npy").exists():
        return Head(np.zeros(NUMBERS, np.int64), np.zeros(2 * SPEC_BYTES, np.uint8))
    numbers = np.frombuffer(read_table(path / "head.npy", 0, NUMBERS * 8), np.int64)
    has_texts = (path / "words.npy").exists()
    texts = read_table(path / "words.npy", 0, 2 * SPEC_BYTES) if has_texts else bytes(2 * SPEC_BYTES)
    return Head(numbers, np.frombuffer(texts, np.uint8))


def _state(head: Head) -> tuple[str, str]:
    """The state of a cache without visible damage, and the reason."""
    if head.filled == head.samples and head.samples:
        return "complete", ""
    if head.state == State.DISABLED:
        return "refused", head.reason
    return ("full", head.reason) if head.reason_length else ("filling", "")
