"""The border between the scheduler and whatever runs its tasks. A new kind of worker is one new file behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..faults.policy import OnError
from ..source import Task
from ..transport.record import Times


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker has to know; what torch hands to its ``_worker_loop``.

    Attributes:
        kind: torch's ``_DatasetKind``.
        dataset: the dataset; copied by fork or pickled.
        auto_collation: whether a task is a list of indices.
        collate_fn: the loader's collate function.
        drop_last: torch's.
        base_seed: drawn by the iterator; a worker's seed is ``base_seed + id``.
        init_fn: called with the worker's id before the first fetch.
        num_workers: how many there are, for ``get_worker_info()``.
        shared_seed: torch's seed for datapipes, else None.
        task_seeds: seed per task instead of per worker.
        shared: any free worker takes the next task.
        on_error: what to do about samples that fail; None: torch's way.
    """

    kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    base_seed: int
    init_fn: Callable[[int], None] | None
    num_workers: int
    shared_seed: int | None
    task_seeds: bool
    shared: bool = False
    on_error: OnError | None = None


class Result(Protocol):
    """What came back for one task."""

    worker: int
    epoch: int
    task: int
    ended: bool
    times: Times
    nbytes: int  # memory that the batch takes

    def take(self) -> Any:
        """The batch, or torch's ``ExceptionWrapper``. Once only."""

    def drop(self) -> None:
        """Nobody wants it; gives its slot back."""


class Pool(Protocol):
    """Workers of one kind."""

    def submit(self, worker: int | None, epoch: int, task: Task) -> None:
        """Gives a worker a task; None: whoever is free. Never blocks."""

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        """A new epoch begins for every worker."""

    def retire(self, worker: int) -> None:
        """The worker has no more work in this run; it may leave."""

    def resize(self, n: int) -> None:
        """Another number of workers, where tasks are shared. Returns at once: those that are new start in the
        background, those that go finish the task they have."""

    def alive(self) -> int:
        """Workers that have not died or been told to leave."""

    def finish(self) -> None:
        """There will be no more tasks for anybody. Workers leave when they have answered those they have."""

    def receive(self, timeout: float | None, worker: int | None = None) -> Result | None:
        """The next result, or None after ``timeout`` seconds.

        Args:
            timeout: None waits for ever.
            worker: whose result is waited for; the others' may come first, or stay unread until asked for.

        Raises:
            WorkerDiedError: a worker that was not told to leave is gone.
        """

    def close(self) -> None:
        """Ends all workers and frees everything. May be called twice, and by any process: a forked child's call does
        nothing."""
