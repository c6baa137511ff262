"""Page-locked slots: the copy engine reads the same memory that a worker writes, without a copy on the host.

1. The parent locks each slot once, when it maps it (``Locker.lock``). A slot is locked in one piece, because a copy
   must not cross two registrations.
2. When the consumer drops a batch, ``SlotReader`` or ``HeapWriter`` calls ``Locker.release_later``. torch's allocator
   does not know these slots, so a copy may still be reading.
3. ``Locker.sweep``, before each batch, sets a fence for the slots dropped since the last one. When the device has
   reached it, no stream can still read these slots, and they go back to their workers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ..transport.mapping import Memory

if TYPE_CHECKING:
    from .cuda import Cuda, Fence

logger = logging.getLogger(__name__)
Release: TypeAlias = tuple["weakref.WeakMethod[Callable[[int], None]]", int]


class Locker:
    """Locks slots within a budget of bytes, and delays the release of dropped ones. Each loader has one."""

    def __init__(self, runtime: Cuda, budget: int) -> None:
        self._runtime, self._budget = runtime, budget
        self._owner = os.getpid()
        self._lock = threading.RLock()  # reentrant, because a finalizer may run while it is held
        self._sizes: dict[int, int] = {}
        self._dropped: deque[Release] = deque()  # since the last fence; finalizers in any thread append
        self._fenced: deque[tuple[Fence, list[Release]]] = deque()
        self.locked = 0  # bytes locked now
        self.failed = ""  # why the system refuses to lock more memory; "" if it does not
        self.over = 0  # slots left unlocked because of the budget

    def lock(self, memory: Memory) -> None:
        """Locks a mapping, which is unlocked before it is unmapped. Records a failure in ``failed``."""
        address, nbytes = ctypes.addressof(memory), ctypes.sizeof(memory)
        if self.failed or os.getpid() != self._owner:
            return
        with self._lock:
            if self.locked + nbytes > self._budget:
                if not self.over and self._budget:
                    logger.warning(
                        "page-locked memory has reached its budget of %s bytes: no more slots will be locked",
                        self._budget,
                    )
                self.over += 1
                return
            self.locked += nbytes
        self.failed = self._runtime.register(address, nbytes)
        if self.failed:
            with self._lock:
                self.locked -= nbytes
            return
        self._sizes[address] = nbytes
        # Runs before the finalizer that unmaps: the newest runs first (weakref's documentation).
        weakref.finalize(memory, self._unlock, address).atexit = False

    def is_locked(self, memory: Memory) -> bool:
        return ctypes.addressof(memory) in self._sizes

    def release_later(self, release: weakref.WeakMethod[Callable[[int], None]], slot: int) -> None:
        """Calls ``release(slot)`` when no copy can still read the slot. May be called from any thread. The reference is
        weak, because this object lives as long as the memory that it has locked."""
        self._dropped.append((release, slot))

    def sweep(self) -> int:
        """Sets a fence for the slots dropped since the last one, and releases slots whose fences are done. Returns the
        number of slots not released yet."""
        if os.getpid() != self._owner:
            return 0
        if self._dropped:
            some = [self._dropped.popleft() for _ in range(len(self._dropped))]
            fence = self._runtime.fence()
            if fence is None:
                self._dropped.extendleft(reversed(some))
            else:
                self._fenced.append((fence, some))
        while self._fenced and self._fenced[0][0].done():
            for release, slot in self._fenced.popleft()[1]:
                found = release()
                if found is not None:
                    found(slot)
        return len(self._dropped) + sum(len(some) for _, some in self._fenced)

    def _unlock(self, address: int) -> None:
        if os.getpid() != self._owner:
            return  # a forked child must not call CUDA
        nbytes = self._sizes.pop(address)
        fence = self._runtime.fence()
        if fence is not None:
            fence.wait()  # a copy from this memory may still be running
        self._runtime.unregister(address)
        with self._lock:
            self.locked -= nbytes
