"""``iter(loader)`` with workers: an iterator of torch's class in front of the scheduler.

The base class is torch's own, so samplers start and seeds are drawn in torch's order.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _sharding_worker_init_fn,
)

from ..core import packages
from ..core.errors import StateError, UsageError, one_line
from ..core.fingerprint import Fingerprint
from ..core.handles import opened
from ..core.metrics import LoaderMetrics
from ..core.nested import pin
from ..core.options import AutoWorkers, Knobs
from ..core.picklable import culprit
from ..core.processes import method_of
from ..core.types import Batch, Index, JsonObject, LoaderLike
from ..core.warn import warn_user
from ..sampling.shard import READ_HERE
from ..sampling.stateful import is_stateful, load_into, pickled_state
from ..transport.task_queue import supported
from ..workers.faults.policy import NOTHING, Partial
from ..workers.fetcher import state_of
from ..workers.process_pool import ProcessPool
from ..workers.protocol import Helpers, Pool, ProcessContext, WorkerReply, WorkerSpec, WorkersUselessError
from ..workers.restart import Restarts  # not later: its import would compete with the workers for cores
from ..workers.start_pool import start
from .kept_workers import KeptWorkers
from .memory_pressure import MemoryPressure, shrink
from .pin_thread import PinnedPool
from .pool_plan import Partition, PoolPlan
from .scheduler import MakeBatch, Scheduler, Tuner
from .torch_messages import torch_message

if TYPE_CHECKING:
    from ..sampling.cursor import Cursor
    from ..sampling.state import WorkerPart
    from ..transport.slots import SlotReader
    from ..transport.thread_slots import HeapWriter
    from ..workers.thread_pool import ThreadPool

_profiling = torch._C._autograd._profiler_enabled


class PoolIter(_BaseDataLoaderIter):
    """Iterates over a loader whose samples come from workers."""

    def __init__(self, loader: LoaderLike, cursor: Cursor, metrics: LoaderMetrics, plan: PoolPlan) -> None:
        self._process = os.getpid()
        self._cursor = cursor
        self._metrics = metrics
        self._locker = plan.locker
        self._late = plan.late
        self._draws_late = plan.draws_late
        self._helpers = plan.helpers
        self._error_log = None if plan.faults is None else plan.faults[1]
        self._warned_of_seeds = False
        saved = cursor.saved
        self._first_epoch = 0 if saved is None else saved.epoch
        with cursor.preserve_rng():
            super().__init__(loader)  # type: ignore[arg-type]
        prefetch = loader.prefetch_factor
        if plan.standby is not None:
            self._num_workers, prefetch = plan.standby
        elif not prefetch:
            raise AssertionError(torch_message(_MultiProcessingDataLoaderIter.__init__, "prefetch_factor"))
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        cursor.one_dataset = plan.thread_rng is not None and not self._iterable
        cursor.lives_on = loader.persistent_workers or cursor.one_dataset
        count = plan.saved_parts or int(self._num_workers)
        partition = Partition(count, min(count, int(self._num_workers)), () if saved is None else saved.places)
        self.ends_with_epoch = bool(partition.places)
        parts = self._resume_dataset(loader, partition)
        self._warn_idle(partition)
        knobs = self._knobs_of(loader, partition, int(prefetch or 1), plan)
        spec = self._spec_of(loader, knobs, partition, parts, plan)
        workers, kept, spec = self._workers_for(loader, spec, plan)
        if spec.num_workers < partition.workers:
            try:
                knobs = replace(knobs, num_workers=self._take_fewer(spec, partition, bool(parts)))
            except BaseException:
                workers.close()
                raise
        self._schedule(workers, kept, spec, knobs, plan)
        stays = loader.persistent_workers and not cursor.one_dataset
        # shared memory is excluded: workers see its changes
        self._fingerprint = Fingerprint(self._dataset, shared=False) if stays else None
        self._reset(loader, first_iter=True)

    def _resume_dataset(self, loader: LoaderLike, partition: Partition) -> tuple[WorkerPart, ...]:
        """Restores the state of a dataset that all workers share. Returns the parts that workers resume themselves."""
        cursor = self._cursor
        cursor.adopt_seeds(self)
        parts: tuple[WorkerPart, ...] = ()
        if cursor.saved is not None:
            cursor.saved.check_worker_can_read()
            parts = cursor.saved_parts(1 if cursor.one_dataset else partition.parts)
        if cursor.one_dataset:
            if parts:
                load_into(self._dataset, parts[0].dataset_state, "dataset")
            parts = ()
            if getattr(loader, "snapshot_every_n_steps", None) is not None and is_stateful(self._dataset):
                cursor.record_worker_state(0, 0, pickled_state(lambda: state_of(loader.dataset, None)))
        self._set_parts(partition)
        return parts

    def _take_fewer(self, spec: WorkerSpec, partition: Partition, resumed: bool) -> int:
        """Adapts to a system that allowed fewer workers than requested. Returns the number of parts."""
        partition = Partition(spec.shards or spec.num_workers, spec.num_workers, partition.places)
        self._num_workers = spec.num_workers
        self._set_parts(partition)
        if resumed and not self._iterable:
            self._cursor.saved_parts(spec.num_workers)
        return partition.parts

    def _set_parts(self, partition: Partition) -> None:
        self._cursor.workers = partition.parts
        self._cursor.delivered_by = [0] * partition.parts if self._iterable else []

    def _warn_idle(self, partition: Partition) -> None:
        if partition.workers < self._num_workers:
            warn_user(
                f"This run began with {partition.parts} parts of the iterable dataset and must keep them, so only "
                f"{partition.workers} of {self._num_workers} workers have work. Call load_state_dict({{}}) to begin a "
                "new run."
            )

    def _knobs_of(self, loader: LoaderLike, partition: Partition, prefetch: int, plan: PoolPlan) -> Knobs:
        auto = isinstance(loader.num_workers, AutoWorkers)
        any_worker = plan.thread_rng is not None or supported()
        return Knobs(
            num_workers=partition.parts,
            prefetch_factor=prefetch,
            in_order=getattr(loader, "in_order", True),  # torch < 2.6 has no such argument
            persistent=loader.persistent_workers or plan.keep is not None,
            timeout=loader.timeout,
            task_seeds=self._cursor.task_seeds,
            shared=(auto or plan.nodes is not None) and self._dataset_kind == _DatasetKind.Map and any_worker,
            ahead=getattr(loader, "_ahead", 0) if auto else 0,
        )

    def _spec_of(
        self, loader: LoaderLike, knobs: Knobs, partition: Partition, parts: tuple[WorkerPart, ...], plan: PoolPlan
    ) -> WorkerSpec:
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            init_fn = functools.partial(_sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        every, saved = getattr(loader, "snapshot_every_n_steps", None), self._cursor.saved
        in_the_middle = saved is not None and saved.next > 0 and not (self._iterable and saved.begun_by_workers)
        if knobs.task_seeds:
            packages.libraries()  # looked up once here instead of in each worker that searches for generators
        return WorkerSpec(
            kind=self._dataset_kind,
            dataset=self._dataset,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            base_seed=int(self._base_seed),
            init_fn=init_fn,
            num_workers=partition.workers,
            shared_seed=self._shared_seed,
            task_seeds=knobs.task_seeds,
            shared=knobs.shared,
            on_error=None if plan.faults is None else plan.faults[0],
            restart=plan.fatal_samples is not None,
            sample_timeout=getattr(loader, "sample_timeout", None) or 0.0,
            read_threads=getattr(loader, "read_threads", None),
            parts=parts,
            part_epochs=self._first_epoch,
            batch_size=loader.batch_size,
            tell=-1 if every is None else every,
            look=in_the_middle and not knobs.task_seeds,
            shards=partition.shards,
            places=partition.places,
            ranks=(self._cursor.rank, self._cursor.ranks),
            late=plan.late,
            drew=plan.drew,
            kept=plan.keep is not None,
        )

    def _start_workers(
        self, loader: LoaderLike, spec: WorkerSpec, plan: PoolPlan
    ) -> tuple[ProcessPool | ThreadPool, WorkerSpec]:
        """Returns the started workers and their final spec: there may be fewer than requested."""
        if plan.thread_rng is not None:
            from ..workers.thread_pool import ThreadPool  # not every loader has threads

            heaps: list[HeapWriter] = plan.slots  # type: ignore[assignment]
            return ThreadPool(spec, plan.budget, plan.thread_rng, heaps, plan.locker), spec
        arenas: list[SlotReader] = plan.slots  # type: ignore[assignment]
        context: ProcessContext = loader.multiprocessing_context or cast(
            ProcessContext, multiprocessing.get_context(method_of(torch.multiprocessing))
        )
        standby = plan.standby is not None
        try:
            pool, spec = start(spec, context, plan.budget, arenas, plan.locker, plan.saved_parts, standby)
            pool.dispensable = plan.retreat is not None
            return pool, spec
        except Exception as e:
            if plan.retreat is not None:
                raise WorkersUselessError(one_line(e)) from e
            if not isinstance(e, (TypeError, AttributeError, pickle.PicklingError)):
                raise
            hint = torch_message(_MultiProcessingDataLoaderIter.__init__, "Got pickle error")
            if hint:
                warn_user(hint, UserWarning)
            raise _with_path(e, spec) from e

    def _workers_for(
        self, loader: LoaderLike, spec: WorkerSpec, plan: PoolPlan
    ) -> tuple[ProcessPool | ThreadPool, KeptWorkers | None, WorkerSpec]:
        """Returns the workers, those of the loader's last iterator (None: they were started now), and their final
        spec."""
        if plan.kept is None or not plan.kept.can_serve(spec):
            workers, spec = self._start_workers(loader, spec, plan)
            return workers, None, spec
        kept = plan.kept
        self._first_epoch = -1 - kept.workers.epoch  # the workers count their epochs on
        spec = replace(spec, part_epochs=self._first_epoch)
        kept.workers.begin_anew(spec)
        return kept.workers, kept, spec

    def _schedule(
        self,
        workers: ProcessPool | ThreadPool,
        kept: KeptWorkers | None,
        spec: WorkerSpec,
        knobs: Knobs,
        plan: PoolPlan,
    ) -> None:
        """Creates what gives the workers their tasks, and what ends them."""
        pool, make_batch = self._make_pool(workers, spec, plan, kept)
        self._workers: list[Any] = workers.processes
        self._pss = workers.pss
        self._read_threads = workers.read_threads
        self._end = _End(pool, plan.helpers)
        self._close = weakref.finalize(self, self._end)
        if kept is not None:
            kept.release()
        restarts = None
        if plan.fatal_samples is not None and isinstance(workers, ProcessPool):
            restarts = Restarts(workers, spec, plan.fatal_samples, self._metrics)
        self._scheduler = Scheduler(pool, knobs, self._metrics, plan.budget, restarts, make_batch, plan.retreat)
        self._scheduler.here = plan.standby is not None
        if plan.keep is not None:
            self._end.keep = functools.partial(_keep, plan, self._scheduler, workers, pool, spec)
        if kept is not None:
            self._scheduler.epoch = workers.epoch
        self._pressure = MemoryPressure(
            functools.partial(shrink, self._scheduler, workers), self._metrics.decisions.append
        )

    def _make_pool(
        self, workers: ProcessPool | ThreadPool, spec: WorkerSpec, plan: PoolPlan, kept: KeptWorkers | None
    ) -> tuple[Pool, MakeBatch | None]:
        """Returns the pool for the scheduler, and the function that makes batches in this process; both pin if
        wanted."""
        pool: Pool = workers if kept is None else kept.pool
        if plan.nodes is not None and isinstance(workers, ProcessPool):
            try:
                pool = plan.nodes.around(workers, spec)
            except UsageError as e:  # they cannot work on this dataset
                warn_user(f"No workers on other nodes: {e}. Only this machine loads batches")
        make_batch = plan.make_batch
        if self._pin_memory and plan.locker is None:
            pinned = pool if isinstance(pool, PinnedPool) else PinnedPool(pool, self._pin_memory_device)
            self._pin_memory_thread = pinned.thread
            pool = pinned
            if make_batch is not None:
                make_batch = _pinned(make_batch, self._pin_memory_device)
        if spec.shards:
            from ..workers.shards import ShardPool

            pool = ShardPool(pool, spec.shards, spec.num_workers)
        return pool, make_batch

    def _reset(self, loader: LoaderLike, first_iter: bool = False) -> None:
        cursor = self._cursor
        cursor.prepare()
        with cursor.preserve_rng():
            super()._reset(loader, first_iter)
        saved = cursor.saved
        self._num_yielded = 0
        if saved is not None:
            self._shared_seed = saved.shared_seed
            self._num_yielded = sum(p.count for p in saved.parts) if saved.kind == "iterable" else saved.next
        cursor.shared_seed = self._shared_seed
        self._sampler_iter = cursor.begin(self._sampler_iter)
        self._is_begun = False
        if not self._draws_late:
            self._begin_epoch()
        if not first_iter:
            self._warn_of_changes()  # while workers make the first batch

    def _begin_epoch(self) -> None:
        """Draws the first indices. torch draws them when an iterator is made; without workers, when the first batch is
        asked for, and so does a loader whose script gave it none."""
        self._is_begun = True
        # Not self._next_index: the scheduler would then reference the iterator, and `del it` would not end the workers.
        draw = functools.partial(next, self._sampler_iter)
        if self._helpers is not None:
            draw = functools.partial(_draw_and_tell, self._sampler_iter, self._helpers)
        self._scheduler.begin(draw, self._shared_seed, self._cursor)
        self._cursor.epoch = self._first_epoch + self._scheduler.epoch

    def _warn_of_changes(self) -> None:
        """Warns once that persistent workers have the dataset as it was when they started."""
        changes = [] if self._fingerprint is None else self._fingerprint.changed(self._dataset)
        if changes:
            self._fingerprint = None
            warn_user(
                "The dataset changed after its persistent workers started, and they still use the old version: "
                f"{'; '.join(changes[:3])}. With persistent_workers=False, workers get the current dataset at the "
                "start of each epoch."
            )

    def __next__(self) -> Batch:
        if _profiling() or self._IterableDataset_len_called is not None or self._sampler_iter is None:
            # for record_function, which costs as much as a small batch, and for the length warning
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        if not self._num_yielded & 255:
            self._measure_workers()
        return data

    def arrived(self) -> bool:
        """Whether the next batch has arrived, so that requesting it will not block."""
        return self._scheduler.ready()

    def opened(self) -> str | None:
        """A file or connection that the workers have opened and keep; "" if none, None if they are leaving."""
        try:
            return None if self._scheduler.ending else opened([p.pid for p in self._workers])
        except OSError:
            return None

    def tune(self, tuner: Tuner) -> None:
        """Calls ``tuner`` at each delivery. See ``Scheduler``."""
        self._scheduler.tuner = tuner

    def resize(self, n: int) -> None:
        """Changes the number of workers within the epoch. See ``Scheduler.resize``."""
        if os.getpid() != self._process:
            return  # a forked process has only a copy
        self._scheduler.resize(n)
        self._num_workers = n

    def _next_data(self) -> Batch:
        if not self._is_begun:
            self._begin_epoch()
        self._pressure.check()
        if self._late is not None and not self._late.ask():
            self._late = None
        if self._locker is not None:
            self._locker.sweep()
        while True:
            try:
                data = self._scheduler.next()
            except StopIteration:
                if self._helpers is not None:
                    self._helpers.close()
                if self._end.keep is not None:
                    self._measure_workers()
                    self._close()
                elif not self._persistent_workers:
                    self._shutdown_workers()
                raise
            if type(data) is WorkerReply:
                data = self._read_reply(data)
            if isinstance(data, ExceptionWrapper):
                data.reraise()
            if type(data) is Partial:
                assert self._error_log is not None
                data = self._error_log.open(data)
            if data is not NOTHING:
                break
        if self._locker is None or not self._pin_memory or self._locker.over:
            return data  # over budget, an unlocked batch stays unlocked: a pinned copy would count too
        return pin(data, self._pin_memory_device)

    def _read_reply(self, reply: WorkerReply) -> Batch:
        self._cursor.record_worker_state(self._scheduler.worker, reply.at, reply.state)
        if reply.moved and self.ends_with_epoch:
            raise StateError(READ_HERE)
        if reply.moved and not self._warned_of_seeds:
            self._warned_of_seeds = True
            warn_user(
                "This epoch resumes midway, the dataset draws random numbers, and workers are seeded as torch's are. "
                "Order and samples match the saved run, but the random numbers do not. Use task_seeds=True from the "
                "start of a run to make them match."
            )
        return reply.data

    def state_dict(self) -> JsonObject:
        """The loader's state dict, while this is its iterator."""
        return self._cursor.save().to_dict()

    def _measure_workers(self) -> None:
        self._metrics.worker_pss.update(self._pss())
        threads = self._read_threads()
        decision = (
            f"{threads} threads in each worker load a batch's samples concurrently, because loading is mostly waiting"
        )
        if threads and decision not in self._metrics.decisions:
            self._metrics.decisions.append(decision)

    def _shutdown_workers(self) -> None:
        self._end.keep = None
        self._measure_workers()
        self._scheduler.stop()
        self._close()


