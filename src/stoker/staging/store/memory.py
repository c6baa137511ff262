"""The tables of a cache in memory: one anonymous file that every worker of a run has mapped."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...core.errors import UsageError
from ...transport.mapping import map_shared, punch

FLOCK = "hhqqi"  # struct flock: kind, whence, first byte, bytes, process
_thread_locks: dict[tuple[int, int], threading.Lock] = {}  # by file: record locks exclude processes, not threads


class Lock:
    """One writer at a time, among threads and processes. The kernel releases it if its holder dies.

    It is two locks, of the first and the second byte (fcntl(2)). A record lock excludes all processes, but ends when
    its holder closes any other descriptor of the file: a second cache that is collected, a duplicate for a spawned
    worker. The lock of an open file description does not, but each process has to open the file itself. Where it
    cannot, because it has no descriptor left or no /proc, the record lock stands alone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file = identity(fd)
        self._own: int | None = None  # descriptor that this process has opened; -1: it cannot
        self._close: weakref.finalize[..., Lock] | None = None
        _locks.add(self)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with _thread_locks.setdefault(self._file, threading.Lock()):
            if self._own is None:
                self._own = self._opened()
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1)
            try:
                self._of_description(fcntl.F_WRLCK)
                yield
            finally:
                self._of_description(fcntl.F_UNLCK)
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def _of_description(self, kind: int) -> None:
        if self._own is not None and self._own >= 0:
            fcntl.fcntl(self._own, fcntl.F_OFD_SETLKW, struct.pack(FLOCK, kind, os.SEEK_SET, 1, 1, 0))

    def _opened(self) -> int:
        mode = fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_ACCMODE
        try:
            fd = os.open(f"/proc/self/fd/{self._fd}", mode | os.O_CLOEXEC)
        except (OSError, UsageError):  # in a trial, which may not open files for writing
            return -1
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False
        return fd if identity(fd) == self._file else -1

    def forked(self) -> None:
        """In a forked child: what it has inherited is its parent's, and would keep the lock when that dies."""
        if self._close is not None:
            self._close()
        self._own = self._close = None


def identity(fd: int) -> tuple[int, int]:
    """Which file it is: no other one has the same numbers while it exists."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    _thread_locks.clear()  # another thread may have held one while this child was forked
    for lock in list(_locks):
        lock.forked()


os.register_at_fork(after_in_child=_after_fork)


class MemoryTables:
    """Tables in an anonymous file (memfd_create(2)). Limits of ``/dev/shm`` do not apply to it. Forked workers inherit
    it, spawned ones receive its descriptor. Only pages that are written take memory. Raises OSError: such files are not
    supported here.

    Args:
        nbytes: the file's size.
        pickles: it stays with this process and its workers, so samples may have values that are unpickled.
    """

    trusted = True  # this run wrote all of it, so it needs no checksums
    writable = True
    kind = "RAM"

    def __init__(self, nbytes: int, pickles: bool = True) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "shared memory of workers is supported on Linux only")
        fd = os.memfd_create("stoker-cache", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._attach(fd, pickles)

    def _attach(self, fd: int, pickles: bool) -> None:
        self.fd = fd
        self.pickles = pickles
        self.lock = Lock(fd)
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def of(cls, fd: int, pickles: bool) -> MemoryTables:
        """The memory behind a descriptor from another process. It closes the descriptor."""
        memory = cls.__new__(cls)
        memory._attach(fd, pickles)
        return memory

    @classmethod
    def _attached(cls, fd: Any, pickles: bool) -> MemoryTables:
        return cls.of(fd.detach(), pickles)

    def __reduce__(self) -> tuple[object, ...]:
        if get_spawning_popen() is None:
            raise UsageError("a cache in memory belongs to this run and its workers; it cannot be pickled elsewhere")
        return MemoryTables._attached, (reduction.DupFd(self.fd), self.pickles)

    def table(self, name: str, dtype: DTypeLike, count: int, start: int) -> NDArray[Any]:
        """``count`` values from byte ``start`` on, a multiple of the page size; zeros where nothing was written."""
        dtype = np.dtype(dtype)
        whole = np.frombuffer(map_shared(self.fd, max(1, count * dtype.itemsize), start), np.uint8)
        return whole[: count * dtype.itemsize].view(dtype)

    def reserve(self, name: str, offset: int, nbytes: int) -> None:
        """Does nothing: writing takes the memory."""

    def write(self, table: NDArray[np.uint8], start: int, offset: int, data: NDArray[np.uint8]) -> None:
        """Writes bytes into a table that begins at ``start``. It uses pwrite(2): writing to a new mapping costs a fault
        a page, and a SIGBUS where memory is exhausted. Raises OSError: memory is exhausted."""
        at = start + offset
        left = memoryview(data.data).cast("B")
        while len(left):
            n = os.pwrite(self.fd, left, at)
            at, left = at + n, left[n:]

    def give_back(self, start: int) -> None:
        """Gives all memory from byte ``start`` on, a multiple of the page size, back to the system, in all processes.
        It reads as zeros from then on."""
        punch(self.fd, start, os.fstat(self.fd).st_size - start)

    def seal(self) -> None:
        """Does nothing: all samples are stored."""
