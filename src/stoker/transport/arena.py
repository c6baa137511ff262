"""The memory of one worker, which both sides map: what each says to the other, a table of slots, and the slots.

It is an anonymous file (memfd_create(2)), so a 64 MB ``/dev/shm`` cannot hurt and nothing is left behind whoever dies.
Space is taken with fallocate(2), so shortage is an error and not a bus error. Who may write to a slot, ``ring`` says.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from typing import Any

import numpy as np

from .mapping import map_shared, punch

MAX_SLOTS = 1024  # every slot is one mapping on each side; Linux allows 65,530 mappings a process
ALIGN = 64  # a cache line, and more than any dtype asks for
GRAIN = 1 << 16  # slots are multiples of this, so batches of nearly one size fit each other's slots

# stop, slots in use, end of the file's used part, hand, workers, epoch, memory, slot being filled, place, since, owed,
# serving, times kept, stack, trims
_CONTROL = struct.Struct("<16Q")
_TABLE_AT = 128
_STAMPS_AT = _TABLE_AT + MAX_SLOTS * 16
_KEPT_AT = _STAMPS_AT + MAX_SLOTS * 4
KEPT_BYTES = 1 << 14  # for the random state of a worker: 10 KB
_KEPT = struct.Struct("<QQQ")  # epoch, task, bytes
HEADER_BYTES = -(-(_KEPT_AT + 2 * KEPT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def aligned(n: int) -> int:
    """``n`` rounded up to ``ALIGN``."""
    return -(-n // ALIGN) * ALIGN


class _Word:
    """An attribute of an arena that is one word of its control block."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, arena: Arena, _: object) -> int:
        return arena._control[self._at]

    def __set__(self, arena: Arena, value: int) -> None:
        arena._control[self._at] = value


