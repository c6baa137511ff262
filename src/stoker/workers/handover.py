"""Hands file descriptors to a new process, and an object that is pickled once for any number of processes."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import context as mp_context
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
# How a pickle names a class or function of the main module (opcodes: see pickletools): two memoized short strings,
# from which STACK_GLOBAL looks up the object.
_IN_MAIN, _GLOBAL = b"\x8c\x08__main__\x94\x8c", b"\x94\x93"
_received: list[int] = []  # descriptors that came with the object being unpickled


class _Duplicate(Protocol):
    """A descriptor on its way to a new process."""

    def detach(self) -> int: ...


class Fd:
    """A file descriptor that a child receives with its process object, under fork, spawn and forkserver."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Callable[[_Duplicate], Fd], tuple[_Duplicate]]:
        return _arrived, (reduction.DupFd(self.fd),)


def _arrived(duplicate: _Duplicate) -> Fd:  # ``duplicate`` is multiprocessing's or an ``_Index``
    return Fd(duplicate.detach())


class _Index:
    """Replaces a descriptor in a pickled object by its index in the list that comes with the object."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return os.dup(_received[self.index])


class _Collector:
    """Collects the descriptors of an object while it is pickled; stands in for multiprocessing's spawning popen."""

    DupFd = _Index

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1


class Pickled(Generic[T]):
    """An object pickled once for any number of processes, in anonymous shared memory, with the descriptors it holds."""

    def __init__(self, obj: T) -> None:
        collector: Any = _Collector()
        before = mp_context.get_spawning_popen()
        mp_context.set_spawning_popen(collector)
        self.memory = Fd(os.memfd_create("stoker-spec", os.MFD_CLOEXEC))
        try:
            with open(self.memory.fd, "wb", closefd=False) as file:  # no bytes in between: a dataset may be large
                ForkingPickler(file).dump(obj)
        except BaseException:
            for fd in (self.memory.fd, *collector.fds):
                os.close(fd)
            raise
        finally:
            mp_context.set_spawning_popen(before)
        self.fds = [Fd(fd) for fd in collector.fds]

    def interactive_name(self) -> str:
        """Returns the name of a class or function in it that was defined interactively; "" if there is none."""
        if hasattr(sys.modules["__main__"], "__file__"):
            return ""
        with mmap.mmap(self.memory.fd, 0, access=mmap.ACCESS_READ) as pickled:
            at = pickled.find(_IN_MAIN)
            if at < 0:
                return ""
            start = at + len(_IN_MAIN)
            name = pickled[start + 1 : start + 1 + pickled[start]]
            end = start + 1 + len(name)
            return name.decode(errors="replace") if pickled[end : end + 2] == _GLOBAL else ""

    def load(self) -> T:
        """Unpickles the object, in a process that was started with this."""
        _received[:] = [fd.fd for fd in self.fds]
        # Mapped instead of read, because all processes share one file offset.
        obj: T = pickle.loads(mmap.mmap(self.memory.fd, 0, access=mmap.ACCESS_READ))
        return obj

    def close(self) -> None:
        for fd in (self.memory, *self.fds):
            os.close(fd.fd)
