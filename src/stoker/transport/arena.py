"""The memory of one worker, which parent and worker both map: a control block, a table of slots, and the slots.

It is an anonymous file (memfd_create(2)): the size of ``/dev/shm`` does not matter, and nothing is left behind when
either process is killed. Space is reserved with fallocate(2), so a shortage raises an error instead of SIGBUS.
``slots`` explains who may write to a slot.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from typing import NamedTuple

import numpy as np

from .mapping import Memory, map_shared, punch

MAX_SLOTS = 1024  # each slot is one mapping on each side; Linux allows 65,530 mappings per process
ALIGN = 64  # a cache line, and more than any dtype needs
GRAIN = 1 << 16  # slot sizes are multiples of this, so batches of similar size fit each other's slots
_CONTROL_BYTES = 8 * 17
_TABLE_AT = _CONTROL_BYTES
_STAMPS_AT = _TABLE_AT + MAX_SLOTS * 16
_CHECKPOINTS_AT = _STAMPS_AT + MAX_SLOTS * 4
CHECKPOINT_BYTES = 1 << 14  # for the random state of a worker: 10 KB
_CHECKPOINT = struct.Struct("<QQQ")  # epoch, task, bytes of state
HEADER_BYTES = -(-(_CHECKPOINTS_AT + 2 * CHECKPOINT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
_TASK_BITS = 40  # low bits of the current-task word; the epoch is above them


class TaskId(NamedTuple):
    """Which task of which epoch."""

    epoch: int
    number: int


class WorkerProgress(NamedTuple):
    """What a worker publishes about itself in its arena."""

    task: TaskId | None  # the task that it is doing; None: it is between two, or does not publish it
    position: int  # where it is in that task, an encoded ``workers.protocol.Position``


def aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


class _Int:
    """An arena attribute stored as one 64-bit word of its control block."""

    def __init__(self, word: int, offset: int = 0) -> None:
        self._at, self._offset = word, offset

    def __get__(self, arena: Arena, _: object) -> int:
        value: int = arena._control[self._at]
        return value - self._offset

    def __set__(self, arena: Arena, value: int) -> None:
        arena._control[self._at] = value + self._offset


class Arena:
    """An anonymous file with header pages followed by slots. Parent and worker each hold one of the same ``fd``."""

    # Written only by the parent:
    stop = _Int(0)  # 1: the parent no longer wants this worker's tasks
    workers = _Int(1)  # present number of workers
    epoch = _Int(2)  # the epoch whose tasks are wanted, if tasks are shared
    private_tasks = _Int(3)  # tasks in the worker's own pipe, which it does before it takes shared ones
    trim_requests = _Int(14)  # how often the parent has asked for the memory of free slots
    # Written only by the worker, except that ``reset`` clears some before it starts:
    slots = _Int(4)  # slots made so far
    pss = _Int(5)  # proportional set size of the worker in bytes, when last measured; 0 before that
    slot_being_filled = _Int(6, offset=1)  # -1 for none. If the worker dies, this slot is taken but was never sent
    ready = _Int(7)  # 1: the worker has started, and asks for tasks
    stack_fd = _Int(8)  # the worker's descriptor of the file to which it writes its stack on request
    _file_end = _Int(9)
    _current_task = _Int(10)
    _position = _Int(11)
    _deadline = _Int(12)
    _rng_checkpoints = _Int(13)
    left = _Int(16)  # 1: the worker leaves as it was told to, and has taken no task that it did not answer
    read_threads = _Int(15)  # threads that load samples in the worker; 0: samples are loaded one after the other

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
        self._control = view[:_CONTROL_BYTES].cast("Q")
        self._table = view[_TABLE_AT:_STAMPS_AT].cast("Q")
        self.stamps = view[_STAMPS_AT:_CHECKPOINTS_AT].cast("I")
        self._memory = view
        if not self._file_end:
            self._file_end = HEADER_BYTES
        self.close = weakref.finalize(self, os.close, fd)  # closes the file at once; mappings stay valid
        self.close.atexit = False  # process exit closes it anyway

    @property
    def current_task(self) -> TaskId | None:
        """The task that the worker is doing; None between two tasks."""
        word = self._current_task
        return TaskId(word >> _TASK_BITS, (word & (1 << _TASK_BITS) - 1) - 1) if word else None

    @current_task.setter
    def current_task(self, task: tuple[int, int] | None) -> None:
        self._current_task = 0 if task is None else task[0] << _TASK_BITS | task[1] + 1

    def set_position(self, position: int, deadline_ns: int) -> None:
        """Publishes where the worker is in its task, and until when it may be there. ``position``: an encoded
        ``workers.protocol.Position``. ``deadline_ns``: on the monotonic clock; 0 for no limit."""
        self._deadline = 0
        self._position = position
        self._deadline = deadline_ns

    def position(self) -> tuple[int, int]:
        """Returns position and deadline as ``set_position`` wrote them. A position never comes with the previous one's
        deadline, because the deadline is 0 while the worker moves on."""
        deadline = self._deadline
        position = self._position
        return position, deadline if deadline == self._deadline else 0

    def save_rng_checkpoint(self, epoch: int, task: int, state: bytes) -> None:
        """Saves the random state with which a task begins. If killed midway, the previous checkpoint stays valid."""
        count = self._rng_checkpoints + 1
        at = _CHECKPOINTS_AT + (count & 1) * CHECKPOINT_BYTES
        end = at + _CHECKPOINT.size + len(state)
        self._memory[at : at + _CHECKPOINT.size] = _CHECKPOINT.pack(epoch, task, len(state))
        self._memory[at + _CHECKPOINT.size : end] = state
        self._rng_checkpoints = count

    def rng_checkpoint(self) -> tuple[TaskId, bytes] | None:
        """Returns the task before which random state was last saved, and the state; None if it never was."""
        if not self._rng_checkpoints:
            return None
        at = _CHECKPOINTS_AT + (self._rng_checkpoints & 1) * CHECKPOINT_BYTES
        epoch, task, nbytes = _CHECKPOINT.unpack_from(self._memory, at)
        at += _CHECKPOINT.size
        return TaskId(epoch, task), bytes(self._memory[at : at + nbytes])

    def reset(self, keep_checkpoint: bool = False) -> None:
        """Clears what the last worker published, before another one starts in this memory. With ``keep_checkpoint``,
        the next worker continues from the last one's random state."""
        self.stop = self.ready = self.left = 0
        self.current_task = None
        self.slot_being_filled = -1
        self.set_position(0, 0)
        self.private_tasks = self.read_threads = 0
        if not keep_checkpoint:
            self.pss = 0
            self._rng_checkpoints = 0

    def location(self, slot: int) -> tuple[int, int]:
        """Returns a slot's offset in the file and its capacity, in bytes."""
        return self._table[2 * slot], self._table[2 * slot + 1]

    def map(self, slot: int) -> Memory:
        """Maps a slot. It is unmapped when the last view on it dies."""
        offset, capacity = self.location(slot)
        return map_shared(self.fd, capacity, offset)

    def add(self, nbytes: int, slot: int | None = None) -> int | None:
        """Reserves space for a new slot, or moves an existing one to a larger space. Returns the slot's number, or None
        if there is no room (memory, cgroup, number of slots)."""
        capacity = -(-nbytes // GRAIN) * GRAIN
        offset = self._file_end
        if slot is None and self.slots >= MAX_SLOTS:
            return None
        try:
            os.posix_fallocate(self.fd, offset, capacity)
        except OSError:
            return None
        if slot is None:
            slot = self.slots
            self.slots = slot + 1
        else:
            self.punch(slot)
        self._table[2 * slot], self._table[2 * slot + 1] = offset, capacity
        self._file_end = offset + capacity
        return slot

    def punch(self, slot: int) -> None:
        """Returns the slot's pages to the system; its number stays."""
        offset, capacity = self.location(slot)
        if capacity:
            punch(self.fd, offset, capacity)
        self._table[2 * slot + 1] = 0


def progress(path: str) -> WorkerProgress | None:
    """Reads the progress of another process's worker from the path of its arena under ``/proc``. None if no worker has
    started in that memory. Raises OSError if the file is gone or may not be read."""
    with open(path, "rb", buffering=0) as file:
        control = file.read(_CONTROL_BYTES)
    if len(control) < _CONTROL_BYTES:
        return None
    seen = Arena.__new__(Arena)  # backed by the copy just read
    seen._control = memoryview(control).cast("Q")
    return WorkerProgress(seen.current_task, seen.position()[0]) if seen.ready else None
