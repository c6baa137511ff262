"""The slot ring: shared memory written once by a worker, read in place by the consumer, used again warm.

One ``Arena`` belongs to one worker. It is an anonymous file (memfd_create(2)), so a 64 MB ``/dev/shm`` cannot hurt
and nothing is left behind whoever dies. Space is taken with fallocate(2), so shortage is an error and not a bus error,
and page tables are filled at once (``mapping.populate``), which costs a third of touching page after page;
``docs/notes/slots.md`` has the numbers.

Life of a slot; only the side named may make the move:

    FREE --worker--> FILLING --worker--> IN_FLIGHT --parent--> LEASED --parent--> FREE
                        |                    +--parent (dropped, or copied out)--> FREE
                        +--worker (batch turned out small)--> FREE

A page-locked slot that the consumer drops is held back until the device has read it (``pin.locked``), and is FREE then.

In shared memory only "free or not" has to be known by both sides: one 32-bit stamp a slot, 0 while taken, else a
count that grows with every release, so the worker takes the slot that was released last, whose pages are warm.
The stamp is the only word both sides write, and each side writes it only in its own moves.

Both sides stand in one file, longer than most, because each is only right against the other.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from .mapping import map_shared, populate, punch

if TYPE_CHECKING:
    import numpy.typing as npt  # at run time it would cost ten milliseconds

    Bytes: TypeAlias = npt.NDArray[np.uint8]
else:
    Bytes = np.ndarray

MAX_SLOTS = 1024  # every slot is one mapping on each side; Linux allows 65,530 mappings a process
ALIGN = 64  # a cache line, and more than any dtype asks for
GRAIN = 1 << 16  # slots are multiples of this, so batches of nearly one size fit each other's slots
SLACK = 8  # a slot that proved too small is replaced by one an eighth larger than needed

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


class Arena:
    """The memory of one worker: an anonymous file with a header page and slots behind it.

    Both sides hold one; ``fd`` is inherited (fork) or handed over (spawn, forkserver).
    """

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
    def workers(self) -> int:
        """How many workers there are now."""
        return self._control[4]

    @workers.setter
    def workers(self, count: int) -> None:
        self._control[4] = count

    @property
    def epoch(self) -> int:
        """The epoch whose tasks are wanted, where tasks are shared."""
        return self._control[5]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._control[5] = epoch

    @property
    def pss(self) -> int:
        """Bytes of memory of the worker, as it measured last: its proportional set size. 0 before that."""
        return self._control[6]

    @pss.setter
    def pss(self, nbytes: int) -> None:
        self._control[6] = nbytes

    @property
    def trims(self) -> int:
        """How often the parent has asked for the memory of free slots."""
        return self._control[14]

    @trims.setter
    def trims(self, count: int) -> None:
        self._control[14] = count

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
        of the monotonic clock, 0 as long as it likes."""
        return self._control[8], self._control[9]

    @at.setter
    def at(self, at: tuple[int, int]) -> None:
        self._control[8], self._control[9] = at

    @property
    def owed(self) -> int:
        """Tasks that a worker finds in its own pipe and is to do first."""
        return self._control[10]

    @owed.setter
    def owed(self, tasks: int) -> None:
        self._control[10] = tasks

    @property
    def serving(self) -> bool:
        """The worker has started, and asks for tasks."""
        return bool(self._control[11])

    @serving.setter
    def serving(self, value: bool) -> None:
        self._control[11] = int(value)

    @property
    def stack(self) -> int:
        """The descriptor, in the worker, of the file to which it writes where it is when it is asked."""
        return self._control[13]

    @stack.setter
    def stack(self, fd: int) -> None:
        self._control[13] = fd

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


