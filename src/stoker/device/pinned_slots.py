"""Page-locked slots: the memory that a worker writes is the memory that the copy engine reads, so nothing is copied.

The parent locks each slot once, when it maps it (a slot is one piece: a copy may not cross the border of two
registrations). torch's allocator knows when copies from its own blocks are done; of these it knows nothing. So a slot
that the consumer has dropped goes back to its worker only behind a fence that was set after the drop: then nothing that
was asked for before can still read it, on whatever stream.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cuda import Fence, Runtime

logger = logging.getLogger(__name__)
Release = tuple["weakref.WeakMethod[Callable[[int], None]]", int]


class Locker:
    """Locks slots within a budget, and holds dropped ones back. One for a loader.

    Args:
        runtime: the device's.
        budget: bytes that may be locked.

    Attributes:
        locked: bytes that are.
        failed: what the system said when it locked no more; "" while it does.
        over: slots that were left unlocked for the budget.
    """

    def __init__(self, runtime: Runtime, budget: int) -> None:
        self._runtime, self._budget = runtime, budget
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a finalizer may run in the midst of it
        self._sizes: dict[int, int] = {}
        self._dropped: deque[Release] = deque()  # since the last fence; appended to in any thread, by finalizers too
        self._behind: deque[tuple[Fence, list[Release]]] = deque()
        self.locked = 0
        self.failed = ""
        self.over = 0

    def lock(self, memory: Any) -> None:
        """Locks a mapping, a ctypes array of bytes; it is unlocked before it is unmapped. Failing is noted."""
        address, nbytes = ctypes.addressof(memory), ctypes.sizeof(memory)
        if self.failed or os.getpid() != self._owner:
            return
        with self._lock:
            if self.locked + nbytes > self._budget:
                if not self.over and self._budget:
                    logger.warning(
                        "page-locked memory is at its budget of %s bytes: more slots stay as they are", self._budget
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
        # Called before the finalizer that unmaps: the newest goes first (weakref's documentation).
        weakref.finalize(memory, self._unlock, address).atexit = False

    def is_locked(self, memory: Any) -> bool:
        """Whether this mapping is locked."""
        return ctypes.addressof(memory) in self._sizes

    def later(self, release: weakref.WeakMethod[Callable[[int], None]], slot: int) -> None:
        """Calls ``release(slot)``, if it is still there, when no copy can read the slot any more. From any thread.

        Weakly, for this object lives as long as the memory it has locked, and that must not wait for itself.
        """
        self._dropped.append((release, slot))

    def sweep(self) -> int:
        """Sets a fence behind what was dropped since the last one, and releases what is behind fences that are done.

        Returns:
            How many slots wait.
        """
        if os.getpid() != self._owner:
            return 0
        if self._dropped:
            some = [self._dropped.popleft() for _ in range(len(self._dropped))]
            fence = self._runtime.fence()
            if fence is None:
                self._dropped.extendleft(reversed(some))
            else:
                self._behind.append((fence, some))
        while self._behind and self._behind[0][0].done():
            for release, slot in self._behind.popleft()[1]:
                found = release()
                if found is not None:
                    found(slot)
        return len(self._dropped) + sum(len(some) for _, some in self._behind)

    def _unlock(self, address: int) -> None:
        if os.getpid() != self._owner:
            return  # a forked child: no call of CUDA's may be made there
        nbytes = self._sizes.pop(address)
        fence = self._runtime.fence()
        if fence is not None:
            fence.wait()  # a copy may be under way from the memory whose last view has just died
        self._runtime.unregister(address)
        with self._lock:
            self.locked -= nbytes
