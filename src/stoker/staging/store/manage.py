"""Caches on disk from outside: which there are, what they are made of, whether they are whole, and away with them.

Looking writes nothing, unpickles nothing, and does not count as use; only ``verify`` opens a cache as a run does.
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
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import UsageError
from . import npy
from . import store as words_of
from .decode import Layout
from .encode import CacheError
from .folder import GONE, MANIFEST, PART, Folder, discard, manifest_of
from .layout import WORDS
from .sources import sources_of
from .store import Store

NAME = re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{16}(?:\.part)?")  # what folder.open_for calls a cache
NAMED = 10  # caches that an error names
COMPLETE, FILLING, FULL, REFUSED, DAMAGED = "complete", "filling", "full", "refused", "damaged"
Tell = Callable[[int, int], None]


class Cache(NamedTuple):
    """One cache, seen from outside.

    Attributes:
        path: its folder.
        samples: of the dataset; 0 where that cannot be read.
        filled: of these, in the cache.
        nbytes: bytes on the disk.
        budget: bytes that samples may take there.
        made: when it was begun, in words.
        used: when a run last opened it, in s since the epoch.
        state: "complete", "filling", "full", "refused" (its samples cannot be kept) or "damaged" (made anew by the
            next run that wants it).
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
        """The folder's, without what says that it is being filled."""
        return self.path.name.removesuffix(PART)

    @property
    def share(self) -> float:
        return self.filled / max(1, self.samples)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.used))
        return {**self._asdict(), "name": self.name, "path": str(self.path), "share": self.share, "used": used}


class Verified(NamedTuple):
    """What ``verify`` found.

    Attributes:
        cache: as it was before.
        checked: samples looked at.
        damaged: of these, damaged; let go, where the folder can be written.
        error: why the cache as a whole cannot be used; "".
        mended: whether the next run makes what is damaged anew.
    """

    cache: Cache
    checked: int
    damaged: list[int]
    error: str
    mended: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "cache": self.cache.as_dict()}


class Pruned(NamedTuple):
    """What ``prune`` removed.

    Attributes:
        removed: caches, as they were; or that would be.
        left: caches that could not be removed.
        nbytes: bytes freed, with what was left over from removals that were interrupted.
    """

    removed: list[Cache]
    left: list[Cache]
    nbytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "removed": [c.as_dict() for c in self.removed],
            "left": [c.as_dict() for c in self.left],
            "nbytes": self.nbytes,
        }


# -- looking


def listed(base: Path) -> list[Cache]:
    """All caches in a folder, the newest first. What else lies there is not looked at.

    Raises:
        UsageError: the folder cannot be listed.
    """
    return sorted(map(look, _paths(base)), key=lambda c: (c.made, c.name), reverse=True)


