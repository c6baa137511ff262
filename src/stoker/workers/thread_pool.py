"""A pool of worker threads: one dataset in memory, nothing pickled, no process started, batches handed over as is.

1. consumer, ``submit``: appends a task to a ``_TaskQueue``: the worker's own, or the common one if tasks are shared.
2. worker thread, ``_ThreadWorker``: waits for a task, makes the batch in a slot, and puts a ``LocalBatch`` into the
   pool's queue of results.
3. consumer, ``receive``: takes it, or raises the error that ended a worker.

Threads follow torch's convention for thread workers: ``get_worker_info()`` is correct in each, with ``worker_method ==
"thread"`` and ``rng``, the worker's own random generators.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _DatasetKind

from ..core import processes
from ..core.errors import UsageError, WorkerDiedError, one_line
from ..core.options import Budget
from ..core.types import Batch
from ..sampling import seeding
from ..sampling.generators import Found, find_generators, own_copies
from ..sampling.order import Task
from ..sampling.shard import ShardStart
from ..sampling.stateful import is_stateful
from ..transport.slots import PageLocker
from ..transport.thread_slots import HeapWriter
from . import native_threads
from .collate import SlotCollate, sample_size
from .exceptions import is_error
from .protocol import LocalBatch, WorkerReply, WorkerSpec
from .rng_watch import GlobalRngUse
from .task_runner import TaskRunner

if TYPE_CHECKING:
    from .shards import Shards

logger = logging.getLogger(__name__)
MEASURED_EVERY = 16  # batches, of which the size of one is measured

_current = threading.local()


def _get_worker_info() -> object:
    return getattr(_stoker_current, "info", _worker_info)  # type: ignore[name-defined]  # noqa: F821  torch's module


def _patch_get_worker_info() -> None:
    """Makes ``get_worker_info`` answer per thread. Scripts may have imported the function by name, so its code is
    replaced and the function object stays."""
    torch_worker._stoker_current = _current  # type: ignore[attr-defined]
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


os.register_at_fork(after_in_child=_current.__dict__.clear)  # a child forked by a worker is not a worker


class _Died(NamedTuple):
    """A worker ended with something other than an ``Exception``."""

    worker: int
    task: Task | None  # the task that it was doing
    cause: BaseException


class _Resume(NamedTuple):
    """A new epoch begins."""

    epoch: int
    shared_seed: int | None


class _TaskQueue:
    """Waiting tasks, of one worker or, if tasks are shared, of all."""

    def __init__(self) -> None:
        self.items: deque[Task | _Resume] = deque()
        self.changed = threading.Condition()

    def put(self, item: Task | _Resume) -> None:
        with self.changed:
            self.items.append(item)
            self.changed.notify()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


def _size_of(batch: Batch) -> int:
    try:
        return sample_size(batch)[0]
    except RecursionError:  # it contains itself
        return 0


def _set_worker_info(worker: int, workers: int, seed: int, dataset: Any, rng: seeding.Generators) -> None:
    """Sets what ``get_worker_info()`` returns in this thread from now on."""
    _current.info = torch_worker.WorkerInfo(
        id=worker, num_workers=workers, seed=seed, dataset=dataset, rng=rng.as_torch(), worker_method="thread"
    )


class _ThreadWorker(threading.Thread):
    """One worker thread."""

    def __init__(self, pool: ThreadPool, id_: int, queue: _TaskQueue, dataset: object, writer: HeapWriter) -> None:
        super().__init__(name=f"stoker_worker_{id_}", daemon=True)
        self.id = id_  # of the worker
        self.queue = queue  # where its tasks come from
        self.leaving = False  # it has been told to leave
        self.writer = writer  # its slots
        self.task: Task | None = None  # the task that it is doing
        self._pool = pool
        self._dataset = dataset
        self._spec = pool.spec
        self._cpu = 0

    def run(self) -> None:
        pool = self._pool
        try:
            self._work()
        except BaseException as e:  # the consumer raises it
            self.leaving = True
            pool.results.put(_Died(self.id, self.task, e))
        finally:
            _current.__dict__.clear()
            # The pool refers to its workers. A reference back would form a cycle, and batches would be freed with it.
            del self._pool, self._dataset

    def _work(self) -> None:
        native_threads.cap_thread()
        pool, spec = self._pool, self._spec
        seed = spec.base_seed + self.id
        rng = seeding.Generators(spec.base_seed, self.id)
        collate = self._collate = SlotCollate(spec.collate_fn, self.writer, spec.auto_collation)
        collate.install()
        runner: TaskRunner | Shards
        if spec.shards:
            runner = self._shards(collate)
        else:
            shared = pool.find_shared_generators
            runner = TaskRunner(
                spec, self.id, self._dataset, collate, "thread", rng.seed_task, rng.state, shared=shared
            )
            pool.copy_generators(runner)
            _set_worker_info(self.id, pool.count, seed, runner.dataset, rng)
        runner.start()
        workers, epoch = pool.count, 0
        self._cpu = time.thread_time_ns()
        while (item := self._next()) is not None:
            if isinstance(runner, TaskRunner) and workers != pool.count:
                workers = pool.count
                _set_worker_info(self.id, workers, seed, runner.dataset, rng)
            if isinstance(item, _Resume) or (spec.shared and item.epoch != epoch):
                epoch = item.epoch
                if isinstance(runner, TaskRunner) and pool.copy_generators(runner):
                    runner.find_generators()
                    _set_worker_info(self.id, workers, seed, runner.dataset, rng)
                runner.resume(item.shared_seed if isinstance(item, _Resume) else None)
            if isinstance(item, Task) and runner.wants(item.indices):
                self._answer(runner, item)

    def _shards(self, collate: SlotCollate) -> Shards:
        """Makes several parts of an iterable dataset, each with its own generators."""
        from .shards import Shards

        spec = self._spec
        places = [spec.place(part) for part in range(spec.shards)]
        own = [seeding.Generators(place.base_seed, place.worker) for place in places]

        def shard_of(shard: int, dataset: object) -> TaskRunner:
            rng = own[shard]
            return TaskRunner(spec, shard, dataset, collate, "thread", rng.seed_task, rng.state)

        def set_part_info(part: int, place: ShardStart, dataset: object) -> None:
            _set_worker_info(place.worker, place.workers, place.base_seed + place.worker, dataset, own[part])

        return Shards(spec, self.id, self._dataset, shard_of, set_part_info, seed=None)

    def _next(self) -> Task | _Resume | None:
        pool, queue = self._pool, self.queue
        with queue.changed:
            while True:
                if self.leaving or pool.closed:
                    return None
                if queue.items:
                    item = queue.items.popleft()
                    if not pool.spec.shared or item.epoch == pool.epoch:  # else from an epoch that was left early
                        return item
                elif pool.finishing:
                    return None
                else:
                    queue.changed.wait()

    def _answer(self, runner: TaskRunner | Shards, task: Task) -> None:
        self.task = task
        pool = self._pool
        data = pool.rng_use.run(self.id, lambda: runner.run(*task))
        if is_error(data):
            self.writer.cancel()
        nbytes = self._collate.finish()
        cpu = time.thread_time_ns()
        times = runner.times(0, cpu - self._cpu)
        self._cpu = cpu
        # Batches outside slots are measured: all of them if exceeding the budget is an error, else now and then.
        if not nbytes and (pool.strict or task.number % MEASURED_EVERY == 0):
            nbytes = _size_of(data.data if type(data) is WorkerReply else data)
        pool.results.put(LocalBatch(self.id, task.epoch, task.number, runner.exhausted, times, nbytes or 1, data))
        self.task = None


class ThreadPool:
    """The worker threads of one iterator. They share a map-style dataset; each gets a copy of an iterable one. Raises
    UsageError if that cannot be copied. See ``workers.protocol.Pool``."""

    ahead = 0

    def __init__(
        self,
        spec: WorkerSpec,
        budget: Budget,
        rng_use: GlobalRngUse,
        heaps: list[HeapWriter],  # memory of an earlier epoch's workers, reused while warm, and removed from this list
        locker: PageLocker | None = None,
    ) -> None:
        _patch_get_worker_info()
        self.spec = spec
        self.count = spec.num_workers
        self.strict = budget.strict
        self.results: queue.SimpleQueue[LocalBatch | _Died] = queue.SimpleQueue()
        self.processes: list[_ThreadWorker] = []  # named as in torch's iterator
        self.closed = False
        self.finishing = False
        self.epoch = 0
        self.rng_use = rng_use
        self._locker = locker
        self._heaps = heaps
        self._heap_bytes = budget.lease_bytes // max(1, spec.num_workers)
        self._shared = _TaskQueue()
        self._copying = threading.Lock()
        self._owner = os.getpid()
        if spec.kind == _DatasetKind.Map:
            self.find_shared_generators()
        for worker in range(spec.num_workers):
            self._add(worker)

    def find_shared_generators(self) -> Found:
        """Returns the generators that are now in objects that all workers use."""
        self.rng_use.share(find_generators(self.spec.dataset, self.spec.collate_fn, thread_local=False))
        return self.rng_use.shared

    def copy_generators(self, runner: TaskRunner) -> bool:
        """With task seeds, gives a worker its own copy of the objects that lead to generators. If these cannot be
        copied, they stay shared and are reported when workers draw from them. Returns whether a copy was made."""
        spec = self.spec
        may_copy = spec.task_seeds and spec.kind == _DatasetKind.Map and not is_stateful(spec.dataset)
        if not may_copy or not self.find_shared_generators():
            return False
        with self._copying:  # not while another worker copies the same objects
            try:
                runner.dataset, runner.collate.fn = own_copies(spec.dataset, spec.collate_fn)
            except Exception as e:
                logger.info("All worker threads share the dataset, because it cannot be copied: %s", e)
                return False
        return True

    def _add(self, id_: int) -> None:
        spec = self.spec
        dataset = spec.dataset
        if spec.kind == _DatasetKind.Iterable:
            try:
                dataset = copy.deepcopy(dataset)
            except Exception as e:
                raise UsageError(
                    f"each worker thread needs its own {type(dataset).__name__}, which cannot be copied "
                    f'({one_line(e)}). Use worker_method="process"'
                ) from e
        writer = self._heaps.pop() if self._heaps else HeapWriter(self._heap_bytes)
        writer.locker = self._locker
        worker = _ThreadWorker(self, id_, self._shared if spec.shared else _TaskQueue(), dataset, writer)
        self.processes.append(worker)
        worker.start()

    def resize(self, n: int) -> None:
        if self.closed or self.finishing:
            return
        self.count = n
        stay = [w for w in self.processes if not w.leaving]
        for w in stay:
            w.leaving = w.id >= n
        self._shared.wake()
        self.processes[:] = [w for w in self.processes if w.is_alive()]
        for id_ in sorted(set(range(n)) - {w.id for w in stay}):
            self._add(id_)

    def alive(self) -> int:
        return sum(w.is_alive() and not w.leaving for w in self.processes)

    def submit(self, worker: int | None, task: Task) -> None:
        queue = self._shared if worker is None else self.processes[worker].queue
        queue.put(task)

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        self.epoch = epoch
        if not self.spec.shared:
            for w in self.processes:
                w.queue.put(_Resume(epoch, shared_seed))

    def retire(self, worker: int) -> None:
        self.processes[worker].leaving = True
        self.processes[worker].queue.wake()

    def finish(self) -> None:
        self.finishing = True
        for w in self.processes:
            w.queue.wake()

    def receive(self, timeout: float | None, worker: int | None = None) -> LocalBatch | None:
        try:
            item = self.results.get(timeout=timeout)
        except queue.Empty:
            return None
        self.rng_use.report()
        if isinstance(item, _Died):
            lost = [] if item.task is None or item.task.epoch != self.epoch else [item.task.number]
            text = f"DataLoader worker (thread {item.worker}) exited unexpectedly: {item.cause!r}"
            raise WorkerDiedError(text, [item.worker], lost or None) from item.cause
        return item

    def pss(self) -> dict[int, int]:
        """Empty: threads have no memory of their own."""
        return {}

    def read_threads(self) -> int:
        """0: each worker is a thread, and loads one sample at a time."""
        return 0

    def slots(self) -> int:
        """Returns the present number of slots of all workers."""
        return sum(w.writer.slots for w in self.processes)

    def close(self, leave_s: float = processes.LEAVE_S) -> None:
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        for w in self.processes:
            w.queue.wake()
        deadline = time.monotonic() + leave_s
        for w in self.processes:
            if w is not threading.current_thread():
                w.join(max(0.0, deadline - time.monotonic()))
        self._heaps.extend(w.writer for w in self.processes if not w.is_alive())
