"""Where a cache on disk lies: a folder of NumPy files, mapped, filled under one name and given its own when complete.

``NAME-KEY/``, while it is being filled ``NAME-KEY.part/``:

- ``manifest.json``: format, number of samples, and what the cache depends on, in plain words;
- ``place.npy``: where each sample lies (``store.Store.where``); ``head.npy``, ``words.npy``: the store's own;
- ``column-0.npy`` ...: samples of one make, a column a leaf; ``crc.npy``: a checksum a row;
- ``heap.npy``: samples of other makes, each with its checksum;
- ``sources.json``: the files the samples were made from.

The files are NumPy's (``npy``), sparse until written. Nothing here is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.files import cache_folder
from . import npy
from .encode import CacheError
from .memory import Lock

FORMAT = 2
BLOCKWISE = ("column-", "heap")  # tables whose room is taken as it is needed; that of others at once
PART = ".part"
MANIFEST, SOURCES = "manifest.json", "sources.json"
GONE = ".gone-"  # what a cache is moved into before it is removed


def root() -> Path:
    """``$STOKER_CACHE``, else ``stoker/staged`` where caches belong (XDG Base Directory Specification)."""
    named = os.environ.get("STOKER_CACHE")
    if named:
        return Path(named)
    return cache_folder("staged")


def digest(key: dict[str, Any]) -> str:
    """Sixteen characters that stand for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


class Folder:
    """Tables in files of one folder.

    Args:
        path: the folder; it is there.

    Raises:
        CacheError: no cache of this format, or a damaged one.
    """

    trusted = False  # whoever wrote it
    kind = "disk"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dir = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._dir).atexit = False
        self.writable = os.access(path, os.W_OK)
        self._files: dict[str, int] = {}
        try:
            fd = self._open("lock", os.O_RDWR | os.O_CREAT)
        except OSError:  # a folder that can only be read
            self.writable = False
            fd = -1
        self.lock: Any = Lock(fd) if fd >= 0 else _no_lock

    def __reduce__(self) -> Any:
        return _reopened, (self.path,)

    def _open(self, name: str, flags: int) -> int:
        fd = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._dir)
        weakref.finalize(self, os.close, fd).atexit = False
        return fd

    def table(self, name: str, dtype: Any, count: int, at: int) -> np.ndarray[Any, Any]:
        """``count`` values in a file of their own, which is made where there is none.

        Raises:
            CacheError: a file that is not what it has to be.
            OSError: it cannot be made.
        """
        dtype = np.dtype(dtype)
        file = f"{name}.npy"
        header = npy.beginning(dtype, count)
        size = len(header) + count * dtype.itemsize
        try:
            fd = self._open(file, os.O_RDWR if self.writable else os.O_RDONLY)
        except FileNotFoundError:
            if not self.writable:
                raise CacheError(f"{self.path / file} is missing") from None
            self._make(file, header, size, name.startswith(BLOCKWISE))
            fd = self._open(file, os.O_RDWR)
        self._files[name] = fd
        npy.check_length(self.path / file, fd, size)
        if os.pread(fd, len(header), 0) != header:
            raise CacheError(f"{self.path / file} begins otherwise than it should")
        access = mmap.ACCESS_WRITE if self.writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(fd, size, access=access), dtype, count, len(header))

    def _make(self, file: str, header: bytes, size: int, sparse: bool) -> None:
        """A file with its header, under a name of its own and then linked: whoever comes first wins.

        Its room is taken at once, unless that is done block by block: a write into a mapped hole is a SIGBUS where the
        disk is full.
        """
        beside = f".{file}.{os.getpid()}.{time.monotonic_ns()}"
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._dir)
        try:
            os.write(fd, header)
            os.ftruncate(fd, size)
            if not sparse:
                os.posix_fallocate(fd, 0, size)
            with contextlib.suppress(FileExistsError):
                os.link(beside, file, src_dir_fd=self._dir, dst_dir_fd=self._dir)
        finally:
            os.close(fd)
            os.unlink(beside, dir_fd=self._dir)

    def reserve(self, name: str, at: int, nbytes: int) -> None:
        """Takes room on the disk for a range of a table.

        Raises:
            OSError: there is none.
        """
        fd = self._files[name]
        os.posix_fallocate(fd, npy.begin_of(fd) + at, nbytes)

    def seal(self) -> None:
        """All is in: brings it to the disk and gives the folder its name."""
        if self.path.suffix != PART or not self.writable:
            return
        for fd in self._files.values():
            os.fsync(fd)
        os.fsync(self._dir)
        final = self.path.with_suffix("")
        with contextlib.suppress(OSError):  # another run was first
            os.rename(self.path, final)
        self.path = final


