"""What a worker does with a task, of whatever kind the worker is: seed, fetch, collate, and what counts as an error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _DatasetKind

from ..core.random_state import RandomState
from ..sampling.generators import Found
from ..sampling.stateful import is_stateful, load_into, pickled_state
from ..sampling.task_seeds import ObjectSeeds
from ..transport.messages import Times
from .collate import SlotCollate
from .exceptions import Caught
from .faults.guard import Guard, Mark
from .fetcher import BatchFetcher, put_back, state_of
from .protocol import RetryTask, WorkerReply, WorkerSpec

FORKED = "Cannot re-initialize CUDA in forked subprocess"  # torch.cuda._lazy_init
REMEDY = (
    "A forked worker cannot use the device. Let the dataset give tensors of the CPU and the loader move them "
    '(device="cuda"); '
    "tensors that lie on the device are gathered by the main process if they are in a TensorDataset; and "
    'multiprocessing_context="spawn" starts workers that may use it.'
)


class TaskRunner:
    """The inside of one worker.

    Args:
        spec: what to do.
        worker: this worker's id.
        dataset: this worker's dataset.
        collate: the collate function with a slot at hand.
        where: "process" or "thread", for errors.
        mark: is told the position of each sample before it is loaded, where that is wanted.
        seed_task: sets the random state that this worker's code sees, from base seed, epoch and task.
        look: what that random state is, to be compared.
        shared: tells the generators in objects that other workers use, too.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        worker: int,
        dataset: Any,
        collate: SlotCollate,
        where: str,
        seed_task: Callable[[int, int, int], None],
        mark: Mark,
        look: Callable[[], Any],
        shared: Callable[[], Found] | None = None,
    ) -> None:
        self.spec, self.id, self.dataset, self.collate = spec, worker, dataset, collate
        self.exhausted = False
        self._where = f"in DataLoader worker {where} {worker}"
        self._seed_task, self._mark, self._look = seed_task, mark, look if spec.look else None
        self._iterable = spec.kind == _DatasetKind.Iterable
        self._made = 0  # batches of this epoch
        self._tells = False
        self._stages: BatchFetcher | None = None
        self._failed: Caught | None = None
        self._shared = shared
        self._own: ObjectSeeds | None = None
        self._shared_rng = torch.Generator()
        self.share_seed(spec.shared_seed)

    def share_seed(self, shared_seed: int | None) -> None:
        """torch's seed that all workers of a datapipe have in common."""
        if isinstance(self.dataset, IterDataPipe) and shared_seed is not None:
            self._shared_rng.manual_seed(shared_seed)
            self.dataset = torch.utils.data.graph_settings.apply_random_seed(self.dataset, self._shared_rng)

    def start(self) -> None:
        """Calls ``worker_init_fn`` and prepares the first epoch. What fails is told with the first task."""
        try:
            if self.spec.init_fn is not None:
                self.spec.init_fn(self.id)
            self.find_generators()  # now: init_fn may have exchanged them, or seeded them as it likes
            self._go_on() if self.spec.parts else self._begin()
        except Exception:
            self._failed = self.error()

    def find_generators(self) -> None:
        """Looks for generators in objects, for task seeds."""
        if self.spec.task_seeds and not self._iterable:
            self._own = ObjectSeeds(self.dataset, self.collate.fn, self._shared)

    def resume(self, shared_seed: int | None) -> None:
        """A new epoch begins."""
        self.exhausted = False
        self._made = 0
        self.share_seed(shared_seed)
        try:
            self._begin()
        except Exception:
            self._failed = self.error()

    def _begin(self) -> None:
        spec = self.spec
        self._stages = BatchFetcher(
            spec.kind,
            self.dataset,
            spec.auto_collation,
            self.collate,
            spec.drop_last,
            spec.on_error,
            self._mark if spec.timed else None,
        )
        inner = self._stages.fetcher.dataset_iter if self._iterable else None
        self._tells = spec.tell >= 0 and (is_stateful(self.dataset) or is_stateful(inner))

    def _go_on(self) -> None:
        """Begins in the middle of an epoch: the dataset's state, its iterator's, and what was made since then."""
        part = self.spec.parts[self.id]
        state = part.state or {"dataset": None, "iterator": None, "ended": False}
        load_into(self.dataset, state["dataset"], "dataset")
        self._begin()
        if not self._iterable:
            return
        assert self._stages is not None
        put_back(self._stages.fetcher, state)
        if part.at < 0:  # of the epoch before: to its end, and then this one
            self._stages.skip(self.spec.batch_size)
            self._begin()
        for self._made in range(max(0, part.at), part.count):
            self._seed(0, 0)
            if not self._stages.skip(self.spec.batch_size):
                break
        self._made = part.count

    def _seed(self, epoch: int, number: int) -> None:
        """Task seeds. Which number a worker's task of an iterable dataset has depends on when others ended; how many it
        made before does not."""
        spec = self.spec
        if spec.task_seeds:
            if self._iterable:
                number = self._made * (spec.shards or spec.num_workers) + self.id
            self._seed_task(spec.base_seed, spec.part_epochs + epoch, number)
            if self._own is not None:
                self._own.seed(spec.base_seed, spec.part_epochs + epoch, number)

    def error(self) -> Caught:
        """The exception at hand."""
        e = sys.exc_info()[1]
        if isinstance(e, RuntimeError) and FORKED in str(e):
            e.args = (f"{e}\n{REMEDY}",)
        part = f"batch {self._made} of this worker" if self._iterable else ""
        return Caught(self._where, self.dataset, part)

    def wants(self, indices: Any) -> bool:
        """Whether a task is run at all: not by one whose iterable dataset has ended."""
        return not self.exhausted

    def run(self, epoch: int, number: int, indices: Any) -> Any:
        """The batch of a task, or the error in its place; in a ``WorkerReply`` where there is more to say.

        Sets ``exhausted`` when an iterable dataset has ended.
        """
        look, self._look = self._look, None
        before = look() if look is not None else None
        data = self._run(epoch, number, indices)
        if self._own is not None and self._own.appeared():
            del data
            self.collate.cancel()
            data = self._run(epoch, number, indices)
        self._made += 1
        if self.exhausted or not (self._tells or look is not None):
            return data
        state = None
        if self._tells and (not self._iterable or (self.spec.tell and self._made % self.spec.tell == 0)):
            state = pickled_state(lambda: state_of(self.dataset, self._stages.fetcher if self._stages else None))
        return WorkerReply(data, self._made, state, look is not None and look() != before)

    def _run(self, epoch: int, number: int, indices: Any) -> Any:
        if self._failed is not None:
            data, self._failed = self._failed, None
            return data
        try:
            if self.spec.task_seeds:
                self._seed(epoch, number)
            if self._stages is None:
                # The reason was told with the first task. torch stumbles over a local it never set, and scripts
                # see that type.
                raise UnboundLocalError("no 'fetcher': this worker failed while it was starting")
            if type(indices) is RetryTask:
                guard = self._stages.watched(self._mark)
                self._tell(guard, epoch, number, indices.others)
                return self._stages.again(guard, indices.indices, indices.bad)
            if self._stages.guard is not None:
                self._tell(self._stages.guard, epoch, number)
            return self._stages.run(indices)
        except Exception as e:
            if isinstance(e, StopIteration) and self.spec.kind == _DatasetKind.Iterable:
                self.exhausted = True
                return None
            return self.error()

    def probe(self, task: RetryTask) -> None:
        """Loads each sample of a task alone. The random state is as it was before."""
        if self._stages is not None:
            before = RandomState()
            self._stages.watched(self._mark).probe(task.indices, task.bad)
            before.restore()

    def _tell(self, guard: Guard, epoch: int, number: int, others: int = 0) -> None:
        spec = self.spec
        reseed = functools.partial(self._seed, epoch, number) if spec.task_seeds else None
        guard.begin(spec.base_seed, spec.part_epochs + epoch, number, reseed, others)

    def times(self, transport_ns: int, cpu_ns: int) -> Times:
        """What the last task cost."""
        stages = self._stages
        return (stages.fetch_ns if stages else 0, stages.collate_ns if stages else 0, transport_ns, cpu_ns)
