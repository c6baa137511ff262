"""How a worker waits for its next task: awake for a moment where the last wait was a short one, else asleep.

A worker that falls asleep between two tiny tasks loses its caches to whoever comes, and the consumer pays for waking
it. So it asks again and again for ``AWAKE_NS``, and gives its core away each time to anybody who wants it; one wait
that took longer, and it sleeps at once until one was short again. Virtual machines wait like this for their next
interrupt (KVM's halt polling, kernel documentation, virt/kvm/halt-polling), mutexes for their owner.
"""

from __future__ import annotations

import functools
import os
import select
import time

from ..core import resources

AWAKE_NS = 500_000
POLL_MS = 500  # how late a worker may notice that its parent has gone without a signal


class Idle:
    """The waits of one worker.

    Args:
        fds: pipes that wake it; -1 for one that is not there.
    """

    def __init__(self, *fds: int) -> None:
        self._poll = select.poll()
        for fd in fds:
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)
        self._since = 0
        self._short = False

    def wait(self, workers: int) -> list[tuple[int, int]]:
        """What there is to read; empty after ``POLL_MS``, and while it waits awake, where its caller looks.

        Args:
            workers: how many there are. More than cores, and one that is awake would keep another from its task.
        """
        now = time.perf_counter_ns()
        if not self._since:
            self._since = now
        if self._short and now - self._since < AWAKE_NS and workers <= _cores():
            os.sched_yield()
            return []
        return self._poll.poll(POLL_MS)

    def over(self) -> bool:
        """A task has come. Returns whether it was waited for."""
        if not self._since:
            return False
        self._short = time.perf_counter_ns() - self._since < AWAKE_NS
        self._since = 0
        return True


@functools.cache
def _cores() -> int:
    return max(1, resources.cores_granted() // resources.ranks())