@contextlib.contextmanager
def _no_lock() -> Iterator[None]:
    yield


def _reopened(path: Path) -> Folder:
    try:
        return Folder(path)
    except FileNotFoundError:
        return Folder(path.with_suffix("") if path.suffix == PART else path)


def manifest_of(path: Path) -> dict[str, Any]:
    """A cache's manifest.

    Raises:
        CacheError: there is none, or it cannot be read.
    """
    try:
        found = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as e:
        raise CacheError(f"{path} has no readable {MANIFEST} ({e})") from e
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("key"), dict):
        raise CacheError(f"{path} is of another format")
    return found


class Opened(NamedTuple):
    """A folder for a cache.

    Attributes:
        folder: it.
        words: what is to be said about it: what changed since another one was made, what was thrown away; "".
    """

    folder: Folder
    words: str


def open_for(base: Path, name: str, key: dict[str, Any], sources: list[list[Any]]) -> Opened:
    """The folder of a cache for this key: complete, begun by somebody, or new.

    Args:
        base: where caches lie.
        name: what people call it.
        key: what it depends on; plain words and numbers.
        sources: the files that samples are made from: path, bytes, mtime in ns.

    Raises:
        OSError: it cannot be made or opened.
    """
    final = base / f"{name}-{digest(key)}"
    part = final.with_name(final.name + PART)
    words = ""
    for path in (final, part):
        if path.is_dir():
            try:
                manifest_of(path)
            except CacheError as e:
                words = f"{e}: it is made anew"
                discard(path)
    for _ in range(3):  # it may be renamed in between
        if final.is_dir():
            return Opened(Folder(final), words)
        if not part.is_dir():
            words = words or _changed(base, name, key, sources)
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                _begin(base, part, key, sources)
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another run was first
                    raise
        with contextlib.suppress(FileNotFoundError):
            return Opened(Folder(part), words)
    raise FileNotFoundError(f"{part} comes and goes")


def _begin(base: Path, part: Path, key: dict[str, Any], sources: list[list[Any]]) -> None:
    """A folder with its manifest, renamed when that is there."""
    beside = Path(tempfile.mkdtemp(prefix=".stoker-", dir=base))
    try:
        made = {"format": FORMAT, "made": time.strftime("%Y-%m-%d %H:%M:%S"), "key": key}
        (beside / MANIFEST).write_text(json.dumps(made, indent=1))
        (beside / SOURCES).write_text(json.dumps(sources))
        os.rename(beside, part)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def discard(path: Path) -> None:
    """Removes a cache; whoever has it mapped keeps what it has."""
    with contextlib.suppress(OSError):
        gone = Path(tempfile.mkdtemp(prefix=GONE, dir=path.parent))
        os.rename(path, gone / path.name)
        shutil.rmtree(gone, ignore_errors=True)


def caches(base: Path) -> list[Path]:
    """All caches in a folder, complete or not."""
    try:
        return sorted(
            p for p in base.iterdir() if p.is_dir() and (p / MANIFEST).is_file() and not p.name.startswith(".")
        )
    except OSError:
        return []


def _changed(base: Path, name: str, key: dict[str, Any], sources: list[list[Any]]) -> str:
    """What is another than in the newest cache of this name."""
    others = [p for p in caches(base) if p.name.rpartition("-")[0] == name]
    if not others:
        return ""
    newest = max(others, key=lambda p: p.stat().st_mtime)
    try:
        old = manifest_of(newest)["key"]
    except CacheError:
        return ""
    out = []
    for field, value in key.items():
        before = old.get(field)
        if before != value:
            if field == "sources":
                out += _files_changed(newest, sources)
            elif isinstance(value, dict) and isinstance(before, dict):
                out += [f"{k} was {before.get(k)}, is {v}" for k, v in value.items() if before.get(k) != v]
            else:
                out.append(f"{field} was {before}, is {value}" if isinstance(value, int) else f"{field} changed")
    return f"{newest.name} is not used: {'; '.join(out[:3])}" if out else ""


def _files_changed(cache: Path, sources: list[list[Any]]) -> list[str]:
    try:
        before = {str(p): rest for p, *rest in json.loads((cache / SOURCES).read_text())}
    except (OSError, ValueError, TypeError):
        return ["the source files changed"]
    now = {str(p): rest for p, *rest in sources}
    other = [p for p, rest in now.items() if p in before and before[p] != rest]
    new, gone = [p for p in now if p not in before], [p for p in before if p not in now]
    out = [
        f"{group[0]} {words}" + (f" and {len(group) - 1:,} more" if len(group) > 1 else "")
        for group, words in ((other, "changed"), (new, "is new"), (gone, "is gone"))
        if group
    ]
    return out or ["the order of the source files changed"]
