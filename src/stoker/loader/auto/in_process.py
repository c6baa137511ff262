"""Decides whether ``num_workers="auto"`` makes an epoch's batches in workers or in the script's own process.

A worker's cost per batch tells what a batch would cost here. If that is less than the loop waited for a worker's batch,
or the whole epoch is less work than starting workers, this process makes the next epoch. Epochs go back to workers if
that becomes expensive. The dataset is not called here before, because it may open a file on first use, which workers
forked later would share.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from ...core.types import Batch, Index
from ..scheduler import MakeBatch

LOOKS = 16  # after the first batch, and after every 16-fold number of batches, checks whether workers have opened files
TINY_NS = 2_000_000  # batches with more CPU time are left to workers, which run in parallel with the loop's own step
DELIVERY_NS = 50_000  # cost of a worker's batch to the loop, apart from waiting
DEARER = 2  # epochs go back to workers if a batch takes this many times as long as a worker's batch took of the loop
SLACK_NS = 300_000  # and at least this much longer
SMALL_NS = 10_000_000  # an epoch with less work than this is cheaper than starting and ending workers


class BatchMaker(Enum):
    """Who makes the batches of the current epoch, and why."""

    WORKERS = "workers"
    ONLY_WORKERS = "workers, because loading a batch in this process failed"
    HERE = "this process, where batches cost the loop less"
    ONLY_HERE = "this process, because no more workers can be started"


class Worked(NamedTuple):
    """Number of tasks done so far, and their wall and CPU time in nanoseconds."""

    tasks: int
    wall_ns: int
    cpu_ns: int


class InProcessTrial:
    """Observes one loader. ``why_not``: returns why batches must not be made here, or "". ``opened``: returns what
    workers have opened and keep; "" for nothing, None if unknown."""

    def __init__(self, why_not: Callable[[], str], opened: Callable[[], str | None]) -> None:
        self.state = BatchMaker.WORKERS  # who makes the batches
        self.was_called = False  # whether some batches were made here
        self.workers, self.prefetch = 1, 2  # workers, prefetch: the loader's settings when it has workers
        self._why_not, self._opened = why_not, opened
        self._before = Worked(0, 0, 0)
        self._usual_ns = 0.0  # of the loop's time, per batch from a worker
        self._waited_ns = self._batches = 0
        self._next_look = 1
        self._found: str | None = None  # opened by workers in this epoch; None: unknown

    @property
    def here(self) -> bool:
        """Whether this process makes the batches."""
        return self.state in (BatchMaker.HERE, BatchMaker.ONLY_HERE)

    def begin(self, finished: bool, worked: Worked) -> str:
        """Call before creating an iterator. Returns a reason if the batches will be made by another process than
        before. ``finished``: the last iterator reached the end of its epoch. ``worked``: totals of workers and this
        process so far."""
        tasks = worked.tasks - self._before.tasks
        wall_ns, cpu_ns = worked.wall_ns - self._before.wall_ns, worked.cpu_ns - self._before.cpu_ns
        usual_ns, found = self._waited_ns / max(1, tasks) + DELIVERY_NS, self._found
        self._before, self._waited_ns, self._batches, self._next_look, self._found = worked, 0, 0, 1, None
        if not finished or not tasks:
            return ""
        # The lesser of both is the cost here, because a worker may wait for a core.
        each_ns, is_small = min(wall_ns, cpu_ns) / tasks, wall_ns < SMALL_NS
        if self.state is BatchMaker.WORKERS:
            pays = is_small or (found == "" and each_ns < min(TINY_NS, usual_ns))
            if pays and not self._why_not():
                self.state, self._usual_ns = BatchMaker.HERE, usual_ns
                return (
                    f"loading a batch takes {each_ns / 1e6:.2g} ms here; with workers the loop spent "
                    f"{usual_ns / 1e6:.2g} ms on it"
                )
        elif self.state is BatchMaker.HERE and not is_small and each_ns > DEARER * self._usual_ns + SLACK_NS:
            self.state = BatchMaker.WORKERS
            return f"loading a batch now takes {each_ns / 1e6:.2g} ms, up from {self._usual_ns / 1e6:.2g} ms"
        return ""

    def timed(self, make: MakeBatch) -> MakeBatch:
        """Wraps ``make``, which makes a batch here: after a failure, no more batches are made here."""

        def made(number: int, indices: Index) -> Batch:
            self.was_called = True
            try:
                return make(number, indices)
            except Exception:
                self.state = BatchMaker.ONLY_WORKERS
                raise

        return made

    def step(self, waited_ns: int) -> None:
        """Call for each delivered batch. ``waited_ns``: time that the consumer has waited for workers in this epoch."""
        self._waited_ns = waited_ns
        self._batches += 1
        if self.state is BatchMaker.WORKERS and self._batches == self._next_look:
            self._next_look *= LOOKS
            found = self._opened()
            if not self._found and found is not None:
                self._found = found
