"""A cache on disk: a folder of memory-mapped NumPy files, filled under a temporary name and renamed when complete.

``NAME-KEY/``; ``NAME-KEY.part/`` while it is being filled:

- ``manifest.json``: format, number of samples, and what the cache depends on;
- ``place.npy``: the location of each sample (see ``tables``); ``head.npy``, ``words.npy``: see ``head``;
- ``column-0.npy`` ...: samples of one type, one column per leaf; ``crc.npy``: a checksum per row;
- ``heap.npy``: samples of other types, each with its checksum.

The files are sparse until written. Nothing in them is ever unpickled. Checksums detect damage, not deliberate changes:
the folder and files must belong to the user or root, and be writable to nobody else. Links inside the folder are not
followed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import mmap
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ...core.files import cache_folder, make_folder
from ...core.types import JsonObject
from .encode import CacheError
from .memory import Lock
from .spec import Number

FORMAT = 5
GROWING = ("column-", "heap")  # tables whose disk space is reserved block by block; the others reserve all at once
LOCK_S = 10.0  # how long to wait for another process's lock when a cache is opened
PART = ".part"
MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 24  # at most
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # follows no link, waits for no pipe
REMOVED = ".gone-"  # prefix of the folder to which a cache is moved before its removal


def root() -> Path:
    """Default folder of caches: ``$STOKER_CACHE``, else ``stoker/staged`` in the user's cache folder."""
    named = os.environ.get("STOKER_CACHE")
    if named:
        return Path(named)
    return cache_folder("staged")


def digest(key: JsonObject) -> str:
    """Sixteen characters that identify a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


class NotOwn(CacheError):
    """A folder or file that somebody else created or can write to."""


def check_base(base: Path) -> None:
    """Raises NotOwn if others could rename caches in a folder, so that one of earlier inputs has the name of another.
    OSError if it cannot be asked."""
    found = base.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise NotOwn(f"{base} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise NotOwn(f"{base} is writable by other users (chmod go-w)")


def _check_own(fd: int, path: Path) -> None:
    found = os.fstat(fd)
    if found.st_uid not in (0, os.geteuid()):
        raise NotOwn(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotOwn(f"{path} is writable by other users")


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _check_folder(path: Path) -> None:
    with contextlib.suppress(OSError):
        fd = _open_folder(path)
        try:
            _check_own(fd, path)
        finally:
            os.close(fd)


class Folder:
    """Tables in mapped files of one folder. Raises NotOwn; OSError if it cannot be opened, or stays locked."""

    trusted = pickles = False  # anybody may have written it
    kind = "disk"
    mapped = True
    lock: Callable[[], contextlib.AbstractContextManager[None]]

    def __init__(self, path: Path) -> None:
        self._attach(path)
        self.writable = os.access(path, os.W_OK)
        try:
            lock = Lock(self._open("lock", os.O_RDWR | os.O_CREAT))
        except (OSError, CacheError):  # a read-only folder
            self.writable = False
            return
        with lock(LOCK_S):
            self.lock = lock

    def _attach(self, path: Path) -> None:
        self.path = path
        self._dir = _open_folder(path)
        weakref.finalize(self, os.close, self._dir).atexit = False
        _check_own(self._dir, path)
        self._files: dict[str, tuple[int, int]] = {}  # by table: the descriptor, and the offset of the values
        self.lock = contextlib.nullcontext

    def wait_at_most(self, seconds: float) -> None:
        """From now on, raises TimeoutError when another process holds the lock for longer."""
        if isinstance(self.lock, Lock):
            self.lock = functools.partial(self.lock, seconds)

    def __reduce__(self) -> tuple[Callable[[type[Folder], Path], Folder], tuple[type[Folder], Path]]:
        return _reopened, (type(self), self.path)

    def _open(self, name: str, flags: int) -> int:
        """Opens a file. Raises OSError; CacheError if it is not a regular file, or not one's own."""
        fd = os.open(name, flags | SAFE, 0o600, dir_fd=self._dir)
        weakref.finalize(self, os.close, fd).atexit = False
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CacheError(f"{self.path / name} is not a regular file")
        _check_own(fd, self.path / name)
        return fd

    def table(self, name: str, dtype: type[Number], count: int, start: int) -> NDArray[Number]:
        """Maps ``count`` values in a file of their own, creating the file if needed. Raises CacheError if the file has
        other contents, OSError if it cannot be created."""
        kind = np.dtype(dtype)
        file = f"{name}.npy"
        header = _header(kind, count)
        size = len(header) + count * kind.itemsize
        try:
            fd = self._open(file, os.O_RDWR if self.writable else os.O_RDONLY)
        except FileNotFoundError:
            if not self.writable:
                raise CacheError(f"{self.path / file} is missing") from None
            self._create(file, header, size, name.startswith(GROWING))
            fd = self._open(file, os.O_RDWR)
        self._check_table(name, fd, header, size)
        access = mmap.ACCESS_WRITE if self.writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(fd, size, access=access), kind, count, len(header))

    def _check_table(self, name: str, fd: int, header: bytes, size: int) -> None:
        self._files[name] = fd, len(header)
        path = self.path / f"{name}.npy"
        there = os.fstat(fd).st_size
        if there != size:
            problem = "is truncated" if there < size else "is longer than it should be"
            raise CacheError(f"{path} {problem}: {there:,} bytes of {size:,}")
        if os.pread(fd, len(header), 0) != header:
            raise CacheError(f"{path} has a wrong header")

    def _create(self, file: str, header: bytes, size: int, sparse: bool) -> None:
        """Writes a file under a temporary name and links it, so that the first of several processes wins. Reserves its
        disk space at once unless ``sparse``: writing to a mapped hole on a full disk is a SIGBUS."""
        temporary = f".{file}.{os.getpid()}.{time.monotonic_ns()}"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._dir)
        try:
            os.write(fd, header)
            os.ftruncate(fd, size)
            if not sparse:
                os.posix_fallocate(fd, 0, size)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, file, src_dir_fd=self._dir, dst_dir_fd=self._dir)
        finally:
            os.close(fd)
            os.unlink(temporary, dir_fd=self._dir)

    def reserve(self, name: str, offset: int, nbytes: int) -> None:
        """Reserves disk space for a range of a table. Raises OSError if the disk is full."""
        fd, begin = self._files[name]
        os.posix_fallocate(fd, begin + offset, nbytes)

    def write(self, table: NDArray[np.uint8], start: int, offset: int, data: NDArray[np.uint8]) -> None:
        """Writes bytes into a table, in reserved space."""
        table[offset : offset + len(data)] = data

    def give_back(self, start: int) -> None:
        """Does nothing: the system itself drops pages of files."""

    def sync(self) -> None:
        """Brings what was written to the disk."""
        for fd, _ in self._files.values():
            os.fdatasync(fd)

    def seal(self) -> None:
        """Call when all samples are stored: flushes them to disk and gives the folder its final name."""
        if self.path.suffix != PART or not self.writable:
            return
        for fd, _ in self._files.values():
            os.fsync(fd)
        os.fsync(self._dir)
        final = self.path.with_suffix("")
        with contextlib.suppress(OSError):  # another run was first
            os.rename(self.path, final)
        self.path = final


