"""Slots: shared memory that a worker fills with a batch and the consumer reads in place, reused while it is warm.

Each worker has its own ``Arena``. Page tables are filled at once (``mapping.populate``), which costs a third of
touching page after page; ``docs/notes/slots.md`` has the numbers. A batch's memory is freed when its last tensor dies:
``SlotReader.lease`` hands out an array and ``_lease_ended`` returns the slot to the worker.

Life of a slot; only the named side may make a transition:

    FREE --worker--> FILLING --worker--> IN_FLIGHT --parent--> LEASED --parent--> FREE
                        |                    +--parent (dropped, or copied out)--> FREE
                        +--worker (batch turned out small)--> FREE

A page-locked slot that the consumer drops is FREE only when the device has read it (``device.pinned_slots``).

Both sides only need to share whether a slot is free: one 32-bit stamp per slot, 0 while it is taken, else a count that
grows with every release. So the worker takes the slot released last, whose pages are warm. The stamp is the only word
that both sides write, and each side writes it only in its own transitions. The consumer's reads of a batch come before
the stamp that frees its slot (``ordering.barrier``). The worker's writes come after it, because they depend on the
stamp; all processors keep that order.
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
    import numpy.typing as npt  # importing it at run time would cost ten milliseconds

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
MAX_PINNED_BY_FORK = 256 << 20  # bytes of slots that forked children see; beyond this, batches are copied out
SLACK = 8  # a slot that proved too small is replaced by one larger than needed by this fraction: an eighth


class SlotBeingFilled:
    """The memory of the slot that a worker fills."""

    whole: Bytes | None = None  # its memory as an array; None while no slot is being filled
    used = 0  # bytes in use in it
    capacity = 0  # its size in bytes

    def room(self, nbytes: int) -> int | None:
        """Reserves bytes in the slot being filled. Returns their aligned offset, or None if they do not fit."""
        at = aligned(self.used)
        if self.whole is None or at + nbytes > self.capacity:
            return None
        self.used = at + nbytes
        return at


class SlotWriter(SlotBeingFilled):
    """The worker's side of an arena: takes slots and fills them, never one whose memory is still in use."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._maps: dict[int, tuple[int, Memory]] = {}  # slot: offset in the file, mapping
        self._sent: dict[int, weakref.ref[Bytes]] = {}  # alive while the dataset keeps a tensor in a sent slot
        self.slot = -1  # the slot being filled; -1 for none
        self.address = 0  # where its memory begins
        self._stamp = 0
        self._trims_done = arena.trim_requests

    def take(self, nbytes: int) -> bool:
        """Starts filling a slot of at least ``nbytes``. Returns False if none is available."""
        self.cancel()  # a slot that a dataset began with ``stoker.empty``; not reused while the dataset keeps a tensor
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
        # The lease: every tensor in the slot holds this array, so the array dies with the last tensor.
        self.whole = np.frombuffer(mapped[1], np.uint8)
        self.address = self.whole.ctypes.data
        self.slot, self.used, self.capacity = slot, 0, capacity
        self.arena.slot_being_filled = slot
        return True

    def sent(self) -> None:
        """Hands the slot to the parent. It is not written again while the dataset keeps a tensor in it."""
        if self.whole is not None:
            self._sent[self.slot] = weakref.ref(self.whole)
            self.arena.slot_being_filled = -1
        self.whole = None
        self.slot = -1
        self.used = self.capacity = self.address = 0

    def cancel(self) -> None:
        """Frees the slot being filled without sending it."""
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
        """Returns the memory of free slots to the system."""
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
        # page-locks slots as they are mapped; a locked slot is free only when the device has finished reading it
        self.locker: PageLocker | None = None
        self._read_by_device: set[int] = set()  # dropped by the consumer, but the device may still read them
        self.leases: dict[int, tuple[weakref.ref[Bytes], int]] = {}  # slots that the consumer holds
        self._maps: dict[int, tuple[int, Memory]] = {}  # slot: offset in the file, mapping
        self._stamp = max(arena.stamps[: max(arena.slots, 1)], default=0) + 1
        self._getpid, self._barrier = os.getpid, barrier  # at interpreter shutdown, a batch may outlive the module
        self._owner = os.getpid()
        # bytes in use of slots that a forked child sees, which are never written again
        self.pinned_by_fork: dict[int, int] = {}
        _readers.add(weakref.ref(self, _readers.discard))

    def lock_with(self, locker: PageLocker | None) -> None:
        """Page-locks slots from now on, including those already mapped."""
        before, self.locker = self.locker, locker
        if locker is not None and locker is not before:
            for _, memory in self._maps.values():
                locker.lock(memory)

    def lease(self, slot: int, used: int) -> Bytes:
        """Returns the slot's first ``used`` bytes as an array. The slot is free when nothing refers to the array."""
        if self.degraded:
            return self.copy(slot, used)
        try:
            whole = np.frombuffer(self._map(slot), np.uint8, count=used)
        except OSError:  # too many mappings
            return self.copy(slot, used)
        self.leases[slot] = (weakref.ref(whole, lambda _: self._lease_ended(slot)), used)
        return whole

    def _lease_ended(self, slot: int) -> None:
        """Frees the slot once the batch's last tensor has died; a page-locked slot once the device has read it."""
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
        """Makes the worker return the memory of free slots to the system, before it fills the next one. Unmaps slots
        that neither consumer nor device uses; they are mapped again when leased."""
        self.arena.trim_requests += 1
        for slot in list(self._maps):
            if slot not in self.leases and slot not in self._read_by_device:
                del self._maps[slot]

    def leased_bytes(self) -> int:
        """Returns the bytes that the consumer holds; counted anew, because leases end in any thread at any time."""
        return sum(used for _, used in list(self.leases.values()))

    def copy(self, slot: int, used: int) -> Bytes:
        """Copies the slot's bytes to private memory, and frees the slot at once."""
        out = np.empty(used, np.uint8)
        offset, _ = self.arena.location(slot)
        done = 0
        while done < used:
            done += os.preadv(self.arena.fd, [out[done:].data], offset + done)
        self.release(slot)
        return out

    def release(self, slot: int) -> None:
        """Returns a slot to its worker."""
        # A child forked by user code inherits the leases; a lease that ends there must not free a slot in use here.
        if self._getpid() != self._owner or slot in self.pinned_by_fork or slot in self._read_by_device:
            return
        self._stamp = self._stamp % 0xFFFFFFFF + 1  # never 0, which means "taken"
        self._barrier()
        self.arena.stamps[slot] = self._stamp

    def reclaim(self) -> None:
        """After the worker's end, frees slots that it was filling or had sent, except leased ones."""
        for slot in range(self.arena.slots):
            if slot not in self.leases and not self.arena.stamps[slot]:
                self.release(slot)

    def retain_for_fork(self) -> None:
        """Retains the leased slots when user code has forked: the child sees them, so they are never written again. If
        a consumer keeps forking, its batches are copied out (``degraded``) before that takes much memory."""
        # copied in one step, because a lease may end in any thread and at any allocation
        self.pinned_by_fork.update((slot, used) for slot, (_, used) in self.leases.copy().items())

    @property
    def degraded(self) -> bool:
        """Whether forked children see so many slots that batches are copied out."""
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


_forks = threading.local()  # ``own``: this thread starts a process of stoker's. Another may fork for the user meanwhile


@contextmanager
def own_fork() -> Iterator[None]:
    """Wraps the start of stoker's own processes, which never read leased slots."""
    before, _forks.own = getattr(_forks, "own", False), True
    try:
        yield
    finally:
        _forks.own = before


def _forks_for_user() -> None:
    # torch's batches survive a fork because their memory is never reused; so do those that a child can see here.
    if not getattr(_forks, "own", False):
        for ref in _readers.copy():
            reader = ref()
            if reader is not None:
                reader.retain_for_fork()


# Before and after, because other threads begin and end leases meanwhile.
os.register_at_fork(before=_forks_for_user, after_in_parent=_forks_for_user)
