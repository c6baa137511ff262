"""Slots for threads: private memory that is filled, read and used again warm, all within one process.

The same life as in ``ring``, without the two sides: a slot is free when the last tensor in it has died. A child that
the user forks has a copy of what it saw, as of all private memory. Page-locked slots (``Locker``) wait
for the device, too.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .arena import GRAIN, aligned
from .mapping import populate
from .slots import SLACK, Bytes, Locker

SMALL = 1 << 16  # malloc is quicker below this


class HeapWriter:
    """Takes slots and fills them; ``ring.SlotWriter`` for a thread.

    Args:
        budget: bytes that its slots may take together; past it there is none to be had.

    Attributes:
        locker: page-locks slots; a locked one is free only when no device reads it any more.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.locker: Locker | None = None
        self._waits: set[int] = set()  # locked slots from being taken to being let go by the device
        self._slots: list[tuple[Any, weakref.ref[Bytes] | None]] = []
        self.whole: Bytes | None = None
        self.used = 0
        self.capacity = 0

    @property
    def slots(self) -> int:
        """Slots made so far."""
        return len(self._slots)

    def take(self, nbytes: int) -> bool:
        """Starts filling a slot of at least ``nbytes``. Returns False when there is none to be had."""
        if nbytes < SMALL:
            return False
        at = self._choose(nbytes)
        if at is None:
            return False
        memory = self._slots[at][0]
        self.whole = np.frombuffer(memory, np.uint8)
        self.used, self.capacity = 0, len(memory)
        self._slots[at] = memory, weakref.ref(self.whole, self._behind_a_fence(at, memory))
        return True

    def _behind_a_fence(self, at: int, memory: Any) -> Callable[[Any], None] | None:
        """What is called when the slot's last tensor has died, if the slot is locked. It waits from now on: between
        that death and the call another thread may look for a free slot."""
        locker = self.locker
        if locker is None:
            return None
        if not locker.is_locked(memory):
            locker.lock(memory)
            if not locker.is_locked(memory):
                return None
        self._waits.add(at)
        let_go: weakref.WeakMethod[Callable[[int], None]] = weakref.WeakMethod(self._let_go)
        return lambda _: locker.later(let_go, at)

    def _let_go(self, at: int) -> None:
        self._waits.discard(at)

    def room(self, nbytes: int) -> int | None:
        """Reserves bytes in the slot being filled: their offset, aligned, or None when they do not fit."""
        at = aligned(self.used)
        if self.whole is None or at + nbytes > self.capacity:
            return None
        self.used = at + nbytes
        return at

    def sent(self) -> None:
        """The slot belongs to the tensors in it; without any it is free."""
        self.whole = None

    cancel = sent

    def _choose(self, nbytes: int) -> int | None:
        total = 0
        small = None
        for i, (memory, ref) in enumerate(self._slots):
            total += len(memory)
            if (ref is None or ref() is None) and i not in self._waits:
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
        memory = (ctypes.c_ubyte * capacity).from_buffer(whole)  # keeps the mapping, and can be watched by a finalizer
        populate(memory, nbytes)
        if small is None:
            small = len(self._slots)
            self._slots.append((memory, None))
        else:
            self._slots[small] = memory, None
        return small
