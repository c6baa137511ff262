"""The interface between the scheduler and any kind of workers. A new kind is a new file that implements ``Pool``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.types import Batch, Index, MapDataset, Sample
from ..sampling.order import Task
from ..sampling.shard import ShardStart
from ..transport.messages import NO_TIMES, Times
from .collate import CollateFn
from .faults.policy import Failure, OnError

if TYPE_CHECKING:
    from ..sampling.state import WorkerPart
    from .gather import Select


class TaskPhase(enum.IntEnum):
    """What a worker is doing with a task, as far as it reports it."""

    BATCH = 0  # makes the batch
    PROBING = 1  # loads each sample alone, to find the one that kills the worker
    PROBED = 2  # makes the batch, after each sample could be loaded alone


class WorkersUselessError(Exception):
    """Workers that stoker added on its own initiative cannot do their work, so the script's own process goes on without
    them. Never reaches the script."""


class Position(NamedTuple):
    """Where a worker is in its task."""

    phase: TaskPhase
    sample: int | None  # position in the task of the sample being loaded; None: unknown, or all at once

    @classmethod
    def decode(cls, word: int) -> Position:
        """Decodes the word that ``encode_position`` made for the worker's arena."""
        sample = (word & 0xFFFFFFFF) - 1
        return cls(TaskPhase(word >> 32), sample if sample >= 0 else None)


def encode_position(phase: int, sample: int) -> int:
    """Encodes a position as one word of the worker's arena; sample -1 means unknown, or all at once."""
    return phase << 32 | sample + 1


class RetryTask(NamedTuple):
    """Replaces a task's indices when its worker died, or when some of its samples are known to be bad."""

    indices: Index  # of the task
    bad: dict[int, Failure]  # by position, samples that are not tried
    replay: bool = False  # the task was answered before, and is repeated only for its effect on the random state
    probe: bool = False  # first load each sample alone, to see which of them kills the worker
    others: int = 0  # how often a sample's replacement took too long; each time another one is drawn


class SeededTask(NamedTuple):
    """Replaces a task's indices if a worker outlives the iterator that it was started for."""

    base_seed: int  # of the iterator that the task belongs to
    epochs: int  # epochs of the run before those that task records count
    indices: Index  # of the task, or a ``RetryTask``


class LateDataset(Protocol):
    """Announces in the middle of an epoch that another dataset makes the same samples from a cache."""

    is_here: bool  # to an iterator without workers

    def ask(self) -> bool: ...
    def read(self, dataset: MapDataset) -> MapDataset | None: ...


class Helpers(Protocol):
    """Processes that make parts of coming batches beside the workers: ``staging.fill_ahead``."""

    def ask(self, indices: Index) -> None: ...
    def close(self) -> None: ...


class ProcessContext(Protocol):
    """A multiprocessing context."""

    @property
    def Process(self) -> Callable[..., BaseProcess]: ...


class Readers(Protocol):
    """Threads that load samples: ``read_threads.ReadThreads``."""

    @property
    def count(self) -> int: ...
    def take_cpu_ns(self) -> int: ...


class MakesBatches(Protocol):
    """A map-style dataset that makes its own batches: ``staging.Staged``."""

    augment_batch: Callable[[Batch], Batch] | None
    read_threads: int | str

    @property
    def reads(self) -> Readers | None: ...
    def begin_as_forked(self) -> None: ...
    def _begin(self, forks_are_same: bool = False) -> None: ...
    def make(self, indices: Sequence[Index]) -> list[Sample]: ...
    def _no_batch(self) -> None: ...
    def _stoker_batches(self, collate: CollateFn, select: Select, plain: bool) -> Callable[[list[Index]], Batch]: ...


