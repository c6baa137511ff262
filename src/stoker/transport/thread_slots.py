"""Slots for worker threads: private memory that one process fills, reads and reuses while it is warm.

A slot is free when the last tensor in it has died and, if it is page-locked (``PageLocker``), the device has read it.
A forked child gets a copy of it, as of all private memory.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable

import numpy as np

from .arena import GRAIN
from .mapping import Memory, populate
from .slots import SLACK, Bytes, PageLocker, SlotBeingFilled

MIN_BYTES = 1 << 16  # malloc is faster below this


class HeapWriter(SlotBeingFilled):
    """Takes slots and fills them, like ``SlotWriter`` but for a thread. ``budget``: bytes of all slots at most."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        # page-locks slots; a locked slot is free only when the device has finished reading it
        self.locker: PageLocker | None = None
        self._locked_in_use: set[int] = set()  # locked slots, from being taken until the device has read them
        self._slots: list[tuple[Memory, weakref.ref[Bytes] | None]] = []

    @property
    def slots(self) -> int:
        return len(self._slots)

    def take(self, nbytes: int) -> bool:
        """Starts filling a slot of at least ``nbytes``. Returns False if none is available."""
        if nbytes < MIN_BYTES:
            return False
        at = self._choose(nbytes)
        if at is None:
            return False
        memory = self._slots[at][0]
        self.whole = np.frombuffer(memory, np.uint8)
        self.used, self.capacity = 0, len(memory)
        self._slots[at] = memory, weakref.ref(self.whole, self._on_death(at, memory))
        return True

    def _on_death(self, at: int, memory: Memory) -> Callable[[object], None] | None:
        """Returns the callback for the death of the last tensor in the slot, if it is page-locked. Marks the slot in
        use at once: another thread may look for a free slot between that death and the callback."""
        locker = self.locker
        if locker is None:
            return None
        if not locker.is_locked(memory):
            locker.lock(memory)
            if not locker.is_locked(memory):
                return None
        self._locked_in_use.add(at)
        release: weakref.WeakMethod[Callable[[int], None]] = weakref.WeakMethod(self._device_is_done)
        return lambda _: locker.release_later(release, at)

    def _device_is_done(self, at: int) -> None:
        self._locked_in_use.discard(at)

    def sent(self) -> None:
        """Leaves the slot to the tensors in it; without any it is free."""
        self.whole = None

    cancel = sent

    def _choose(self, nbytes: int) -> int | None:
        total = 0
        small = None
        for i, (memory, ref) in enumerate(self._slots):
            total += len(memory)
            if (ref is None or ref() is None) and i not in self._locked_in_use:
                if len(memory) >= nbytes:
                    return i
                small = i
        if small is not None:  # replaced by a larger one
            total -= len(self._slots[small][0])
            nbytes += nbytes // SLACK
        capacity = -(-nbytes // GRAIN) * GRAIN
        if total + capacity > self._budget:
            return None
        try:
            whole = mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return None
        memory = (ctypes.c_ubyte * capacity).from_buffer(whole)  # keeps the mapping, and supports finalizers
        populate(memory, nbytes)
        if small is None:
            small = len(self._slots)
            self._slots.append((memory, None))
        else:
            self._slots[small] = memory, None
        return small
