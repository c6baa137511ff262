"""What the scheduler and workers of any kind agree on. A new kind of worker is a new file that implements ``Pool``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.types import Batch, Index, MapDataset
from ..sampling.order import Task
from ..sampling.shard import ShardStart
from ..transport.arena import TaskId
from ..transport.messages import Times
from .faults.policy import Failure, OnError

if TYPE_CHECKING:
    from ..sampling.state import WorkerPart


class TaskPhase(enum.IntEnum):
    """What a worker does with a task, as far as it says so."""

    BATCH = 0  # makes the batch
    PROBING = 1  # loads each sample alone, to find the one that kills
    PROBED = 2  # makes the batch; each sample could be loaded alone


class WorkersUselessError(Exception):
    """Workers that stoker has chosen itself cannot do their work; the script's own process goes on without them. No
    script sees this."""


class Position(NamedTuple):
    """Where a worker is in its task."""

    phase: TaskPhase  # what it does with the task
    sample: int | None  # which sample of the task it loads; None: not known, or all at once

    @classmethod
    def decode(cls, word: int) -> Position:
        """Of the word in the worker's arena, which ``encode_position`` made."""
        sample = (word & 0xFFFFFFFF) - 1
        return cls(TaskPhase(word >> 32), sample if sample >= 0 else None)


def encode_position(phase: int, sample: int) -> int:
    """A position as one word of the worker's arena; a sample of -1: not known, or all at once."""
    return phase << 32 | sample + 1


class RetryTask(NamedTuple):
    """Takes the place of a task's indices when its worker died, or when some of its samples are known to be bad."""

    indices: Index  # of the task
    bad: dict[int, Failure]  # by position, samples that are not tried
    replay: bool = False  # it was answered before, and is run only for the random state that it leaves
    probe: bool = False  # before it is run, each sample is loaded alone, to see which of them kills
    others: int = 0  # how often the replacement of a sample took too long: then another one is drawn


class SeededTask(NamedTuple):
    """Takes the place of a task's indices where a worker outlives the iterator that it was started for."""

    base_seed: int  # of the iterator that the task is of
    epochs: int  # of the run, before the epoch that the task's record names
    indices: Index  # of the task, or a ``RetryTask``


class LateDataset(Protocol):
    """Says in the middle of an epoch that another dataset makes the same samples, from a cache."""

    def ask(self) -> bool: ...

    def read(self, dataset: MapDataset) -> MapDataset | None: ...


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to know; torch passes the same to its ``_worker_loop``."""

    kind: int  # torch's ``_DatasetKind``
    dataset: Any  # the dataset; copied by fork or pickled
    auto_collation: bool  # whether a task is a list of indices
    collate_fn: Callable[[Any], Batch]  # the loader's collate function
    drop_last: bool  # torch's
    base_seed: int  # drawn by the iterator; a worker's seed is ``base_seed + id``
    init_fn: Callable[[int], None] | None  # called with the worker's id before the first fetch
    num_workers: int  # how many there are, for ``get_worker_info()``
    shared_seed: int | None  # torch's seed for datapipes, else None
    task_seeds: bool  # seed per task instead of per worker
    shared: bool = False  # any free worker takes the next task
    on_error: OnError | None = None  # what to do about samples that fail; None: what torch does
    restart: bool = False  # another worker takes the place of one that died
    sample_timeout: float = 0.0  # seconds that a sample may take; 0: no limit
    # that load samples of a batch at once in a worker process; "auto": where it is safe and pays; None: none, but a
    # ``Staged`` decides for itself
    read_threads: int | str | None = None
    parts: tuple[WorkerPart, ...] = ()  # by worker, where to go on in the middle of an epoch; empty: at its beginning
    part_epochs: int = 0  # epochs of the workers' life before these, for task seeds
    batch_size: int | None = None  # samples in a task of an iterable dataset; None for one without batches
    # a worker sends a stateful dataset's state every ``tell`` of its tasks; 0: of map-style datasets only; -1: never
    tell: int = -1
    look: bool = False  # say whether the first task has moved the worker's random state
    shards: int = 0  # parts of an iterable dataset, where they are not one a worker, or not its own; else 0
    places: tuple[ShardStart, ...] = ()  # where each of these parts was begun, if they were dealt anew among the ranks
    ranks: tuple[int, int] = (0, 1)  # rank of the training process, and how many there are
    late: LateDataset | None = None  # what may come to be used in place of the dataset; None: nothing

    def place(self, part: int) -> ShardStart:
        """Where a part of an iterable dataset was begun. Of a map-style dataset parts are workers."""
        return (
            self.places[part]
            if self.places
            else ShardStart(part, self.shards or self.num_workers, self.base_seed, None)
        )

    @property
    def timed(self) -> bool:
        """Whether each sample's beginning is noted."""
        return self.sample_timeout > 0

    @property
    def saves_rng(self) -> bool:
        """Whether workers save their random state, from which a replacement goes on."""
        return self.restart and not self.task_seeds


