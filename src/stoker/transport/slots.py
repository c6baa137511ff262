"""The slot ring: shared memory written once by a worker, read in place by the consumer, used again warm.

One ``Arena`` belongs to one worker. Page tables are filled at once (``mapping.populate``), which costs a third of
touching page after page; ``docs/notes/slots.md`` has the numbers.

Life of a slot; only the side named may make the move:

    FREE --worker--> FILLING --worker--> IN_FLIGHT --parent--> LEASED --parent--> FREE
                        |                    +--parent (dropped, or copied out)--> FREE
                        +--worker (batch turned out small)--> FREE

A page-locked slot that the consumer drops is held back until the device has read it (``pin.locked``), and is FREE then.

In shared memory only "free or not" has to be known by both sides: one 32-bit stamp a slot, 0 while taken, else a
count that grows with every release, so the worker takes the slot that was released last, whose pages are warm.
The stamp is the only word both sides write, and each side writes it only in its own moves.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from .arena import Arena, aligned
from .mapping import populate

if TYPE_CHECKING:
    import numpy.typing as npt  # at run time it would cost ten milliseconds

    Bytes: TypeAlias = npt.NDArray[np.uint8]
else:
    Bytes = np.ndarray

LOST = 256 << 20  # bytes of slots that children of the user's saw; beyond, batches are copied out
SLACK = 8  # a slot that proved too small is replaced by one an eighth larger than needed


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
        self.cancel()  # one that a dataset began by ``stoker.empty``; while it keeps that, nobody writes there
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
            populate(memory, nbytes, used=self.arena.stamps[slot] > 0)
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
        self._lost: dict[int, int] = {}  # slot, bytes
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
        if self.worn:
            return self.copy(slot, used)
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
        """A child of the user's sees the leased slots from now on: they are never written again. A consumer that forks
        again and again has its batches copied out before that takes much memory."""
        self._lost.update((slot, used) for slot, (_, used) in list(self.leases.items()))

    @property
    def worn(self) -> bool:
        """Too much of it has been seen by children of the user's."""
        return bool(self._lost) and sum(self._lost.values()) > LOST

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