class ReadFolder(Folder):
    """Tables that are read and never written. Takes no lock, so no other process can make this one wait. Maps nothing:
    reading what was truncated raises CacheError, where a mapped file would end the process (SIGBUS). What is written
    after it was opened is not seen."""

    writable = mapped = False

    def __init__(self, path: Path) -> None:
        self._attach(path)

    def table(self, name: str, dtype: type[Number], count: int, start: int) -> NDArray[Number]:
        """Opens ``count`` values: ``FileBytes`` of samples, an array of anything else."""
        kind = np.dtype(dtype)
        header = _header(kind, count)
        try:
            fd = self._open(f"{name}.npy", os.O_RDONLY)
        except FileNotFoundError as e:
            raise CacheError(f"{self.path / name}.npy is missing") from e
        self._check_table(name, fd, header, len(header) + count * kind.itemsize)
        values = FileBytes(self.path / f"{name}.npy", fd, len(header), count * kind.itemsize)
        return cast("NDArray[Number]", values) if name.startswith(GROWING) else values[:].view(kind)


class FileBytes:
    """The bytes of a file from an offset on, read slice by slice."""

    def __init__(self, path: Path, fd: int, start: int, size: int) -> None:
        self._path, self._fd, self._start, self.size = path, fd, start, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, wanted: slice) -> NDArray[np.uint8]:
        """Reads a slice. Raises CacheError if the file is shorter than it was, OSError if it cannot be read."""
        begin, end, _ = wanted.indices(self.size)
        out = np.empty(max(0, end - begin), np.uint8)
        done = 0
        while done < len(out):
            n = os.preadv(self._fd, [out[done:].data], self._start + begin + done)
            if not n:
                raise CacheError(f"{self._path} is truncated")
            done += n
        return out


def _reopened(cls: type[Folder], path: Path) -> Folder:
    try:
        return cls(path)
    except FileNotFoundError:
        return cls(path.with_suffix("") if path.suffix == PART else path)


