"""Runs a task in any kind of worker: seeds, fetches, collates, and turns an exception into an answer."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _DatasetKind

from ..core.filesystems import reopen
from ..core.nested import is_data
from ..core.random_state import RandomState
from ..core.types import Batch, Index
from ..sampling.generators import Found
from ..sampling.stateful import is_stateful, load_into, pickled_state
from ..sampling.task_seeds import ObjectSeeds
from ..transport.messages import Times
from .collate import SlotCollate
from .exceptions import Caught
from .faults.guard import Guard, OnSampleStart
from .fetcher import BatchFetcher, is_asked_one_by_one, put_back, staged_in, state_of
from .protocol import LateDataset, MakesBatches, Readers, RetryTask, SeededTask, WorkerReply, WorkerSpec
from .read_threads import ReadThreads

FORKED = "Cannot re-initialize CUDA in forked subprocess"  # torch.cuda._lazy_init
REMEDY = (
    "A forked worker cannot use the device. Return CPU tensors from the dataset and let the loader move them "
    '(device="cuda"). If the tensors are in a TensorDataset on the device, the main process indexes it there. '
    'Workers started with multiprocessing_context="spawn" can use the device.'
)
NOT_FORK_SAFE = "This class is not fork-safe"  # fsspec.asyn.AsyncFileSystem.loop
REOPEN = (
    "An fsspec filesystem was opened before this worker was forked, and the thread that serves it does not exist "
    "here. Open it in __getitem__, or store it in an attribute of the dataset: each worker then opens it again."
)


class TaskRunner:
    """Does the tasks of one worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        worker: int,
        dataset: Any,
        collate: SlotCollate,
        where: str,  # "process" or "thread", for errors
        # sets the random state that this worker's code sees, from base seed, epoch and task
        seed_task: Callable[[int, int, int], None],
        look: Callable[[], object],  # returns that random state for comparison
        on_sample_start: OnSampleStart | None = None,  # only in worker processes
        shared: Callable[[], Found] | None = None,  # finds the generators in objects that other workers also use
    ) -> None:
        self.spec = spec
        self.id = worker
        self._place = spec.place(worker)
        self.dataset = dataset
        self.collate = collate
        self.exhausted = False  # the iterable dataset has ended
        self._where = f"in DataLoader worker {where} {worker}"
        self._is_process = where == "process"
        self._seed_task = seed_task
        self._on_sample_start = on_sample_start
        self._look = look if spec.look else None
        self._before: object = None  # what ``look`` returned at the start
        self._iterable = spec.kind == _DatasetKind.Iterable
        self._made = 0  # batches made in this epoch
        self._sends_state = False
        self._fetcher: BatchFetcher | None = None
        self._reads: ReadThreads | None = None  # threads that load samples, kept across epochs
        self._staged: MakesBatches | None = None  # a ``Staged``, which has its own threads
        self._failed: Caught | None = None
        self._shared = shared
        self._late = spec.late
        self._own: ObjectSeeds | None = None
        self._shared_rng = torch.Generator()
        self.share_seed(spec.shared_seed)

    def share_seed(self, shared_seed: int | None) -> None:
        """Applies the seed that all workers of a datapipe share in torch."""
        if isinstance(self.dataset, IterDataPipe) and shared_seed is not None:
            self._shared_rng.manual_seed(shared_seed)
            self.dataset = torch.utils.data.graph_settings.apply_random_seed(self.dataset, self._shared_rng)

    def start(self) -> None:
        """Calls ``worker_init_fn`` and prepares the first epoch. An error becomes the answer to the first task."""
        try:
            if self._is_process:
                reopen(self.dataset)
            if self.spec.init_fn is not None:
                self.spec.init_fn(self._place.worker)
            self.find_generators()  # only now: init_fn may have replaced or seeded them
            self._before = None if self._look is None else self._look()
            self._go_on() if self.spec.parts else self._begin()
        except Exception:
            self._failed = self.error()

    def find_generators(self) -> None:
        if self.spec.task_seeds and not self._iterable:
            self._own = ObjectSeeds(self.dataset, self.collate.fn, self._shared)

    def resume(self, shared_seed: int | None) -> None:
        self.exhausted = False
        self._made = 0
        self.share_seed(shared_seed)
        try:
            self._begin()
        except Exception:
            self._failed = self.error()

    def _begin(self) -> None:
        on_sample_start = self._on_sample_start if self.spec.timed else None
        if self._reads is None and self._is_process:
            self._reads = self._read_threads(on_sample_start)
        self._fetcher = BatchFetcher(self.spec, self.dataset, self.collate, on_sample_start, self._reads)
        inner = self._fetcher.fetcher.dataset_iter if self._fetcher.fetcher is not None else None
        self._sends_state = self.spec.tell >= 0 and (is_stateful(self.dataset) or is_stateful(inner))

    def _read_threads(self, on_wait: OnSampleStart | None) -> ReadThreads | None:
        """Makes the threads that load samples, if samples are requested one by one. A ``Staged`` has its own."""
        asked, dataset = self.spec.read_threads, self.dataset
        self._staged = None if self._iterable else staged_in(dataset)
        if asked is None:
            return None
        if self._staged is not None:
            self._staged.read_threads = asked
        one_by_one = not self._iterable and is_asked_one_by_one(dataset, self.collate.fn, self.spec.auto_collation)
        if asked == 1 or not one_by_one:
            return None
        return ReadThreads(dataset.__getitem__, [dataset], None if asked == "auto" else int(asked), on_wait=on_wait)

    def _go_on(self) -> None:
        """Resumes in the middle of an epoch: restores dataset and iterator states, and skips batches made since."""
        part = self.spec.parts[self.id]
        state = part.state or {"dataset": None, "iterator": None, "ended": False}
        load_into(self.dataset, state["dataset"], "dataset")
        self._begin()
        if not self._iterable:
            return
        assert self._fetcher is not None
        assert self._fetcher.fetcher is not None
        put_back(self._fetcher.fetcher, state)
        if part.at < 0:  # the state is from the epoch before: go to its end, then begin this one
            self._fetcher.skip(self.spec.batch_size)
            self._begin()
        for self._made in range(max(0, part.at), part.count):
            self._seed(0, 0)
            if not self._fetcher.skip(self.spec.batch_size):
                break
        self._made = part.count

    def reseed(self, task: SeededTask) -> bool:
        """Adopts the seeds that came with a task. Returns whether they are those of another iterator."""
        if (task.base_seed, task.epochs) == (self.spec.base_seed, self.spec.part_epochs):
            return False
        self.spec = replace(self.spec, base_seed=task.base_seed, part_epochs=task.epochs)
        self._place = self.spec.place(self.id)
        return True

    def begin_anew(self) -> None:
        """Begins an iterator's first epoch, as ``start`` does, in a worker that was started for an earlier one."""
        try:
            if self.spec.init_fn is not None:
                self.spec.init_fn(self._place.worker)
            self.find_generators()
            staged = staged_in(self.dataset)
            if staged is not None:
                staged.begin_as_forked()
        except Exception:
            self._failed, self._fetcher = self.error(), None

    def _seed(self, epoch: int, number: int) -> None:
        """Sets task seeds. For iterable datasets they depend on how many batches this worker has made, because a task's
        number depends on when other workers end."""
        spec = self.spec
        if spec.task_seeds:
            base_seed = self._place.base_seed
            if self._iterable:
                number = self._made * self._place.workers + self._place.worker
            self._seed_task(base_seed, spec.part_epochs + epoch, number)
            if self._own is not None:
                self._own.seed(base_seed, spec.part_epochs + epoch, number)

    def error(self) -> Caught:
        """Wraps the exception that is being handled."""
        e = sys.exc_info()[1]
        if isinstance(e, RuntimeError) and FORKED in str(e):
            e.args = (f"{e}\n{REMEDY}",)
        elif isinstance(e, RuntimeError) and str(e) == NOT_FORK_SAFE:
            e.args = (f"{e}\n{REOPEN}",)
        part = f"batch {self._made} of this worker" if self._iterable else ""
        return Caught(self._where, self.dataset, part)

    def wants(self, indices: object) -> bool:
        """Whether a task is run at all: not if the iterable dataset has ended."""
        return not self.exhausted

    def run(self, epoch: int, number: int, indices: Index) -> Batch:
        """Makes a task's batch, or returns the error instead; in a ``WorkerReply`` if there is more to report. Sets
        ``exhausted`` when an iterable dataset has ended."""
        if self._late is not None and self._fetcher is not None:
            self._use_late_dataset(self._late)
        look, self._look = self._look, None
        before, self._before = self._before, None
        data = self._run(epoch, number, indices)
        if self._own is not None and self._own.appeared():
            del data
            self.collate.writer.cancel()  # the batch is made again, in the same slot
            data = self._run(epoch, number, indices)
        self._made += 1
        if self.exhausted or not (self._sends_state or look is not None):
            return data
        state = None
        if self._sends_state and (not self._iterable or (self.spec.tell and self._made % self.spec.tell == 0)):
            state = pickled_state(lambda: state_of(self.dataset, self._fetcher.fetcher if self._fetcher else None))
        return WorkerReply(data, self._made, state, look is not None and look() != before)

    def _use_late_dataset(self, late: LateDataset) -> None:
        """Switches to the cached dataset once there is one."""
        before = self.dataset, self._reads
        try:
            dataset = late.read(self.dataset)
            if dataset is None:
                return
            self.dataset, self._reads = dataset, None
            self._begin()
        except Exception:  # the present dataset makes the same samples
            self.dataset, self._reads = before
            self._begin()
        self._late = None

    def _run(self, epoch: int, number: int, indices: Index) -> Batch:
        if self._failed is not None:
            data, self._failed = self._failed, None
            return data
        try:
            if self.spec.task_seeds:
                self._seed(epoch, number)
            if self._fetcher is None:
                # The answer to the first task gave the reason. torch fails here on an unset variable, so scripts see
                # that type.
                raise UnboundLocalError("no 'fetcher': this worker failed while it was starting")
            if type(indices) is RetryTask:
                guard = self._fetcher.guard_with_positions(self._on_sample_start)
                self._begin_guard(guard, epoch, number, indices.others)
                return self._fetcher.retry(guard, indices.indices, indices.bad)
            if self._fetcher.guard is not None:
                self._begin_guard(self._fetcher.guard, epoch, number)
            with self._noting_draws():
                made = self._fetcher.run(indices)
            if self.spec.drew is not None and not _is_data(made):
                self.spec.drew.raise_it()
            return made
        except Exception as e:
            if isinstance(e, StopIteration) and self.spec.kind == _DatasetKind.Iterable:
                self.exhausted = True
                return None
            return self.error()

    @contextlib.contextmanager
    def _noting_draws(self) -> Iterator[None]:
        drew = self.spec.drew
        before = None if drew is None or drew.is_up else RandomState()
        try:
            yield
        finally:
            if drew is not None and before is not None and before.moved():
                drew.raise_it()

    def probe(self, task: RetryTask) -> None:
        """Loads each sample of a task alone. Restores the random state."""
        if self._fetcher is not None:
            before = RandomState()
            self._fetcher.guard_with_positions(self._on_sample_start).probe(task.indices, task.bad)
            before.restore()

    def _begin_guard(self, guard: Guard, epoch: int, number: int, others: int = 0) -> None:
        spec = self.spec
        reseed = functools.partial(self._seed, epoch, number) if spec.task_seeds else None
        guard.begin(spec.base_seed, spec.part_epochs + epoch, number, reseed, others)

    @property
    def reads(self) -> Readers | None:
        """The threads that load samples, if there are any."""
        return self._reads if self._staged is None else self._staged.reads

    @property
    def read_threads(self) -> int:
        """Number of threads that load samples now."""
        return 0 if self.reads is None else self.reads.count

    def times(self, transport_ns: int, cpu_ns: int) -> Times:
        """Returns the times of the last task."""
        fetcher = self._fetcher
        if self.reads is not None:
            cpu_ns += self.reads.take_cpu_ns()
        return (fetcher.fetch_ns if fetcher else 0, fetcher.collate_ns if fetcher else 0, transport_ns, cpu_ns)


def _is_data(batch: Batch) -> bool:
    try:
        return is_data(batch)
    except Exception:  # a list that holds itself
        return False
