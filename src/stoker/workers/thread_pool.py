"""Worker threads: one dataset in memory, nothing pickled, nothing started, batches handed over as they are.

They follow torch's convention for thread workers: ``get_worker_info()`` is right in each, with ``worker_method ==
"thread"`` and ``rng``, random generators of the worker's own.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _DatasetKind

from ..core import processes
from ..core.dataset_tree import file_of
from ..core.errors import SampleTimeoutError, UsageError, WorkerDiedError
from ..core.options import Budget
from ..sampling import seeding
from ..sampling.generators import Found, find_generators, own_copies
from ..sampling.order import Task
from ..sampling.stateful import is_stateful
from ..transport.slots import Locker
from ..transport.thread_slots import HeapWriter
from . import native_threads, rng_watch
from .collate import SlotCollate, sample_size
from .exceptions import Caught
from .faults.sample_name import called
from .protocol import Made, WorkerReply, WorkerSpec, look_s
from .rng_watch import GlobalRngUse
from .task_runner import TaskRunner

if TYPE_CHECKING:
    from .shards import Shards

logger = logging.getLogger(__name__)
WEIGHED = 16  # one of so many batches
FRAMES = 8  # of a stack, the innermost

_current = threading.local()


def _get_worker_info() -> Any:
    return getattr(_stoker_current, "info", _worker_info)  # type: ignore[name-defined]  # noqa: F821  torch's module


def _teach_torch() -> None:
    """``get_worker_info`` then answers per thread. Scripts have imported the function by name, so it is this very
    function that has to know: it keeps its identity and gets other code."""
    torch_worker._stoker_current = _current  # type: ignore[attr-defined]
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


os.register_at_fork(after_in_child=_current.__dict__.clear)  # a child forked by a worker is no worker


class _Died:
    """A worker ended on something that is no Exception."""

    def __init__(self, worker: int, task: tuple[int, int] | None, cause: BaseException) -> None:
        self.worker, self.task, self.cause = worker, task, cause


class _Lane:
    """Work that waits: of one worker, or of all where tasks are shared."""

    def __init__(self) -> None:
        self.work: deque[Any] = deque()
        self.changed = threading.Condition()

    def put(self, item: Any) -> None:
        with self.changed:
            self.work.append(item)
            self.changed.notify()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


def _weigh(batch: Any) -> int:
    try:
        return sample_size(batch)[0]
    except RecursionError:  # it holds itself
        return 0


def _introduce(worker: int, workers: int, seed: int, dataset: Any, rng: seeding.Generators) -> None:
    """What ``get_worker_info()`` says in this thread from now on."""
    _current.info = torch_worker.WorkerInfo(
        id=worker, num_workers=workers, seed=seed, dataset=dataset, rng=rng.as_torch(), worker_method="thread"
    )


class _Worker(threading.Thread):
    def __init__(self, pool: ThreadPool, id_: int, lane: _Lane, dataset: Any, writer: HeapWriter) -> None:
        super().__init__(name=f"stoker_worker_{id_}", daemon=True)
        self.id, self.lane, self.leaving = id_, lane, False
        self._pool, self._dataset, self._spec = pool, dataset, pool.spec
        self.writer = writer
        self._cpu = 0
        self._hand: tuple[int, int] | None = None
        self.task = Task(-1, ())
        self.at = (-1, 0.0)  # another object each time
        self.said = self.at, 0.0  # where it was when it was said to be late, and when to say it again

    def run(self) -> None:
        pool = self._pool
        try:
            self._work()
        except BaseException as e:  # the consumer raises it
            self.leaving = True
            pool.out.put(_Died(self.id, self._hand, e))
        finally:
            _current.__dict__.clear()
            # The pool holds its workers: were it held by them, its batches would wait for the cycle to be collected.
            del self._pool, self._dataset

    def _work(self) -> None:
        native_threads.cap_thread()
        pool, spec = self._pool, self._spec
        seed = spec.base_seed + self.id
        rng = seeding.Generators(spec.base_seed, self.id)
        collate = SlotCollate(spec.collate_fn, self.writer, spec.auto_collation)
        collate.install()
        body: TaskRunner | Shards
        if spec.shards:
            from .shards import Shards

            generators: dict[int, seeding.Generators] = {}

            def seeded(base_seed: int, shard: int) -> int:
                generators[shard] = seeding.Generators(base_seed, shard)
                return base_seed + shard

            def shard_of(shard: int, dataset: Any) -> TaskRunner:
                own = generators[shard]
                return TaskRunner(spec, shard, dataset, collate, "thread", own.seed_task, self.mark, own.state)

            def introduce(shard: int, shards: int, seed: int, dataset: Any) -> None:
                _introduce(shard, shards, seed, dataset, generators[shard])

            body = Shards(spec, self.id, self._dataset, shard_of, introduce, seeded, own_random=True)
        else:
            shared = pool.held
            body = TaskRunner(
                spec, self.id, self._dataset, collate, "thread", rng.seed_task, self.mark, rng.state, shared
            )
            pool.own_generators(body)
            _introduce(self.id, pool.count, seed, body.dataset, rng)
        body.start()
        workers, epoch = pool.count, 0
        self._cpu = time.thread_time_ns()
        while True:
            item = self._wait()
            if item is None:
                return
            if workers != pool.count:
                workers = pool.count
                _introduce(self.id, workers, seed, body.dataset, rng)
            at, what, is_task = item
            if not is_task or (spec.shared and at != epoch):
                epoch = at
                if isinstance(body, TaskRunner) and pool.own_generators(body):
                    body.find_generators()
                    _introduce(self.id, workers, seed, body.dataset, rng)
                body.resume(None if is_task else what)
                if not is_task:
                    continue
            if body.wants(what.indices):
                self._task(body, at, what)

    def mark(self, position: int, samples: int) -> None:
        """Which sample of its task it loads, and until when it may."""
        self.at = position, time.monotonic() + samples * self._spec.sample_timeout if samples else 0.0

    def _wait(self) -> Any:
        """The next piece of work; None: leave."""
        pool, lane = self._pool, self.lane
        with lane.changed:
            while True:
                if self.leaving or pool.closed:
                    return None
                if lane.work:
                    item = lane.work.popleft()
                    if not pool.spec.shared or item[0] == pool.epoch:  # else of an epoch that was left early
                        return item
                elif pool.finishing:
                    return None
                else:
                    lane.changed.wait()

    def _task(self, body: TaskRunner | Shards, epoch: int, task: Task) -> None:
        self._hand, self.task = (epoch, task.number), task
        pool = self._pool
        data = pool.noticed.run(self.id, lambda: body.run(epoch, task.number, task.indices))
        self.at = (-1, 0.0)  # no sample is being loaded any more
        writer = self.writer
        if type(data) is Caught or (type(data) is WorkerReply and type(data.data) is Caught):
            writer.cancel()
        nbytes = writer.used if writer.whole is not None else 0
        body.collate.expected = max(nbytes, body.collate.expected - body.collate.expected // 16)
        writer.sent()
        cpu = time.thread_time_ns()
        times = body.times(0, cpu - self._cpu)
        self._cpu = cpu
        # What lies in no slot is weighed: each batch where one too large is an error, else now and then.
        if not nbytes and (pool.strict or task.number % WEIGHED == 0):
            nbytes = _weigh(data.data if type(data) is WorkerReply else data)
        pool.out.put(Made(self.id, epoch, task.number, body.exhausted, times, nbytes or 1, data))
        self._hand = None


class ThreadPool:
    """Worker threads of one iterator. See ``workers.protocol.Pool``.

    Args:
        spec: what each worker does. A map-style dataset is shared by all; of an iterable one each has a copy.
        budget: how much the consumer may keep in slots.
        noticed: what is known of the loader's use of random generators.
        heaps: memory of an earlier epoch's workers, used again warm; taken out of this list.
        locker: page-locks it.

    Raises:
        UsageError: the dataset says that it is not thread-safe (``thread_safe = False``), or an iterable dataset cannot
            be copied.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        budget: Budget,
        noticed: GlobalRngUse,
        heaps: list[HeapWriter],
        locker: Locker | None = None,
    ) -> None:
        refuse(spec.dataset)
        _teach_torch()
        import numpy.random  # noqa: F401  not in a worker: a fork meanwhile would inherit the lock of its import

        self.spec, self.count = spec, spec.num_workers
        self._locker = locker
        self.strict = budget.strict
        self._heaps, self._heap_bytes = heaps, budget.lease_bytes // max(1, spec.num_workers)
        self.out: queue.SimpleQueue[Made | _Died] = queue.SimpleQueue()
        self.processes: list[_Worker] = []  # torch's iterator calls them so
        self.closed = self.finishing = False
        self.epoch = 0
        self.noticed = noticed
        self._shared = _Lane()
        self._copying = threading.Lock()
        self._owner = os.getpid()
        if spec.kind == _DatasetKind.Map:
            self.held()
            noticed.held_looks = rng_watch.TASKS
        for worker in range(spec.num_workers):
            self._add(worker)

    def held(self) -> Found:
        """Generators in objects that all workers use, as they are now."""
        self.noticed.held = find_generators(self.spec.dataset, self.spec.collate_fn, thread_local=False)
        return self.noticed.held

    def own_generators(self, body: TaskRunner) -> bool:
        """With task seeds, gives a worker its own copy of what leads to generators in objects, as it is now. What
        cannot be copied stays shared, and is named when workers draw from it. Returns whether there is a copy."""
        spec = self.spec
        if not spec.task_seeds or spec.kind != _DatasetKind.Map or is_stateful(spec.dataset) or not self.held():
            return False
        with self._copying:  # not while another one copies the same
            try:
                body.dataset, body.collate.fn = own_copies(spec.dataset, spec.collate_fn)
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
                    f"each worker thread needs a {type(dataset).__name__} of its own, and it cannot be copied "
                    f'({type(e).__name__}: {e}): worker_method="process"'
                ) from e
        writer = self._heaps.pop() if self._heaps else HeapWriter(self._heap_bytes)
        writer.locker = self._locker
        worker = _Worker(self, id_, self._shared if spec.shared else _Lane(), dataset, writer)
        self.processes.append(worker)
        worker.start()

    def grow(self) -> None:
        """One worker more, who gets tasks of its own."""
        self.count += 1
        self._add(len(self.processes))

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

    def submit(self, worker: int | None, epoch: int, task: Task) -> None:
        lane = self._shared if worker is None else self.processes[worker].lane
        lane.put((epoch, task, True))

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        self.epoch = epoch
        if not self.spec.shared:
            for w in self.processes:
                w.lane.put((epoch, shared_seed, False))

    def retire(self, worker: int) -> None:
        self.processes[worker].leaving = True
        self.processes[worker].lane.wake()

    def finish(self) -> None:
        self.finishing = True
        for w in self.processes:
            w.lane.wake()

    def receive(self, timeout: float | None, worker: int | None = None) -> Made | None:
        item = self._get(timeout) if not self.spec.timed else self._timed(timeout)
        self.noticed.say()
        if isinstance(item, _Died):
            hand = item.task
            raise WorkerDiedError(
                f"DataLoader worker (thread {item.worker}) exited unexpectedly: {item.cause!r}",
                [item.worker],
                [hand[1]] if hand is not None and hand[0] == self.epoch else None,
            ) from item.cause
        return item

    def _get(self, timeout: float | None) -> Made | _Died | None:
        try:
            return self.out.get_nowait()
        except queue.Empty:
            pass
        look = self.noticed.looks > 0 and self.noticed.who is None
        before = rng_watch.state() if look else None
        self.noticed.turns += 1
        try:
            return self.out.get(timeout=timeout)
        except queue.Empty:
            return None
        finally:
            self.noticed.turns += 1
            if look:
                self.noticed.looks -= 1
                if rng_watch.state() != before and self.noticed.who is None:
                    self.noticed.who = self.noticed.suspect or "Code in a worker thread"

    def _timed(self, timeout: float | None) -> Made | _Died | None:
        """``_get``, while the others look at the clock.

        Raises:
            SampleTimeoutError: a sample takes longer than ``sample_timeout``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        step = look_s(self.spec.sample_timeout)
        while True:
            left = step if deadline is None else min(step, max(0.0, deadline - time.monotonic()))
            item = self._get(left)
            if item is not None or (deadline is not None and time.monotonic() >= deadline):
                return item
            for w in self.processes:
                at = w.at
                until = w.said[1] if w.said[0] is at else at[1]
                if at[1] and time.monotonic() > until and w.is_alive():
                    words = _stuck(w, at[0], w.task, self.spec)
                    if w.at is at:  # else it has gone on meanwhile
                        w.said = at, time.monotonic() + self.spec.sample_timeout
                        raise SampleTimeoutError(words)

    def pss(self) -> dict[int, int]:
        """Threads have no memory of their own."""
        return {}

    def slots(self) -> int:
        """How many there are now, of all workers."""
        return sum(w.writer.slots for w in self.processes)

    def close(self, leave_s: float = processes.LEAVE_S) -> None:
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        for w in self.processes:
            w.lane.wake()
        deadline = time.monotonic() + leave_s
        for w in self.processes:
            if w is not threading.current_thread():
                w.join(max(0.0, deadline - time.monotonic()))
        self._heaps.extend(w.writer for w in self.processes if not w.is_alive())


def _stuck(worker: _Worker, position: int, task: Task, spec: WorkerSpec) -> str:
    keys = list(task.indices) if spec.auto_collation else [task.indices]
    which = f"one of {str(keys)[:200]}"
    if 0 <= position < len(keys):
        which = called(keys[position], file_of(spec.dataset, keys[position]))
    frame = sys._current_frames().get(worker.ident or 0)
    stack = "".join(traceback.format_stack(frame)[-FRAMES:]) if frame is not None else ""
    return (
        f"{which} is not loaded after sample_timeout={spec.sample_timeout:g} seconds. Threads cannot be killed, so "
        f'this one goes on and its batch comes late or never: worker_method="process" replaces the worker and goes the '
        f"way of on_error. It is here:\n{stack}"
    )


def refuse(dataset: Any) -> None:
    """Raises for a dataset, or one inside it, that says ``thread_safe = False``."""
    inner = [dataset, getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
    for d in inner:
        if d is not None and getattr(d, "thread_safe", None) is False:
            raise UsageError(
                f'{type(d).__name__} says that it is not thread-safe (thread_safe = False): worker_method="process"'
            )
        if d is not None and d is not dataset:
            refuse(d)
