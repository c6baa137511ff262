"""Caches on disk for ``stoker cache ls | verify | prune``: which there are, whether they are intact, and their removal.

Listing writes nothing, unpickles nothing, and does not count as use; only ``verify`` opens a cache as a run does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.errors import UsageError
from ...core.types import JsonObject
from .decode import Layout
from .encode import CacheError
from .folder import MANIFEST, PART, REMOVED, Folder, content_digest, discard, manifest_of, read_table, sources_of
from .head import NUMBERS, SPEC_BYTES, Head, State
from .spec import without_classes
from .store import Store

NAME = re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{16}(?:\.part)?")  # of the folder of a cache, see ``folder.open_for``
NAMED = 10  # caches that an error names
COMPLETE, FILLING, FULL, REFUSED, DAMAGED = "complete", "filling", "full", "refused", "damaged"
TIME = "%Y-%m-%d %H:%M:%S"
# What reading damaged files may raise.
UNREADABLE = (CacheError, OSError, ValueError, TypeError, LookupError, RecursionError)
Tell = Callable[[int, int], None]


class Cache(NamedTuple):
    """One cache.

    Attributes:
        path: its folder.
        samples: of the dataset; 0 where that cannot be read.
        filled: of these, in the cache.
        nbytes: on the disk.
        budget: bytes that samples may take there.
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
    budget: int
    made: str
    used: float
    state: str
    reason: str

    @property
    def name(self) -> str:
        """Of the folder, without the suffix of one that is being filled."""
        return self.path.name.removesuffix(PART)

    @property
    def share(self) -> float:
        return self.filled / max(1, self.samples)

    def as_dict(self) -> JsonObject:
        """For JSON."""
        used = time.strftime(TIME, time.localtime(self.used))
        return {**self._asdict(), "name": self.name, "path": str(self.path), "share": self.share, "used": used}


class Verified(NamedTuple):
    """What ``verify`` found.

    Attributes:
        cache: as it was before.
        checked: samples verified.
        damaged: of these, damaged; removed, where the folder can be written.
        error: why the cache as a whole cannot be used; "".
        mended: whether the next run makes what is damaged anew.
    """

    cache: Cache
    checked: int
    damaged: list[int]
    error: str
    mended: bool

    def as_dict(self) -> JsonObject:
        """For JSON."""
        return {**self._asdict(), "cache": self.cache.as_dict()}


class Pruned(NamedTuple):
    """What ``prune`` removed.

    Attributes:
        removed: caches, as they were; or, in a dry run, that would be removed.
        left: caches that could not be removed.
        nbytes: freed, with the rest of removals that were interrupted.
    """

    removed: list[Cache]
    left: list[Cache]
    nbytes: int

    def as_dict(self) -> JsonObject:
        """For JSON."""
        removed, left = ([c.as_dict() for c in caches] for caches in (self.removed, self.left))
        return {"removed": removed, "left": left, "nbytes": self.nbytes}


# -- ls


def listed(base: Path) -> list[Cache]:
    """All caches in a folder, the newest first. Other entries of the folder are ignored.

    Raises:
        UsageError: the folder cannot be listed.
    """
    return sorted(map(look, _paths(base)), key=lambda c: (c.made, c.name), reverse=True)


def find(base: Path, name: str) -> Path:
    """The folder of the one cache whose name is, or begins with, ``name``.

    Raises:
        UsageError: none, or several; the message names them.
    """
    paths = _paths(base)
    exact = [p for p in paths if p.name == name]
    found = exact or [p for p in paths if name and p.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name!r} may be {_or(found)}")
    there = f"it has {_or(paths)}" if paths else "it has none"
    raise UsageError(f"there is no cache {name!r} in {base}; {there}")


def look(path: Path) -> Cache:
    """One cache. Damage is reported in its ``state`` and ``reason``."""
    used_file = _lstat(path / "head.npy") or _lstat(path)
    used = max(used_file.st_atime, used_file.st_mtime) if used_file is not None else 0.0
    made = time.strftime(TIME, time.localtime(used_file.st_mtime if used_file is not None else 0))
    samples = 0
    head = _head_of_nothing()
    try:
        manifest = manifest_of(path)
        made = manifest["made"] if isinstance(manifest.get("made"), str) and manifest["made"] else made
        found = manifest["key"].get("samples")
        samples = found if type(found) is int and found > 0 else 0
        for file in sorted(_files(path)):
            if file.endswith(".npy"):
                read_table(path / file)
        head = _read_head(path)
        _check_head(path, head, samples)
        state, reason = _state(head)
    except UNREADABLE as e:
        state, reason = DAMAGED, str(e)
    filled = min(max(0, head.filled), samples)
    return Cache(path, samples, filled, nbytes_of(path), head.budget, made, used, state, reason)


def nbytes_of(path: Path) -> int:
    """Bytes that a folder's files take on the disk; holes take none."""
    return sum(_files(path).values())


