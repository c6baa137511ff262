"""Slots: shared memory that a worker fills with a batch and the consumer reads in place, used again while it is warm.

One ``Arena`` belongs to one worker. Page tables are filled at once (``mapping.populate``), which costs a third of
touching page after page; ``docs/notes/slots.md`` has the numbers. A batch's memory is freed when its last tensor dies:
``SlotReader.lease`` hands out an array and ``_lease_ended`` gives the slot back to the worker.

Life of a slot; only the side named may make the move:

    FREE --worker--> FILLING --worker--> IN_FLIGHT --parent--> LEASED --parent--> FREE
                        |                    +--parent (dropped, or copied out)--> FREE
                        +--worker (batch turned out small)--> FREE

A page-locked slot that the consumer drops is FREE only when the device has read it (``device.pinned_slots``).

In shared memory only "free or not" has to be known by both sides: one 32-bit stamp a slot, 0 while taken, else a
count that grows with every release, so the worker takes the slot that was released last, whose pages are warm.
The stamp is the only word that both sides write, and each side writes it only in its own moves. The consumer's reads of
a batch come before the stamp that frees its slot (``ordering.barrier``). The worker's writes come after it: whether
they are made depends on the stamp, which orders them on all processors.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from .arena import Arena, aligned
from .mapping import Memory, populate
from .ordering import barrier

if TYPE_CHECKING:
    import numpy.typing as npt  # at run time it would cost ten milliseconds

    Bytes: TypeAlias = npt.NDArray[np.uint8]
else:
    Bytes = np.ndarray

MAX_PINNED_BY_FORK = 256 << 20  # bytes of slots that forked children see; beyond, batches are copied out
SLACK = 8  # a slot that proved too small is replaced by one an eighth larger than needed


class SlotWriter:
    """The worker's side of an arena: takes slots and fills them, never one whose memory is still in use."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._maps: dict[int, tuple[int, Memory]] = {}  # slot: offset in the file, mapping
        self._sent: dict[int, weakref.ref[Bytes]] = {}  # alive while the dataset keeps a tensor in a slot it has sent
        self.slot = -1  # the slot being filled; -1 for none
        self.used = 0  # bytes in use in it
        self.capacity = 0  # its size in bytes
        self.address = 0  # where its memory begins
        self.whole: Bytes | None = None  # its memory as an array; None while no slot is being filled
        self._stamp = 0
        self._trims_done = arena.trim_requests

    def take(self, nbytes: int) -> bool:
        """Starts filling a slot of at least ``nbytes``. Returns False when there is none to be had."""
        self.cancel()  # one that a dataset began by ``stoker.empty``; it is not reused while the dataset keeps that
        slot = self._choose(nbytes)
        if slot is None:
            return False
        offset, capacity = self.arena.location(slot)
        mapped = self._maps.get(slot)
        if mapped is None or mapped[0] != offset:
            try:
                memory = self.arena.map(slot)
            except OSError:  # too many mappings: the slot stays free, the batch goes another way
                self.arena.stamps[slot] = self.arena.stamps[slot] or 1
                return False
            populate(memory, nbytes, used=self.arena.stamps[slot] > 0)
            self._maps[slot] = mapped = (offset, memory)
        self._stamp, self.arena.stamps[slot] = self.arena.stamps[slot] or 1, 0
        # The lease: every tensor in the slot holds this very array, so its death says that the last one died.
        self.whole = np.frombuffer(mapped[1], np.uint8)
        self.address = self.whole.ctypes.data
        self.slot, self.used, self.capacity = slot, 0, capacity
        self.arena.slot_being_filled = slot
        return True

    def room(self, nbytes: int) -> int | None:
        """Reserves bytes in the slot being filled: their offset, aligned, or None when they do not fit."""
        at = aligned(self.used)
        if self.whole is None or at + nbytes > self.capacity:
            return None
        self.used = at + nbytes
        return at

    def sent(self) -> None:
        """The slot is the parent's now. It is not written again while the dataset keeps a tensor in it."""
        if self.whole is not None:
            self._sent[self.slot] = weakref.ref(self.whole)
            self.arena.slot_being_filled = -1
        self.whole = None
        self.slot = -1
        self.used = self.capacity = self.address = 0

    def cancel(self) -> None:
        """The slot was not needed after all."""
        if self.whole is not None:
            slot = self.slot
            self.sent()
            self.arena.stamps[slot] = self._stamp

    def _choose(self, nbytes: int) -> int | None:
        if self._trims_done != self.arena.trim_requests:
            self._trims_done = self.arena.trim_requests
            self._trim()
        best = small = None
        newest = 0
        stamps = self.arena.stamps
        for slot in range(self.arena.slots):
            stamp = stamps[slot]
            if not stamp or self._is_referenced(slot):
                continue
            if self.arena.location(slot)[1] < nbytes:
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
            if stamp and not self._is_referenced(slot):
                stamps[slot] = 0
                self._maps.pop(slot, None)
                self.arena.punch(slot)
                stamps[slot] = stamp

    def _is_referenced(self, slot: int) -> bool:
        """Whether the dataset still keeps a tensor in a slot that was sent."""
        ref = self._sent.get(slot)
        if ref is None:
            return False
        if ref() is not None:
            return True
        del self._sent[slot]
        return False


class PageLocker(Protocol):
    """Page-locks slots for a device: ``device.pinned_slots``."""

    def lock(self, memory: Memory) -> None: ...
    def is_locked(self, memory: Memory) -> bool: ...
    def release_later(self, release: weakref.WeakMethod[Callable[[int], None]], slot: int) -> None: ...