def find(base: Path, name: str) -> Path:
    """The folder of the one cache of this name, or whose name begins so.

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
    """One cache. Whatever is wrong with it is in its ``state`` and ``reason``."""
    samples, reason = 0, ""
    made: Any = ""
    try:
        manifest = manifest_of(path)
        said, made = manifest["key"].get("samples"), manifest.get("made")
        if type(said) is int and said > 0:
            samples = said
        else:
            reason = f"{path / MANIFEST} has no number of samples"
    except (CacheError, RecursionError) as e:
        reason = str(e)
    head_path = path / "head.npy"
    there = _stat(head_path) or _stat(path)
    used = max(there.st_atime, there.st_mtime) if there is not None else 0.0
    if not isinstance(made, str) or not made:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(there.st_mtime if there is not None else 0))
    head, state = [0] * words_of.HEAD, FILLING
    try:
        for file in sorted(_files(path)):
            if file.endswith(".npy"):
                npy.read(path / file)
        if path.suffix != PART and not head_path.exists():
            raise CacheError(f"{head_path} is missing")
        head = _head(path)
        reason = reason or _contradiction(path, head, samples)
        state, reason = (DAMAGED, reason) if reason else _state(path, head, samples)
    except (CacheError, OSError, ValueError) as e:
        state, reason = DAMAGED, reason or str(e)
    filled = min(max(0, head[words_of.FILLED]), samples)
    return Cache(path, samples, filled, nbytes_of(path), head[words_of.BUDGET], made, used, state, reason)


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
    return sorted(p for p in mine if _stat(p / MANIFEST) or _stat(p / "head.npy"))


def _or(paths: Sequence[Path]) -> str:
    names = [p.name for p in paths[:NAMED]]
    more = [f"{len(paths) - NAMED:,} more"] * (len(paths) > NAMED)
    return " or ".join(filter(None, [", ".join([*names, *more][:-1]), [*names, *more][-1]]))


def _files(path: Path) -> dict[str, int]:
    """Bytes on the disk of each file of a folder. What goes away meanwhile is left out."""
    out = {}
    try:
        with os.scandir(path) as entries:
            for e in entries:
                found = _stat(Path(e.path))
                if found is not None and stat.S_ISREG(found.st_mode):
                    out[e.name] = found.st_blocks * 512
    except OSError:
        pass
    return out


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _head(path: Path) -> list[int]:
    """Zeros where nothing was begun yet."""
    if not (path / "head.npy").exists():
        return [0] * words_of.HEAD
    words: list[int] = np.frombuffer(npy.read(path / "head.npy", 0, words_of.HEAD * 8), np.int64).tolist()
    return words


def _words(path: Path, at: int, nbytes: int) -> str:
    data = npy.read(path / "words.npy", at, min(max(0, nbytes), WORDS))
    return data.decode(errors="replace")


def _contradiction(path: Path, head: list[int], samples: int) -> str:
    """What a head says that cannot be; ""."""
    if head[words_of.COUNT] != samples and head[words_of.COUNT]:
        return f"a cache of {head[words_of.COUNT]:,} samples for a dataset of {samples:,}"
    if not 0 <= head[words_of.FILLED] <= samples:
        return f"{path / 'head.npy'} says that {head[words_of.FILLED]:,} of {samples:,} samples are in"
    if not head[words_of.FILLED] or head[words_of.STATE] == words_of.SHUT:
        return ""
    rows = ("column-0", "crc") if head[words_of.STATE] == words_of.ROWED else ()
    for name in ("place", "words", "heap", *rows):
        if not (path / f"{name}.npy").exists():
            return f"{path / name}.npy is missing"
    if head[words_of.STATE] not in (words_of.ROWED, words_of.HEAPED):
        return f"{path / 'head.npy'} does not say how samples lie"
    return ""


def _state(path: Path, head: list[int], samples: int) -> tuple[str, str]:
    """In what state a cache is that has no damage to be seen, and why."""
    if head[words_of.FILLED] == samples:
        return COMPLETE, ""
    if not head[words_of.REASON_LEN] and head[words_of.STATE] != words_of.SHUT:
        return FILLING, ""
    reason = _words(path, WORDS, head[words_of.REASON_LEN])
    return (REFUSED if head[words_of.STATE] == words_of.SHUT else FULL), reason


# -- doing


class _Opened(Store):
    """A store whose samples are looked at and not put together: named tuples need not be there in this run."""

    def _layout_of(self, words: str) -> Layout:
        made = Layout(json.dumps(_unnamed(json.loads(words))), self.medium.trusted)
        made.words = words  # what the checksums are of
        return made


def _unnamed(tree: Any) -> Any:
    """The same leaves, in tuples where they lay in named ones."""
    if tree[0] in ("(", "["):
        return [tree[0], list(map(_unnamed, tree[1]))]
    if tree[0] in ("{", "N"):
        return ["(", list(map(_unnamed, tree[2]))]
    return tree


def verify(path: Path, tell: Tell | None = None) -> Verified:
    """Reads all that is in a cache. Samples that are damaged are let go, so that the next run makes them anew.

    Args:
        path: its folder.
        tell: called with how many samples were looked at, of how many.
    """
    cache = look(path)
    if cache.state == DAMAGED:
        return Verified(cache, 0, [], cache.reason, os.access(path.parent, os.W_OK))
    if cache.state == REFUSED or not cache.filled:
        return Verified(cache, 0, [], "", True)
    try:
        folder = Folder(path)
        store = _Opened(folder, cache.samples, cache.budget)
        if not store.ready():
            raise CacheError(f"{path / 'head.npy'} does not say how samples lie")
        checked = int(np.count_nonzero(store.place))
        return Verified(cache, checked, store.check(tell), "", folder.writable)
    except (CacheError, OSError, ValueError, TypeError, LookupError, RecursionError) as e:
        return Verified(cache, 0, [], str(e), os.access(path.parent, os.W_OK))


def prune(
    base: Path, names: Sequence[str] = (), older_s: float | None = None, unused: bool = False, dry: bool = False
) -> Pruned:
    """Removes caches: those for which all that is said holds; all where nothing is.

    Args:
        base: where they lie.
        names: these, as ``find`` finds them.
        older_s: not used for so many seconds.
        unused: made from source files that are gone or changed since, so that no run asks for them.
        dry: removes nothing.

    Raises:
        UsageError: a name that is none.
    """
    chosen = [look(p) for p in dict.fromkeys(find(base, n) for n in names)] if names else listed(base)
    if older_s is not None:
        since = time.time() - older_s
        chosen = [c for c in chosen if c.used < since]
    if unused:
        chosen = [c for c in chosen if (found := sources_of(c.path)) is not None and (found.changed or found.gone)]
    if dry:
        return Pruned(chosen, [], sum(c.nbytes for c in chosen))
    nbytes = _leftovers(base)
    for cache in chosen:
        discard(cache.path)
    left = [c for c in chosen if c.path.exists()]
    removed = [c for c in chosen if c not in left]
    return Pruned(removed, left, nbytes + sum(c.nbytes for c in removed))


def _leftovers(base: Path) -> int:
    """Finishes removals that were interrupted. Returns the bytes freed."""
    freed = 0
    for gone in base.glob(f"{GONE}*"):
        try:
            inside = list(gone.iterdir())
        except OSError:
            continue
        if all(NAME.fullmatch(p.name) for p in inside):
            freed += sum(map(nbytes_of, inside))
            shutil.rmtree(gone, ignore_errors=True)
    return freed