class _End:
    """Ends an iterator's workers, or keeps them for the next iterator."""

    def __init__(self, pool: Pool, helpers: Helpers | None) -> None:
        self._pool, self._helpers = pool, helpers
        self.keep: Callable[[], bool] | None = None  # keeps them; returns whether it did

    def __call__(self) -> None:
        if self._helpers is not None:
            self._helpers.close()
        if self.keep is None or not self.keep():
            self._pool.close()


def _draw_and_tell(indices: Iterator[Index], helpers: Helpers) -> Index:
    drawn = next(indices)
    helpers.ask(drawn)
    return drawn


def _keep(
    plan: PoolPlan, scheduler: Scheduler, workers: ProcessPool | ThreadPool, pool: Pool, spec: WorkerSpec
) -> bool:
    """Keeps the workers of an iterator whose batches were all delivered. A loop may not ask for more than these."""
    if plan.keep is None or sys.is_finalizing() or not scheduler.is_done or time.monotonic() >= plan.keep_until:
        return False
    assert isinstance(workers, ProcessPool)
    plan.keep(KeptWorkers(workers, pool, spec))
    return True


def _pinned(make_batch: MakeBatch, device: str | None) -> MakeBatch:
    return lambda number, indices: pin(make_batch(number, indices), device)


def _with_path(e: Exception, spec: WorkerSpec) -> Exception:
    """Adds the path of what cannot be pickled to the pickling error: ``dataset.transform.fn``."""
    for name in ("dataset", "collate_fn", "init_fn"):
        path = culprit(getattr(spec, name), name.replace("init_fn", "worker_init_fn"))
        if path:
            try:
                return type(e)(f"{e}\nThe worker processes' arguments have to be pickled, and {path} cannot be.")
            except Exception:
                return e
    return e