class SlotReader:
    """The parent's side of an arena: leases slots to the consumer and frees each when its last tensor dies."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena  # the memory
        # page-locks slots as they are mapped; a locked slot is free only when no device reads it any more
        self.locker: PageLocker | None = None
        self._read_by_device: set[int] = set()  # the consumer has dropped them, the device may still read them
        self.leases: dict[int, tuple[weakref.ref[Bytes], int]] = {}  # slots that the consumer holds
        self._maps: dict[int, tuple[int, Memory]] = {}  # slot: offset in the file, mapping
        self._stamp = max(arena.stamps[: max(arena.slots, 1)], default=0) + 1
        self._getpid, self._barrier = os.getpid, barrier  # a batch may outlive the module, as the interpreter ends
        self._owner = os.getpid()
        # slots that a forked child sees, which are never written again, and their bytes in use
        self.pinned_by_fork: dict[int, int] = {}
        _readers.add(weakref.ref(self, _readers.discard))

    def lock_with(self, locker: PageLocker | None) -> None:
        """From now on slots are page-locked; those that are mapped already, too."""
        before, self.locker = self.locker, locker
        if locker is not None and locker is not before:
            for _, memory in self._maps.values():
                locker.lock(memory)

    def lease(self, slot: int, used: int) -> Bytes:
        """The slot's first ``used`` bytes as an array. The slot is free again when nothing refers to the array."""
        if self.degraded:
            return self.copy(slot, used)
        try:
            whole = np.frombuffer(self._map(slot), np.uint8, count=used)
        except OSError:  # too many mappings
            return self.copy(slot, used)
        self.leases[slot] = (weakref.ref(whole, lambda _: self._lease_ended(slot)), used)
        return whole

    def _lease_ended(self, slot: int) -> None:
        """The batch's last tensor has died: frees its slot, a page-locked one when the device has read it."""
        self.leases.pop(slot, None)
        if self.locker is None or slot not in self._maps or not self.locker.is_locked(self._maps[slot][1]):
            self.release(slot)
        elif self._getpid() == self._owner:
            self._read_by_device.add(slot)
            self.locker.release_later(weakref.WeakMethod(self._device_is_done), slot)

    def _device_is_done(self, slot: int) -> None:
        self._read_by_device.discard(slot)
        self.release(slot)

    def shrink(self) -> None:
        """Has the worker give back the memory of free slots, before it fills the next one."""
        self.arena.trim_requests += 1
        self.unmap_unused()

    def unmap_unused(self) -> None:
        """Unmaps slots that neither consumer nor device uses; they are mapped again when they are leased."""
        for slot in list(self._maps):
            if slot not in self.leases and slot not in self._read_by_device:
                del self._maps[slot]

    def leased_bytes(self) -> int:
        """Bytes that the consumer holds. Counted afresh: leases end in any thread, at any moment."""
        return sum(used for _, used in list(self.leases.values()))

    def copy(self, slot: int, used: int) -> Bytes:
        """The same bytes in private memory; the slot is free at once."""
        out = np.empty(used, np.uint8)
        offset, _ = self.arena.location(slot)
        done = 0
        while done < used:
            done += os.preadv(self.arena.fd, [out[done:].data], offset + done)
        self.release(slot)
        return out

    def release(self, slot: int) -> None:
        """Gives a slot back to its worker."""
        # A child forked by user code inherits the leases; what ends there must not free what is in use here.
        if self._getpid() != self._owner or slot in self.pinned_by_fork or slot in self._read_by_device:
            return
        self._stamp = self._stamp % 0xFFFFFFFF + 1  # never 0, which means "taken"
        self._barrier()
        self.arena.stamps[slot] = self._stamp

    def reclaim(self) -> None:
        """After the worker's end: frees what it was filling or had sent, but not what is leased."""
        for slot in range(self.arena.slots):
            if slot not in self.leases and not self.arena.stamps[slot]:
                self.release(slot)

    def retain_for_fork(self) -> None:
        """User code has forked: the child sees the leased slots, so they are never written again. A consumer that forks
        again and again has its batches copied out (``degraded``) before that takes much memory."""
        # copied in one step: leases end in any thread, and wherever an object is made
        self.pinned_by_fork.update((slot, used) for slot, (_, used) in self.leases.copy().items())

    @property
    def degraded(self) -> bool:
        """Forked children see so much of it that batches are copied out."""
        return bool(self.pinned_by_fork) and sum(self.pinned_by_fork.values()) > MAX_PINNED_BY_FORK

    def _map(self, slot: int) -> Memory:
        offset, _ = self.arena.location(slot)
        mapped = self._maps.get(slot)
        if mapped is None or mapped[0] != offset:
            self._maps[slot] = mapped = (offset, self.arena.map(slot))
            if self.locker is not None:
                self.locker.lock(mapped[1])
        return mapped[1]


_readers: set[weakref.ref[SlotReader]] = set()


class _Forks(threading.local):
    """What the thread that forks is doing. Another one may fork for the user meanwhile."""

    own = False  # it starts a process of stoker's


_forks = _Forks()


@contextmanager
def own_fork() -> Iterator[None]:
    """Around the start of stoker's own processes, which never read leased slots."""
    before, _forks.own = _forks.own, True
    try:
        yield
    finally:
        _forks.own = before


def _forks_for_user() -> None:
    # torch's batches survive a fork because their memory is never used again; so do those a child can see here.
    if not _forks.own:
        for ref in _readers.copy():
            reader = ref()
            if reader is not None:
                reader.retain_for_fork()


# Before and after: other threads begin and end leases meanwhile.
os.register_at_fork(before=_forks_for_user, after_in_parent=_forks_for_user)