class WorkerReply(NamedTuple):
    """A batch, and what its worker reports with it."""

    data: Batch  # the batch, ``Partial`` or not, or an error in its place
    at: int  # batches that this worker has made
    state: bytes | None  # the dataset's, pickled; None: it has no state, or none is due
    moved: bool  # the first task of a resumed worker has moved its random state


class WorkerStatus(NamedTuple):
    """What is known of a worker process that has died."""

    id: int  # the worker's
    pid: int | None  # of the process
    exitcode: int | None  # negative: ended by that signal; None: not known
    current_task: TaskId | None  # the task that it was doing; None: it died between two tasks
    position: Position  # where it was in that task
    rng_checkpoint: TaskId | None  # the task before which its random state was saved; None: never
    nbytes: int  # its memory, as it was measured last; 0: it was not
    ready: bool  # it had started
    stack: str = ""  # where it was when it was killed because a sample took too long; "": it was not killed for that
    leaving: bool = False  # it had been told to leave

    @property
    def timed_out(self) -> bool:
        """It was killed because a sample took too long."""
        return bool(self.stack)


def check_interval_s(sample_timeout: float) -> float:
    """Seconds between two checks whether a sample takes too long."""
    return min(0.5, max(0.01, sample_timeout / 4))


class Result(Protocol):
    """The answer to one task."""

    worker: int
    epoch: int
    task: int
    ended: bool
    times: Times
    nbytes: int  # memory that the batch takes

    def take(self) -> Batch:
        """The batch, or torch's ``ExceptionWrapper``. Once only."""

    def drop(self) -> None:
        """Gives its slot back without delivering it."""


@dataclass(slots=True)
class LocalBatch:
    """A batch made in this process, by a thread or by the consumer, until it is delivered."""

    worker: int
    epoch: int
    task: int
    ended: bool
    times: Times
    nbytes: int
    data: Batch

    def take(self) -> Batch:
        data, self.data = self.data, None
        return data

    def drop(self) -> None:
        self.data = None


class Lost:
    """The answer to a task whose batch cannot be made."""

    ended, nbytes, times = False, 0, (0, 0, 0, 0)

    def __init__(self, worker: int, epoch: int, task: int, error: Exception) -> None:
        self.worker, self.epoch, self.task, self._error = worker, epoch, task, error

    def take(self) -> Batch:
        raise self._error

    def drop(self) -> None:
        pass


class Pool(Protocol):
    """Workers of one kind. ``ahead``: tasks that may be in flight beside those of the workers that the scheduler
    counts."""

    @property
    def ahead(self) -> int: ...

    def submit(self, worker: int | None, task: Task) -> None:
        """Gives a worker a task; None: any worker that is free. Never blocks."""

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        """A new epoch begins for every worker."""

    def retire(self, worker: int) -> None:
        """The worker has no more work in this run; it may leave."""

    def resize(self, n: int) -> None:
        """Changes the number of workers, where tasks are shared. Returns at once: new workers start in the background,
        those that leave finish their current task."""

    def alive(self) -> int:
        """Workers that have not died or been told to leave."""

    def finish(self) -> None:
        """There will be no more tasks. Workers leave when they have answered those that they have."""

    def receive(self, timeout: float | None, worker: int | None = None) -> Result | None:
        """The next result, or None after ``timeout`` seconds. ``timeout``: None: no limit. ``worker``: whose result is
        needed. Results of others may come first, or stay unread until they are needed. Raises WorkerDiedError: a worker
        that was not told to leave is gone."""

    def close(self) -> None:
        """Ends all workers and frees everything. May be called twice; in a forked child it does nothing."""
