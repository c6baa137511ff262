"""The tables of a cache in memory: one anonymous file that every worker of a run has mapped."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...core.errors import UsageError
from ...transport.mapping import map_shared

_thread_locks: dict[tuple[int, int], threading.Lock] = {}  # by file: record locks exclude processes, not threads


class Lock:
    """One writer at a time, among threads and processes. The kernel releases it if its holder dies (fcntl(2))."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        found = os.fstat(fd)
        self._file = found.st_dev, found.st_ino

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with _thread_locks.setdefault(self._file, threading.Lock()):
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)


os.register_at_fork(after_in_child=_thread_locks.clear)  # another thread may have held one while this child was forked


class Memory:
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
    def of(cls, fd: int, pickles: bool) -> Memory:
        """The memory behind a descriptor from another process. It closes the descriptor."""
        memory = cls.__new__(cls)
        memory._attach(fd, pickles)
        return memory

    @classmethod
    def _attached(cls, fd: Any, pickles: bool) -> Memory:
        return cls.of(fd.detach(), pickles)

    def __reduce__(self) -> tuple[object, ...]:
        if get_spawning_popen() is None:
            raise UsageError("a cache in memory belongs to this run and its workers; it cannot be pickled elsewhere")
        return Memory._attached, (reduction.DupFd(self.fd), self.pickles)

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

    def seal(self) -> None:
        """Does nothing: all samples are stored."""
