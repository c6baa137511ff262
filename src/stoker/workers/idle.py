"""Waits for a worker's next task: polls for a moment if the last wait was short, else sleeps at once.

A worker that sleeps between two tiny tasks loses its caches, and the consumer pays for waking it. So the worker polls
for ``AWAKE_NS``, yielding its core each time. After a longer wait it sleeps at once, until a wait was short again. KVM
waits for interrupts in the same way (kernel documentation, virt/kvm/halt-polling).
"""

from __future__ import annotations

import functools
import os
import select
import time

from ..core import resources

AWAKE_NS = 500_000
EXPIRES_S = 0.4  # for which a worker waits for another iterator, at least
POLL_MS = 500  # how late a worker may notice that its parent has gone without a signal


class Idle:
    """Waits for one worker. ``fds``: pipes that wake it; -1 entries are ignored."""

    def __init__(self, *fds: int) -> None:
        self._poll = select.poll()
        for fd in fds:
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)
        self._since = 0  # when the wait began; 0 if the worker is not waiting
        self._short = False  # the last wait was shorter than AWAKE_NS

    def wait(self, workers: int) -> list[tuple[int, int]]:
        """Returns the descriptors that can be read; empty after ``POLL_MS``, and while polling: then the caller tries
        to read. ``workers``: their number. With more workers than cores, polling would keep another from its task."""
        now = time.perf_counter_ns()
        if not self._since:
            self._since = now
        if self._short and now - self._since < AWAKE_NS and workers <= _cores():
            os.sched_yield()
            return []
        return self._poll.poll(POLL_MS)

    def over(self) -> bool:
        """Notes that a task has come. Returns whether the worker waited for it."""
        if not self._since:
            return False
        self._short = time.perf_counter_ns() - self._since < AWAKE_NS
        self._since = 0
        return True


class Tokens:
    """Tells a worker that no iterator has asked for it since its last one ended. ``fd``: see ``WorkerSpec.tokens``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._since = 0.0  # when they were first seen; 0.0: they are not there
        self._poll = select.poll()
        if fd >= 0:
            self._poll.register(fd, select.POLLIN)

    def expired(self) -> bool:
        """Takes a token if they have been there for ``EXPIRES_S``. Returns whether the worker must leave."""
        if self._fd < 0 or not self._poll.poll(0):
            self._since = 0.0
            return False
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < EXPIRES_S:
            return False
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:  # an iterator was faster
            return False
        return True


@functools.cache
def _cores() -> int:
    return max(1, resources.cores_granted() // resources.ranks())