class SlotWriter:
    """The worker's side of an arena: takes slots, fills them, never writes to one that anybody still sees."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._maps: dict[int, tuple[int, Any]] = {}
        self._kept: dict[int, weakref.ref[Any]] = {}
        self.slot = -1
        self.used = 0
        self.capacity = 0
        self.address = 0
        self.whole: Bytes | None = None
        self._stamp = 0
        self._trims = arena.trims

    def take(self, nbytes: int) -> bool:
        """Starts filling a slot of at least ``nbytes``. Returns False when there is none to be had."""
        slot = self._choose(nbytes)
        if slot is None:
            return False
        offset, capacity = self.arena.place(slot)
        mapped = self._maps.get(slot)
        if mapped is None or mapped[0] != offset:
            try:
                memory = self.arena.map(slot)
            except OSError:  # too many mappings: the slot stays free, the batch goes another way
                self.arena.stamps[slot] = self.arena.stamps[slot] or 1
                return False
            populate(memory, nbytes)
            self._maps[slot] = mapped = (offset, memory)
        self._stamp, self.arena.stamps[slot] = self.arena.stamps[slot] or 1, 0
        # The lease: every tensor in the slot holds this very array, so its death says that the last one died.
        self.whole = np.frombuffer(mapped[1], np.uint8)
        self.address = self.whole.ctypes.data
        self.slot, self.used, self.capacity = slot, 0, capacity
        self.arena.filling = slot
        return True

    def room(self, nbytes: int) -> int | None:
        """Reserves bytes in the slot being filled: their offset, aligned, or None when they do not fit."""
        at = aligned(self.used)
        if self.whole is None or at + nbytes > self.capacity:
            return None
        self.used = at + nbytes
        return at

    def sent(self) -> None:
        """The slot is the parent's now. Should the dataset have kept a tensor in it, it is not written again."""
        if self.whole is not None:
            self._kept[self.slot] = weakref.ref(self.whole)
            self.arena.filling = -1
        self._forget()

    def cancel(self) -> None:
        """The slot was not needed after all."""
        if self.whole is not None:
            slot = self.slot
            self.sent()
            self.arena.stamps[slot] = self._stamp

    def _forget(self) -> None:
        self.whole, self.slot, self.used, self.capacity, self.address = None, -1, 0, 0, 0

    def _choose(self, nbytes: int) -> int | None:
        if self._trims != self.arena.trims:
            self._trims = self.arena.trims
            self._trim()
        best = small = None
        newest = 0
        stamps = self.arena.stamps
        for slot in range(self.arena.slots):
            stamp = stamps[slot]
            if not stamp or self._is_kept(slot):
                continue
            if self.arena.place(slot)[1] < nbytes:
                small = slot
            elif stamp > newest:
                best, newest = slot, stamp
        if best is not None:
            return best
        if small is not None:
            self._maps.pop(small, None)
            return self.arena.add(nbytes + nbytes // SLACK, small)
        return self.arena.add(nbytes)

    def _trim(self) -> None:
        """Gives back the memory of slots that are free."""
        stamps = self.arena.stamps
        for slot in range(self.arena.slots):
            stamp = stamps[slot]
            if stamp and not self._is_kept(slot):
                stamps[slot] = 0
                self._maps.pop(slot, None)
                self.arena.punch(slot)
                stamps[slot] = stamp

    def _is_kept(self, slot: int) -> bool:
        ref = self._kept.get(slot)
        if ref is None:
            return False
        if ref() is not None:
            return True
        del self._kept[slot]
        return False


class Locker(Protocol):
    """Page-locks slots for a device: ``pin.locked``."""

    def lock(self, memory: Any) -> None: ...
    def is_locked(self, memory: Any) -> bool: ...
    def later(self, release: weakref.WeakMethod[Callable[[int], None]], slot: int) -> None: ...


class SlotReader:
    """The parent's side of an arena: leases slots to the consumer and frees each when its last tensor dies.

    Attributes:
        arena: the memory.
        leases: slots that the consumer holds.
        locker: page-locks slots as they are mapped; a locked slot is free only when no device reads it any more.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.locker: Locker | None = None
        self._held_back: set[int] = set()  # dropped by the consumer, and not yet by the device
        self.leases: dict[int, tuple[weakref.ref[Bytes], int]] = {}
        self._maps: dict[int, tuple[int, Any]] = {}
        self._stamp = max(arena.stamps[: max(arena.slots, 1)], default=0) + 1
        self._owner = os.getpid()
        self._lost: set[int] = set()
        _readers.add(self)

    def lock_with(self, locker: Locker | None) -> None:
        """From now on slots are page-locked; those that are mapped already, too."""
        if locker is None or self.locker is locker:
            self.locker = locker
            return
        self.locker = locker
        for _, memory in self._maps.values():
            locker.lock(memory)

    def lease(self, slot: int, used: int) -> Bytes:
        """The slot's first ``used`` bytes as an array. The slot is free again when nothing refers to the array."""
        try:
            whole = np.frombuffer(self._map(slot), np.uint8, count=used)
        except OSError:  # too many mappings
            return self.copy(slot, used)

        def ended(_: object) -> None:
            self.leases.pop(slot, None)
            if self.locker is None or slot not in self._maps or not self.locker.is_locked(self._maps[slot][1]):
                self.release(slot)
            elif os.getpid() == self._owner:
                self._held_back.add(slot)
                self.locker.later(weakref.WeakMethod(self._let_go), slot)

        self.leases[slot] = (weakref.ref(whole, ended), used)
        return whole

    def shrink(self) -> None:
        """Has the worker give back the memory of free slots, before it fills the next one."""
        self.arena.trims += 1
        self.forget()

    def forget(self) -> None:
        """Unmaps what nobody holds; it is mapped again when it is leased."""
        for slot in list(self._maps):
            if slot not in self.leases and slot not in self._held_back:
                del self._maps[slot]

    def leased_bytes(self) -> int:
        """Bytes that the consumer holds. Counted afresh: leases end in any thread, at any moment."""
        return sum(used for _, used in list(self.leases.values()))

    def copy(self, slot: int, used: int) -> Bytes:
        """The same bytes in private memory; the slot is free at once."""
        out = np.empty(used, np.uint8)
        offset, _ = self.arena.place(slot)
        done = 0
        while done < used:
            done += os.preadv(self.arena.fd, [out[done:].data], offset + done)
        self.release(slot)
        return out

    def _let_go(self, slot: int) -> None:
        self._held_back.discard(slot)
        self.release(slot)

    def release(self, slot: int) -> None:
        """Gives a slot back to its worker."""
        # A child forked by the user inherits the leases; what ends there must not free what is in use here.
        if os.getpid() != self._owner or slot in self._lost or slot in self._held_back:
            return
        self._stamp = self._stamp % 0xFFFFFFFF + 1  # never 0, which means "taken"
        self.arena.stamps[slot] = self._stamp

    def reclaim(self) -> None:
        """After the worker has gone: frees what it was filling or had sent, but not what is leased."""
        for slot in range(self.arena.slots):
            if slot not in self.leases and not self.arena.stamps[slot]:
                self.release(slot)

    def lose(self) -> None:
        """A child of the user's sees the leased slots from now on: they are never written again."""
        self._lost.update(self.leases)

    def _map(self, slot: int) -> Any:
        offset, _ = self.arena.place(slot)
        mapped = self._maps.get(slot)
        if mapped is None or mapped[0] != offset:
            self._maps[slot] = mapped = (offset, self.arena.map(slot))
            if self.locker is not None:
                self.locker.lock(mapped[1])
        return mapped[1]


_readers: weakref.WeakSet[SlotReader] = weakref.WeakSet()
_own_fork = False


@contextmanager
def own_fork() -> Iterator[None]:
    """Around the start of stoker's own workers, which never look at leased slots."""
    global _own_fork
    before, _own_fork = _own_fork, True
    try:
        yield
    finally:
        _own_fork = before


def _forked() -> None:
    # torch's batches survive a fork because their memory is never used again; so do those a child can see here.
    if not _own_fork:
        for reader in list(_readers):
            reader.lose()


os.register_at_fork(after_in_parent=_forked)