# -- NumPy files (NEP 1, version 1.0) of integers in one dimension


def _header(dtype: np.dtype[np.generic], count: int) -> bytes:
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": (count,)})
    return out.getvalue()


# -- folders


def manifest_of(path: Path) -> JsonObject:
    """Reads a cache's manifest. Raises CacheError if it is missing, damaged or of another version."""
    try:
        found = json.loads(_read_manifest(path))
    except (OSError, ValueError, RecursionError) as e:
        raise CacheError(f"{path} has no readable {MANIFEST} ({e})") from e
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("key"), dict):
        raise CacheError(f"{path} has another format")
    return found


def _read_manifest(path: Path) -> bytes:
    folder = _open_folder(path)
    try:
        fd = os.open(MANIFEST, os.O_RDONLY | SAFE, dir_fd=folder)
    finally:
        os.close(folder)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        return file.read(MANIFEST_BYTES)


def paths_for(base: Path, name: str, key: JsonObject) -> tuple[Path, Path]:
    """The folder of a cache for this key, when it is complete and until then."""
    final = base / f"{name}-{digest(key)}"
    return final, final.with_name(final.name + PART)


def is_of(path: Path, key: JsonObject) -> bool:
    """Whether a folder is a cache of this key, whatever its name says."""
    try:
        return digest(manifest_of(path)["key"]) == digest(key)
    except CacheError:
        return False


def open_for(base: Path, name: str, key: JsonObject) -> tuple[Folder, str]:
    """Opens the folder of a cache for this key: complete, partly filled, or new. Also returns why an earlier one is not
    used, or "". Raises OSError or CacheError if it cannot be created or opened, or NotOwn."""
    final, part = paths_for(base, name, key)
    note = ""
    for path in (final, part):
        if path.is_dir():
            _check_folder(path)
            try:
                if digest(manifest_of(path)["key"]) != digest(key):
                    raise CacheError(f"{path} was made for different samples")
            except CacheError as e:
                note = f"{e}: creating a new cache"
                discard(path)
    for _ in range(3):  # it may be renamed in the meantime
        if final.is_dir():
            return Folder(final), note
        if not part.is_dir():
            note = note or _what_changed(base, name, key)
            try:
                make_folder(base)
                _create(base, part, key)
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another run was first
                    if note:  # the folder of a cache that was made for others to read
                        raise CacheError(f"{e.strerror}, and {note}") from e
                    raise
        with contextlib.suppress(FileNotFoundError):
            return Folder(part), note
    raise FileNotFoundError(f"{part} was removed while it was being opened")


def _create(base: Path, part: Path, key: JsonObject) -> None:
    """Creates a folder with its manifest, and renames it once the manifest is written."""
    temporary = Path(tempfile.mkdtemp(prefix=".stoker-", dir=base))
    try:
        manifest = {"format": FORMAT, "made": time.strftime("%Y-%m-%d %H:%M:%S"), "key": key}
        fd = os.open(temporary / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o600)
        with open(fd, "w") as file:
            json.dump(manifest, file, indent=1)
        os.rename(temporary, part)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def discard(path: Path) -> None:
    """Removes a cache. Processes that have it mapped can continue to read it."""
    with contextlib.suppress(OSError):
        removed = Path(tempfile.mkdtemp(prefix=REMOVED, dir=path.parent))
        try:
            os.rename(path, removed / path.name)
        finally:
            shutil.rmtree(removed, ignore_errors=True)


def caches(base: Path) -> list[Path]:
    """All caches in a folder, complete or not."""
    try:
        return sorted(
            p for p in base.iterdir() if p.is_dir() and (p / MANIFEST).is_file() and not p.name.startswith(".")
        )
    except OSError:
        return []


def _what_changed(base: Path, name: str, key: JsonObject) -> str:
    """How this key differs from that of the newest cache of the same name; "" if it does not, or there is none."""
    others = [p for p in caches(base) if p.name.rpartition("-")[0] == name]
    if not others:
        return ""
    newest = max(others, key=lambda p: p.stat().st_mtime)
    try:
        _check_folder(newest)
        old = manifest_of(newest)["key"]
    except CacheError:
        return ""
    out = []
    for field, value in key.items():
        before = old.get(field)
        if before == value:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            out += [f"{k} was {before.get(k)} and is {v}" for k, v in value.items() if before.get(k) != v]
        else:
            out.append(f"{field} was {before} and is {value}" if isinstance(value, int) else f"{field} changed")
    return f"{newest.name} is not used: {'; '.join(out[:3])}" if out else ""
