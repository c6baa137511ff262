"""Where a cache in memory lies: one anonymous file that every worker of a run has mapped."""

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

from ...core.errors import UsageError
from ...transport.mapping import map_shared

_threads: dict[tuple[int, int], threading.Lock] = {}  # by file: record locks know processes, not threads


class Lock:
    """One writer at a time, among threads and processes. A holder that dies lets go (fcntl(2), record locks)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        found = os.fstat(fd)
        self._file = found.st_dev, found.st_ino

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with _threads.setdefault(self._file, threading.Lock()):
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)


def _renew() -> None:
    """A child must not inherit a lock that another thread held while it was forked."""
    _threads.clear()


os.register_at_fork(after_in_child=_renew)


class Memory:
    """Tables in an anonymous file (memfd_create(2)), which no limit of ``/dev/shm`` concerns.

    Workers have it by fork, or its descriptor when they are spawned.

    Args:
        nbytes: the file's size, of which only what is written takes memory.

    Raises:
        OSError: no such file can be made.
    """

    trusted = True  # what lies here was written by this run
    writable = True
    kind = "RAM"

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "memory that workers share is only on Linux yet")
        fd = os.memfd_create("stoker-cache", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._attach(fd)

    def _attach(self, fd: int) -> None:
        self.fd, self.lock = fd, Lock(fd)
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def of(cls, fd: int) -> Memory:
        """The memory of another process' descriptor, which belongs to it from now on."""
        memory = cls.__new__(cls)
        memory._attach(fd)
        return memory

    @classmethod
    def _attached(cls, fd: Any) -> Memory:
        return cls.of(fd.detach())

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            raise UsageError("a cache in memory belongs to this run and its workers; it cannot be pickled elsewhere")
        return Memory._attached, (reduction.DupFd(self.fd),)

    def table(self, name: str, dtype: Any, count: int, at: int) -> np.ndarray[Any, Any]:
        """``count`` values from byte ``at`` on, a multiple of the page size; zeros where nothing was written."""
        dtype = np.dtype(dtype)
        whole = np.frombuffer(map_shared(self.fd, max(1, count * dtype.itemsize), at), np.uint8)
        return whole[: count * dtype.itemsize].view(dtype)

    def reserve(self, name: str, at: int, nbytes: int) -> None:
        """Nothing: what is written takes its memory then."""

    def write(self, at: int, data: np.ndarray[Any, Any]) -> None:
        """Writes bytes at a place of the file. pwrite(2): a write into a new mapping takes a fault for each page, and a
        SIGBUS where there is no memory.

        Raises:
            OSError: there is no memory.
        """
        left = memoryview(data.data).cast("B")
        while len(left):
            n = os.pwrite(self.fd, left, at)
            at, left = at + n, left[n:]

    def seal(self) -> None:
        """All is in; there is nothing to be done."""
