"""What the scheduler and workers of any kind agree on. A new kind of worker is a new file that implements ``Pool``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.errors import StokerError
from ..core.types import Batch, Index
from ..sampling.order import Task
from ..transport.arena import TaskId
from ..transport.messages import Times
from .faults.policy import Failure, OnError

if TYPE_CHECKING:
    from ..sampling.state import Part


class Phase(enum.IntEnum):
    """What a worker does with a task, as far as it says so."""

    BATCH = 0  # makes the batch
    PROBING = 1  # loads each sample alone, to find the one that kills
    PROBED = 2  # makes the batch; each sample could be loaded alone


class Position(NamedTuple):
    """Where a worker is in its task.

    Attributes:
        phase: what it does with the task.
        sample: which sample of the task it loads; None: not known, or all at once.
    """

    phase: Phase
    sample: int | None

    @classmethod
    def decode(cls, word: int) -> Position:
        """Of the word in the worker's arena, which ``encode_position`` made."""
        sample = (word & 0xFFFFFFFF) - 1
        return cls(Phase(word >> 32), sample if sample >= 0 else None)


def encode_position(phase: int, sample: int) -> int:
    """A position as one word of the worker's arena; a sample of -1: not known, or all at once."""
    return phase << 32 | sample + 1


class RetryTask(NamedTuple):
    """Takes the place of a task's indices when its worker died, or when some of its samples are known to be bad.

    Attributes:
        indices: of the task.
        bad: by position, samples that are not tried.
        replay: it was answered before, and is run only for the random state that it leaves.
        probe: before it is run, each sample is loaded alone, to see which of them kills.
        others: how often the replacement of a sample took too long: then another one is drawn.
    """

    indices: Index
    bad: dict[int, Failure]
    replay: bool = False
    probe: bool = False
    others: int = 0


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to know; torch passes the same to its ``_worker_loop``.

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
        parts: by worker, where to go on in the middle of an epoch; empty: at its beginning.
        part_epochs: epochs of the workers' life before these, for task seeds.
        batch_size: samples in a task of an iterable dataset; None for one without batches.
        tell: a worker sends a stateful dataset's state every ``tell`` of its tasks; 0: of map-style datasets only;
            -1: never.
        look: say whether the first task has moved the worker's random state.
        shards: parts of an iterable dataset, where they are not one a worker; else 0.
        on_error: what to do about samples that fail; None: what torch does.
        restart: another worker takes the place of one that died.
        sample_timeout: seconds that a sample may take; 0: no limit.
    """

    kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Batch]
    drop_last: bool
    base_seed: int
    init_fn: Callable[[int], None] | None
    num_workers: int
    shared_seed: int | None
    task_seeds: bool
    shared: bool = False
    on_error: OnError | None = None
    restart: bool = False
    sample_timeout: float = 0.0
    parts: tuple[Part, ...] = ()
    part_epochs: int = 0
    batch_size: int | None = None
    tell: int = -1
    look: bool = False
    shards: int = 0

    @property
    def timed(self) -> bool:
        """Whether each sample's beginning is noted."""
        return self.sample_timeout > 0

    @property
    def saves_rng(self) -> bool:
        """Whether workers save their random state, from which a replacement goes on."""
        return self.restart and not self.task_seeds


class WorkerReply(NamedTuple):
    """A batch, and what its worker reports with it.

    Attributes:
        data: the batch, ``Partial`` or not, or an error in its place.
        at: batches that this worker has made.
        state: the dataset's, pickled; None: it has no state, or none is due.
        moved: the first task of a resumed worker has moved its random state.
    """

    data: Batch
    at: int
    state: bytes | None
    moved: bool


class WorkerStatus(NamedTuple):
    """What is known of a worker process that has died.

    Attributes:
        id: the worker's.
        pid: of the process.
        exitcode: negative: ended by that signal; None: not known.
        current_task: the task that it was doing; None: it died between two tasks.
        position: where it was in that task.
        rng_checkpoint: the task before which its random state was saved; None: never.
        nbytes: its memory, as it was measured last; 0: it was not.
        ready: it had started.
        stack: where it was when it was killed because a sample took too long; "": it was not killed for that.
        leaving: it had been told to leave.
    """

    id: int
    pid: int | None
    exitcode: int | None
    current_task: TaskId | None
    position: Position
    rng_checkpoint: TaskId | None
    nbytes: int
    ready: bool
    stack: str = ""
    leaving: bool = False

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
class Made:
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

    def __init__(self, worker: int, epoch: int, task: int, error: StokerError) -> None:
        self.worker, self.epoch, self.task, self._error = worker, epoch, task, error

    def take(self) -> Batch:
        raise self._error

    def drop(self) -> None:
        pass


class Pool(Protocol):
    """Workers of one kind."""

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
        """The next result, or None after ``timeout`` seconds.

        Args:
            timeout: None: no limit.
            worker: whose result is needed. Results of others may come first, or stay unread until they are needed.

        Raises:
            WorkerDiedError: a worker that was not told to leave is gone.
        """

    def close(self) -> None:
        """Ends all workers and frees everything. May be called twice, and by any process: a forked child's call does
        nothing."""