class Arena:
    """The memory of one worker: an anonymous file with a header page and slots behind it.

    Both sides hold one; ``fd`` is inherited (fork) or handed over (spawn, forkserver).

    Attributes:
        workers: how many workers there are now.
        epoch: the epoch whose tasks are wanted, where tasks are shared.
        pss: bytes of memory of the worker, as it measured last: its proportional set size. 0 before that.
        trims: how often the parent has asked for the memory of free slots.
        owed: tasks that a worker finds in its own pipe and is to do first.
        stack: the descriptor, in the worker, of the file to which it writes where it is when it is asked.
    """

    workers = _Word(4)
    epoch = _Word(5)
    pss = _Word(6)
    trims = _Word(14)
    owed = _Word(10)
    stack = _Word(13)

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("stoker", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(fd, 0, HEADER_BYTES)
            except BaseException:
                os.close(fd)
                raise
        self.fd = fd
        view = np.frombuffer(map_shared(fd, HEADER_BYTES), np.uint8).data
        self._control = view[: _CONTROL.size].cast("Q")
        self._table = view[_TABLE_AT:_STAMPS_AT].cast("Q")
        self.stamps = view[_STAMPS_AT : _STAMPS_AT + 4 * MAX_SLOTS].cast("I")
        self._memory = view
        if not self._control[2]:
            self._control[2] = HEADER_BYTES
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False  # the process' end closes it anyway

    def close(self) -> None:
        """Closes the file, at once. What is mapped stays so."""
        self._close()

    @property
    def stop(self) -> bool:
        """The parent has given up on this worker's tasks."""
        return bool(self._control[0])

    @stop.setter
    def stop(self, value: bool) -> None:
        self._control[0] = int(value)

    @property
    def slots(self) -> int:
        """Slots made so far."""
        return self._control[1]

    @property
    def hand(self) -> tuple[int, int] | None:
        """Epoch and number of the task that the worker has in hand; None between two tasks."""
        word = self._control[3]
        return (word >> 40, (word & (1 << 40) - 1) - 1) if word else None

    @hand.setter
    def hand(self, task: tuple[int, int] | None) -> None:
        self._control[3] = 0 if task is None else task[0] << 40 | task[1] + 1

    @property
    def filling(self) -> int:
        """The slot that the worker is filling, or -1: what a death would leave taken and sent to nobody."""
        return self._control[7] - 1

    @filling.setter
    def filling(self, slot: int) -> None:
        self._control[7] = slot + 1

    @property
    def at(self) -> tuple[int, int]:
        """Where the worker is in its task, as ``workers.protocol`` has it, and until when it may be there: nanoseconds
        of the monotonic clock, 0 as long as it likes, or while it moves on. A place never comes with the time of the
        one before."""
        until = self._control[9]
        place = self._control[8]
        return place, until if until == self._control[9] else 0

    @at.setter
    def at(self, at: tuple[int, int]) -> None:
        self._control[9] = 0
        self._control[8], self._control[9] = at

    @property
    def serving(self) -> bool:
        """The worker has started, and asks for tasks."""
        return bool(self._control[11])

    @serving.setter
    def serving(self, value: bool) -> None:
        self._control[11] = int(value)

    def keep(self, epoch: int, task: int, state: bytes) -> None:
        """Notes the random state in which a task begins. A kill in the middle leaves the state before."""
        times = self._control[12] + 1
        at = _KEPT_AT + (times & 1) * KEPT_BYTES
        end = at + _KEPT.size + len(state)
        self._memory[at : at + _KEPT.size] = _KEPT.pack(epoch, task, len(state))
        self._memory[at + _KEPT.size : end] = state
        self._control[12] = times

    @property
    def kept(self) -> tuple[int, int] | None:
        """Epoch and number of the task at whose beginning random state was noted last."""
        return self._kept()[:2] if self._control[12] else None

    @property
    def state(self) -> bytes:
        """What was noted then; empty where nothing was."""
        if not self._control[12]:
            return b""
        at = _KEPT_AT + (self._control[12] & 1) * KEPT_BYTES + _KEPT.size
        return bytes(self._memory[at : at + self._kept()[2]])

    def _kept(self) -> tuple[int, int, int]:
        epoch, task, nbytes = _KEPT.unpack_from(self._memory, _KEPT_AT + (self._control[12] & 1) * KEPT_BYTES)
        return epoch, task, nbytes

    def forget(self) -> None:
        """Another worker begins, whose life this is not."""
        self.stop, self.hand, self.pss, self.filling, self.at, self.owed = False, None, 0, -1, (0, 0), 0
        self.serving = False
        self._control[12] = 0

    def place(self, slot: int) -> tuple[int, int]:
        """Offset in the file and capacity of a slot, in bytes."""
        return self._table[2 * slot], self._table[2 * slot + 1]

    def map(self, slot: int) -> Any:
        """Maps a slot. It is unmapped when the last view on it dies."""
        offset, capacity = self.place(slot)
        return map_shared(self.fd, capacity, offset)

    def add(self, nbytes: int, slot: int | None = None) -> int | None:
        """Takes room for a slot, a new one or, larger and elsewhere, for an existing one.

        Returns:
            The slot's number, or None when there is no room (memory, cgroup, number of slots).
        """
        capacity = -(-nbytes // GRAIN) * GRAIN
        offset = self._control[2]
        if slot is None and self.slots >= MAX_SLOTS:
            return None
        try:
            os.posix_fallocate(self.fd, offset, capacity)
        except OSError:
            return None
        if slot is None:
            slot = self._control[1]
            self._control[1] = slot + 1
        else:
            self.punch(slot)
        self._table[2 * slot], self._table[2 * slot + 1] = offset, capacity
        self._control[2] = offset + capacity
        return slot

    def punch(self, slot: int) -> None:
        """Gives the slot's pages back to the system; its number stays."""
        offset, capacity = self.place(slot)
        if capacity:
            punch(self.fd, offset, capacity)
        self._table[2 * slot + 1] = 0
