"""The border between the scheduler and whatever runs its tasks. A new kind of worker is one new file behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.errors import StokerError
from ..sampling.order import Task
from ..transport.messages import Times
from .faults.policy import Failure, OnError

if TYPE_CHECKING:
    from ..sampling.state import Part

# Where a worker is in a task that is watched (``Arena.at``): 0 unknown, 1 in the batch as a whole, 2 and more a sample,
# by its position; and one of these, where the task is an ``RetryTask`` that is to be probed.
PROBING = 1 << 32  # samples are loaded alone
PROBED = 1 << 33  # they could be


class RetryTask(NamedTuple):
    """Indices of a task whose worker died, or of one with samples that are known to be bad. Goes where indices go.

    Attributes:
        indices: of the task.
        bad: by position, what is not to be tried.
        replay: it was answered before, and is run only for the random state that it leaves.
        probe: before it is run, each sample is loaded alone and let go, to see which of them kills.
        others: how often what replaced a sample took too long: then another one is drawn.
    """

    indices: Any
    bad: dict[int, Failure]
    replay: bool = False
    probe: bool = False
    others: int = 0


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
        parts: by worker, where to go on in the middle of an epoch; empty: at its beginning.
        part_epochs: epochs of the workers' life before these, for task seeds.
        batch_size: samples in a task of an iterable dataset; None for one without batches.
        tell: how often workers say a stateful dataset's state: every so many of their tasks; 0 never, -1 not even
            where samples go by index.
        look: say whether the first task has moved the worker's random state.
        shards: parts of an iterable dataset, where they are not one a worker; else 0.
        on_error: what to do about samples that fail; None: torch's way.
        restart: another worker takes the place of one that died.
        sample_timeout: seconds that a sample may take; 0: as long as it likes.
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
    def keeps(self) -> bool:
        """Whether workers note their random state, which a replacement goes on from."""
        return self.restart and not self.task_seeds


class WorkerReply(NamedTuple):
    """A batch, and what its worker says beside it.

    Attributes:
        data: the batch, ``Partial`` or not, or an error in its place.
        at: batches that this worker has made.
        state: the dataset's, pickled; None where it has none, or none is due.
        moved: the first task of a resumed worker has moved its random state.
    """

    data: Any
    at: int
    state: bytes | None
    moved: bool


class Life(NamedTuple):
    """What is known of a worker process that has ended, or hangs.

    Attributes:
        id: the worker's.
        pid: of the process.
        exitcode: negative: ended by that signal; None: it runs.
        hand: epoch and number of the task that it had; None between two tasks.
        at: where it was in that (``PROBING``, ``PROBED``), and since when.
        kept: epoch and number of the task before which its random state was noted.
        nbytes: its memory, as it was measured last; 0: it was not.
        serving: it had started.
        hung: it was killed because it took too long over a sample: its stack; else "".
        leaving: it had been told to leave.
    """

    id: int
    pid: int | None
    exitcode: int | None
    hand: tuple[int, int] | None
    at: tuple[int, int]
    kept: tuple[int, int] | None
    nbytes: int
    serving: bool
    hung: str = ""
    leaving: bool = False


def look_s(sample_timeout: float) -> float:
    """Seconds between two looks at whether a sample takes too long."""
    return min(0.5, max(0.01, sample_timeout / 4))


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


class Made:
    """A batch of this process, kept until it is delivered."""

    __slots__ = ("_data", "ended", "epoch", "nbytes", "task", "times", "worker")

    def __init__(self, worker: int, epoch: int, task: int, ended: bool, times: Times, nbytes: int, data: Any) -> None:
        self.worker, self.epoch, self.task = worker, epoch, task
        self.ended, self.times, self.nbytes, self._data = ended, times, nbytes, data

    def take(self) -> Any:
        data, self._data = self._data, None
        return data

    def drop(self) -> None:
        self._data = None


class Lost:
    """Stands for a batch that cannot be had."""

    ended, nbytes, times = False, 0, (0, 0, 0, 0)

    def __init__(self, worker: int, epoch: int, task: int, error: StokerError) -> None:
        self.worker, self.epoch, self.task, self._error = worker, epoch, task, error

    def take(self) -> Any:
        raise self._error

    def drop(self) -> None:
        pass


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
