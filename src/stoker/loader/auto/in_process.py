"""Whether ``num_workers="auto"`` makes the batches of an epoch in workers or in the script's own process.

What a batch would cost here is known from what it cost a worker. If that is less than the loop waited for a worker's
batch, or all of them take less than starting workers does, the next epoch is made here; it goes back to workers when
that has become dear. The dataset is not called here before, because it may open a file when it is first used, which
workers that are forked later would share.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from ...core.types import Batch, Index

LOOKS = 16  # after the first batch, and after this many times as many, it is looked whether workers have opened files
TINY_NS = 2_000_000  # CPU time of a batch, above which it is left to workers: they work beside the loop's own step
DELIVERY_NS = 50_000  # what a worker's batch costs the loop beside waiting for it
DEARER = 2  # epochs go back to workers when a batch comes to take this many times what a worker's took of the loop
SLACK_NS = 300_000  # and this much more at least
SMALL_NS = 10_000_000  # work of a whole epoch that is less than what starting and ending workers takes

MakeBatch = Callable[[int, Index], Batch]


class BatchMaker(Enum):
    """Who makes the batches of this epoch, and why."""

    WORKERS = "workers"
    ONLY_WORKERS = "workers, because a batch that was made here failed"
    HERE = "this process, where they cost the loop less"
    ONLY_HERE = "this process, because workers cannot be started any more"


class Worked(NamedTuple):
    """Tasks that have been done so far, and the nanoseconds of wall and CPU time that they took."""

    tasks: int
    wall_ns: int
    cpu_ns: int


class InProcessTrial:
    """Watches one loader. ``why_not``: why batches may not be made here, or "". ``opened``: what workers have opened
    and keep; "" for nothing, None where that cannot be said."""

    def __init__(self, why_not: Callable[[], str], opened: Callable[[], str | None]) -> None:
        self.state = BatchMaker.WORKERS  # who makes the batches
        self.was_called = False  # some batches were made here
        self.workers, self.prefetch = 1, 2  # workers, prefetch: the loader's settings with workers
        self._why_not, self._opened = why_not, opened
        self._before = Worked(0, 0, 0)
        self._usual_ns = 0.0  # of the loop's time, for a batch of a worker
        self._waited_ns = self._batches = 0
        self._next_look = 1
        self._found: str | None = None  # that workers have opened in this epoch; None: it is not known

    @property
    def here(self) -> bool:
        """This process makes the batches."""
        return self.state in (BatchMaker.HERE, BatchMaker.ONLY_HERE)

    def begin(self, finished: bool, worked: Worked) -> str:
        """An iterator is about to be made. Returns words if another process makes its batches than those of the last.
        ``finished``: the last one went to the end of its epoch. ``worked``: by workers and by this process, so far."""
        tasks = worked.tasks - self._before.tasks
        wall_ns, cpu_ns = worked.wall_ns - self._before.wall_ns, worked.cpu_ns - self._before.cpu_ns
        usual_ns, found = self._waited_ns / max(1, tasks) + DELIVERY_NS, self._found
        self._before, self._waited_ns, self._batches, self._next_look, self._found = worked, 0, 0, 1, None
        if not finished or not tasks:
            return ""
        # The lesser of both is what it costs here, for a worker may wait for a core.
        each_ns, is_small = min(wall_ns, cpu_ns) / tasks, wall_ns < SMALL_NS
        if self.state is BatchMaker.WORKERS:
            pays = is_small or (found == "" and each_ns < min(TINY_NS, usual_ns))
            if pays and not self._why_not():
                self.state, self._usual_ns = BatchMaker.HERE, usual_ns
                return f"a batch takes {each_ns / 1e6:.2g} ms to make, and took {usual_ns / 1e6:.2g} ms of the loop"
        elif self.state is BatchMaker.HERE and not is_small and each_ns > DEARER * self._usual_ns + SLACK_NS:
            self.state = BatchMaker.WORKERS
            return f"a batch takes {each_ns / 1e6:.2g} ms to make now, and took {self._usual_ns / 1e6:.2g} ms before"
        return ""

    def timed(self, make: MakeBatch) -> MakeBatch:
        """``make``, which makes a batch here. If it fails no other is made here."""

        def made(number: int, indices: Index) -> Batch:
            self.was_called = True
            try:
                return make(number, indices)
            except Exception:
                self.state = BatchMaker.ONLY_WORKERS
                raise

        return made

    def step(self, waited_ns: int) -> None:
        """A batch was delivered. ``waited_ns``: how long the consumer has waited for workers in this epoch."""
        self._waited_ns = waited_ns
        self._batches += 1
        if self.state is BatchMaker.WORKERS and self._batches == self._next_look:
            self._next_look *= LOOKS
            found = self._opened()
            if not self._found and found is not None:
                self._found = found