class SharedFlag(Protocol):
    """A flag that any process may raise, and none lowers: ``staging.store.memory.Flag``."""

    @property
    def is_up(self) -> bool: ...
    def raise_it(self) -> None: ...


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to know, like the arguments of torch's ``_worker_loop``."""

    kind: int  # torch's ``_DatasetKind``
    dataset: Any  # the dataset; copied by fork or pickled
    auto_collation: bool  # whether a task is a list of indices
    collate_fn: CollateFn  # the loader's collate function
    drop_last: bool  # torch's
    base_seed: int  # drawn by the iterator; a worker's seed is ``base_seed + id``
    init_fn: Callable[[int], None] | None  # called with the worker's id before the first fetch
    num_workers: int  # for ``get_worker_info()``
    shared_seed: int | None  # torch's seed for datapipes, else None
    task_seeds: bool  # seed per task instead of per worker
    shared: bool = False  # any free worker takes the next task
    on_error: OnError | None = None  # policy for samples that fail; None for torch's behaviour
    restart: bool = False  # replace dead workers
    sample_timeout: float = 0.0  # seconds that a sample may take; 0 for no limit
    # threads per worker process that load samples of a batch concurrently; "auto": if it is safe and pays; None: none,
    # but a ``Staged`` decides for itself
    read_threads: int | str | None = None
    parts: tuple[WorkerPart, ...] = ()  # by worker, where to resume in the middle of an epoch; empty: at its beginning
    part_epochs: int = 0  # epochs before those that these workers count, for task seeds
    batch_size: int | None = None  # samples in a task of an iterable dataset; None if it is not batched
    # a worker sends a stateful dataset's state every ``tell`` of its tasks; 0: of map-style datasets only; -1: never
    tell: int = -1
    look: bool = False  # report whether the first task moved the worker's random state
    shards: int = 0  # number of parts of an iterable dataset, unless each worker has exactly its own; else 0
    places: tuple[ShardStart, ...] = ()  # where each part started, if parts were redistributed among the ranks
    ranks: tuple[int, int] = (0, 1)  # rank of the training process, and number of ranks
    late: LateDataset | None = None  # may later replace the dataset; None: nothing will
    drew: SharedFlag | None = None  # raised if a batch draws or is not data; None: nobody asks
    # the workers may serve later iterators, for each of which they begin anew; see ``loader.kept_workers``
    kept: bool = False
    # eventfd(2), a semaphore with a token for each worker while they wait for the loader's next iterator; -1: none
    tokens: int = -1

    def place(self, part: int) -> ShardStart:
        """Returns where a part of an iterable dataset started. For a map-style dataset, parts are workers."""
        if self.places:
            return self.places[part]
        return ShardStart(part, self.shards or self.num_workers, self.base_seed, None)

    @property
    def timed(self) -> bool:
        """Whether workers record when each sample's loading starts."""
        return self.sample_timeout > 0

    @property
    def saves_rng(self) -> bool:
        """Whether workers save their random state for a replacement to start from."""
        return self.restart and not self.task_seeds


class WorkerReply(NamedTuple):
    """A batch with its worker's report."""

    data: Batch  # the batch, possibly a ``Partial``, or an error instead
    at: int  # batches that this worker has made
    state: bytes | None  # the dataset's pickled state; None if it has no state, or none is due
    moved: bool  # the first task of a resumed worker moved its random state


@dataclass(slots=True, eq=False)
class Result:
    """The answer to one task."""

    worker: int
    epoch: int
    task: int
    ended: bool
    times: Times
    nbytes: int  # memory that the batch takes
    data: Batch  # or what it is made from

    def take(self) -> Batch:
        """Returns the batch, or torch's ``ExceptionWrapper``. May be called only once."""
        data, self.data = self.data, None
        return data

    def drop(self) -> None:
        """Frees the batch's slot without delivering the batch."""
        self.data = None


class LocalBatch(Result):
    """An undelivered batch that is in this process: made by a thread or by the consumer, or pinned."""


class Lost(Result):
    """The answer to a task whose batch cannot be made."""

    def __init__(self, worker: int, epoch: int, task: int, error: Exception) -> None:
        super().__init__(worker, epoch, task, False, NO_TIMES, 0, error)

    def take(self) -> Batch:
        raise self.data


class Pool(Protocol):
    """Workers of one kind."""

    @property
    def ahead(self) -> int:
        """Tasks that may be in flight in addition to those of the workers that the scheduler counts."""

    def submit(self, worker: int | None, task: Task) -> None:
        """Gives a task to a worker, or to any free one if ``worker`` is None. Never blocks."""

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        """Begins a new epoch in every worker."""

    def retire(self, worker: int) -> None:
        """Tells a worker that there is no more work for it, so it may leave."""

    def resize(self, n: int) -> None:
        """Changes the number of workers, if tasks are shared. Returns at once: new workers start in the background, and
        leaving ones finish their current task."""

    def alive(self) -> int:
        """Returns the number of workers that have neither died nor been told to leave."""

    def finish(self) -> None:
        """Announces that there will be no more tasks. Workers leave once they have answered those they have."""

    def receive(self, timeout: float | None, worker: int | None = None) -> Result | None:
        """Returns the next result, or None after ``timeout`` seconds (None: no limit). ``worker`` is the one whose
        result is needed. Others' results may come first, or stay unread until they are needed. Raises WorkerDiedError
        if a worker that was not told to leave is gone."""

    def close(self) -> None:
        """Ends all workers and frees everything. May be called twice; does nothing in a forked child."""