def _paths(base: Path) -> list[Path]:
    try:
        with os.scandir(base) as entries:
            mine = [Path(e.path) for e in entries if NAME.fullmatch(e.name) and e.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UsageError(f"{base} cannot be listed: {e.strerror}") from e
    return sorted(p for p in mine if _lstat(p / MANIFEST) or _lstat(p / "head.npy"))


def _or(paths: Sequence[Path]) -> str:
    names = [p.name for p in paths[:NAMED]] + [f"{len(paths) - NAMED:,} more"] * (len(paths) > NAMED)
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _files(path: Path) -> dict[str, int]:
    """Bytes on the disk of each file of a folder. Files that disappear meanwhile are left out."""
    out = {}
    try:
        with os.scandir(path) as entries:
            for e in entries:
                found = _lstat(Path(e.path))
                if found is not None and stat.S_ISREG(found.st_mode):
                    out[e.name] = found.st_blocks * 512
    except OSError:
        pass
    return out


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _head_of_nothing() -> Head:
    return Head(np.zeros(NUMBERS, np.int64), np.zeros(2 * SPEC_BYTES, np.uint8))


def _read_head(path: Path) -> Head:
    """The head of a cache; zeros where nothing was stored yet."""
    if path.suffix == PART and not (path / "head.npy").exists():
        return _head_of_nothing()
    numbers = np.frombuffer(read_table(path / "head.npy", 0, NUMBERS * 8), np.int64)
    has_texts = (path / "words.npy").exists()
    texts = read_table(path / "words.npy", 0, 2 * SPEC_BYTES) if has_texts else bytes(2 * SPEC_BYTES)
    return Head(numbers, np.frombuffer(texts, np.uint8))


def _check_head(path: Path, head: Head, samples: int) -> None:
    """Raises ``CacheError`` where a head contradicts the manifest or the files."""
    if not samples:
        raise CacheError(f"{path / MANIFEST} has no number of samples")
    if head.samples not in (0, samples):
        raise CacheError(f"a cache of {head.samples:,} samples for a dataset of {samples:,}")
    if not 0 <= head.filled <= samples:
        raise CacheError(f"{path / 'head.npy'} has {head.filled:,} of {samples:,} samples")
    if not head.filled or head.state == State.DISABLED:
        return
    for name in ("place", "words", "heap", *(("column-0", "crc") if head.state == State.ROWS else ())):
        if not (path / f"{name}.npy").exists():
            raise CacheError(f"{path / name}.npy is missing")
    if head.state not in (State.ROWS, State.BLOCKS):
        raise CacheError(f"{path / 'head.npy'} does not say how samples are stored")


def _state(head: Head) -> tuple[str, str]:
    """The state of a cache without visible damage, and the reason."""
    if head.filled == head.samples and head.samples:
        return COMPLETE, ""
    if head.state == State.DISABLED:
        return REFUSED, head.reason
    return (FULL, head.reason) if head.reason_length else (FILLING, "")


# -- verify


class _ByteStore(Store):
    """A store whose samples are verified and not put together: this run need not have their classes."""

    def _layout_of(self, type_spec: str, trusted: bool) -> Layout:
        made = Layout(json.dumps(without_classes(json.loads(type_spec))), trusted)
        made.type_spec = type_spec  # checksums include it
        return made


def verify(path: Path, tell: Tell | None = None) -> Verified:
    """Reads all samples of a cache. Damaged ones are removed, so that the next run makes them anew.

    Args:
        path: its folder.
        tell: called with the number of samples verified so far, and of all.
    """
    cache = look(path)
    if cache.state == DAMAGED:
        return Verified(cache, 0, [], cache.reason, os.access(path.parent, os.W_OK))
    if cache.state == REFUSED or not cache.filled:
        return Verified(cache, 0, [], "", True)
    try:
        folder = Folder(path)
        store = _ByteStore(folder, cache.samples, cache.budget)
        if not store.ready():
            raise CacheError(f"{path / 'head.npy'} does not say how samples are stored")
        checked = int(np.count_nonzero(store.locations))
        return Verified(cache, checked, store.check(tell), "", folder.writable)
    except UNREADABLE as e:
        return Verified(cache, 0, [], str(e), os.access(path.parent, os.W_OK))


# -- prune


def prune(
    base: Path, names: Sequence[str] = (), older_s: float | None = None, unused: bool = False, dry: bool = False
) -> Pruned:
    """Removes the caches that meet all conditions.

    Args:
        base: where they are.
        names: these, as ``find`` finds them; (): all.
        older_s: not used for this many seconds.
        unused: made from source files that are gone or have changed since, so that no run asks for them.
        dry: removes nothing.

    Raises:
        UsageError: a name without a cache.
    """
    chosen = [look(p) for p in dict.fromkeys(find(base, n) for n in names)] if names else listed(base)
    if older_s is not None:
        since = time.time() - older_s
        chosen = [c for c in chosen if c.used < since]
    if unused:
        chosen = [c for c in chosen if _sources_changed(c.path)]
    if dry:
        return Pruned(chosen, [], sum(c.nbytes for c in chosen))
    nbytes = _finish_removals(base)
    for cache in chosen:
        discard(cache.path)
    left = [c for c in chosen if c.path.exists()]
    removed = [c for c in chosen if c not in left]
    return Pruned(removed, left, nbytes + sum(c.nbytes for c in removed))


def _sources_changed(cache: Path) -> bool:
    """Whether a source file is gone or has changed. Relative paths and files that cannot be read are ignored."""
    try:
        sources = list(sources_of(cache))
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    return any(os.path.isabs(path) and _has_changed(path, nbytes, version) for path, nbytes, version in sources)


def _has_changed(path: str, nbytes: int, version: int | str) -> bool:
    try:
        found = os.stat(path)
        if found.st_size != nbytes:
            return True
        return version != (content_digest(path) if isinstance(version, str) else found.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False


def _finish_removals(base: Path) -> int:
    """Finishes removals that were interrupted. Returns the bytes freed."""
    freed = 0
    for removed in base.glob(f"{REMOVED}*"):
        try:
            inside = list(removed.iterdir())
        except OSError:
            continue
        if all(NAME.fullmatch(p.name) for p in inside):
            freed += sum(map(nbytes_of, inside))
            shutil.rmtree(removed, ignore_errors=True)
    return freed
