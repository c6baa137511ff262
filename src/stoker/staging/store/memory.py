"""In-memory tables of a cache: one anonymous file that all workers of a run map."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...transport.mapping import map_shared, punch
from .spec import Number

FLOCK = "hhqqi"  # struct flock: kind, whence, first byte, bytes, process
POLL_S = 0.01  # between two tries to take a lock
_thread_locks: dict[tuple[int, int], threading.Lock] = {}  # by file: record locks exclude processes, not threads


class Lock:
    """Excludes other threads and processes. The kernel releases the lock if its holder dies.

    It consists of two locks, on the first and second byte (fcntl(2)). A record lock excludes all processes, but is lost
    when its holder closes any other descriptor of the file: that of a garbage-collected second cache, or a duplicate
    for a spawned worker. A lock of the open file description is not lost, but requires each process to open the file
    itself. If that fails, for lack of descriptors or of /proc, only the record lock remains."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file = identity(fd)
        self._own: int | None = None  # descriptor opened by this process; -1: cannot open one
        self._close: weakref.finalize[..., Lock] | None = None
        _locks.add(self)

    @contextlib.contextmanager
    def __call__(self, limit_s: float | None = None) -> Iterator[None]:
        """``limit_s``: how long to wait for other processes; None: as long as it takes. Raises TimeoutError."""
        until = None if limit_s is None else time.monotonic() + limit_s
        with _thread_locks.setdefault(self._file, threading.Lock()):
            if self._own is None:
                self._own = self._opened()
            _wait_for(lambda now: fcntl.lockf(self._fd, fcntl.LOCK_EX | now * fcntl.LOCK_NB, 1), until)
            try:
                _wait_for(lambda now: self._of_description(fcntl.F_WRLCK, now), until)
                yield
            finally:
                self._of_description(fcntl.F_UNLCK)
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def _of_description(self, kind: int, now: bool = False) -> None:
        if self._own is not None and self._own >= 0:
            command = fcntl.F_OFD_SETLK if now else fcntl.F_OFD_SETLKW
            fcntl.fcntl(self._own, command, struct.pack(FLOCK, kind, os.SEEK_SET, 1, 1, 0))

    def _opened(self) -> int:
        mode = fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_ACCMODE
        try:
            fd = os.open(f"/proc/self/fd/{self._fd}", mode | os.O_CLOEXEC)
        except (OSError, UsageError):  # in a trial, which must not open files for writing
            return -1
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False
        return fd if identity(fd) == self._file else -1

    def forked(self) -> None:
        """Call in a forked child: the inherited lock is the parent's, and would stay locked when that dies."""
        if self._close is not None:
            self._close()
        self._own = self._close = None


def _wait_for(take: Callable[[bool], None], until: float | None) -> None:
    """Takes a lock. ``take``: called with whether it must not wait."""
    while until is not None:
        try:
            take(True)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock") from None
            time.sleep(POLL_S)
    take(False)


def identity(fd: int) -> tuple[int, int]:
    """Identifies a file: no other has the same numbers while it exists."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    _thread_locks.clear()  # another thread may have held one during the fork
    for lock in list(_locks):
        lock.forked()


os.register_at_fork(after_in_child=_after_fork)


class Flag:
    """A flag that all processes share: raised once, by any of them."""

    def __init__(self) -> None:
        self.__setstate__(MemoryTables(1))

    def __getstate__(self) -> MemoryTables:
        return self._memory

    def __setstate__(self, memory: MemoryTables) -> None:
        self._memory = memory
        self._value = memory.table("flag", np.uint8, 1, 0)

    @property
    def is_up(self) -> bool:
        return bool(self._value[0])

    def raise_it(self) -> None:
        self._value[0] = 1


class _SentDescriptor(Protocol):
    """A descriptor that arrived from another process (``reduction.DupFd``)."""

    def detach(self) -> int: ...


class MemoryTables:
    """Tables in an anonymous file (memfd_create(2)), which limits of ``/dev/shm`` do not affect. Forked workers inherit
    it, spawned ones receive its descriptor. Only written pages take memory. Raises OSError if the system does not
    support such files. ``pickles``: it stays with this process and its workers, so it may contain pickled values."""

    trusted = True  # this run wrote everything, so no checksums are needed
    writable = mapped = True
    kind = "RAM"

    def __init__(self, nbytes: int, pickles: bool = True) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "sharing a cache with workers is supported on Linux only")
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
        """Maps the memory behind a descriptor from another process. Takes ownership of the descriptor."""
        memory = cls.__new__(cls)
        memory._attach(fd, pickles)
        return memory

    @classmethod
    def _attached(cls, fd: _SentDescriptor, pickles: bool) -> MemoryTables:
        return cls.of(fd.detach(), pickles)

    def __reduce__(self) -> tuple[object, ...]:
        if get_spawning_popen() is None:
            raise UsageError(
                "a cache in memory belongs to this run and its workers, so it can be pickled only to start a worker"
            )
        return MemoryTables._attached, (reduction.DupFd(self.fd), self.pickles)

    def table(self, name: str, dtype: type[Number], count: int, start: int) -> NDArray[Number]:
        """Maps ``count`` values from byte ``start`` on, a multiple of the page size. They are zeros until written."""
        nbytes = count * np.dtype(dtype).itemsize
        whole = np.frombuffer(map_shared(self.fd, max(1, nbytes), start), np.uint8)
        return whole[:nbytes].view(dtype)

    def reserve(self, name: str, offset: int, nbytes: int) -> None:
        """Does nothing: memory is allocated on writing."""

    def write(self, table: NDArray[np.uint8], start: int, offset: int, data: NDArray[np.uint8]) -> None:
        """Writes bytes into the table at ``start``. Uses pwrite(2): writing to a new mapping costs a fault per page,
        and a SIGBUS if memory is exhausted. Raises OSError if memory is exhausted."""
        at = start + offset
        left = memoryview(data.data).cast("B")
        while len(left):
            n = os.pwrite(self.fd, left, at)
            at, left = at + n, left[n:]

    def give_back(self, start: int) -> None:
        """Frees all memory from byte ``start`` on, a multiple of the page size, in all processes. It reads as zeros."""
        punch(self.fd, start, os.fstat(self.fd).st_size - start)

    def seal(self) -> None:
        """Does nothing: memory needs no finalization."""
