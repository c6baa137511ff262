"""What ``iter(loader)`` returns: torch's iterator to whoever looks, the scheduler behind it.

The base class is torch's own, so the order in which samplers are started and seeds are drawn is torch's too.
"""

from __future__ import annotations

import functools
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _sharding_worker_init_fn

from ..core import packages
from ..core.errors import StokerWarning
from ..core.fingerprint import Fingerprint
from ..core.handles import opened
from ..core.metrics import LoaderMetrics
from ..core.nested import pin
from ..core.options import AutoWorkers, Budget, Knobs
from ..core.picklable import culprit
from ..device.pinned_slots import Locker
from ..sampling.stateful import is_stateful, noted, put
from ..transport.task_queue import supported
from ..workers.faults.policy import NOTHING, Failure, OnError, Partial
from ..workers.fetcher import state_of
from ..workers.process_pool import ProcessPool
from ..workers.protocol import Pool, WorkerReply, WorkerSpec
from ..workers.restart import Restarts  # not later: the workers would compete for the cores with its import
from ..workers.start_pool import start
from .memory_pressure import Pressure
from .pin_thread import PinnedPool
from .scheduler import Scheduler

if TYPE_CHECKING:
    from ..sampling.cursor import Cursor
    from ..sampling.state import Part
    from ..workers.faults.error_log import ErrorLog
    from ..workers.rng_watch import GlobalRngUse
    from ..workers.thread_pool import ThreadPool

PICKLE_HINT = (
    "Got pickle error when attempting to start a worker Process. This might be because the worker Process arguments "
    "are not picklable. Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms to "
    "'forkserver', which requires the worker Process arguments to be picklable. You can also try "
    "multiprocessing.set_start_method('fork')."
)


_profiling = torch._C._autograd._profiler_enabled


class PoolIter(_BaseDataLoaderIter):
    """Iterates over a loader whose samples come from workers.

    Args:
        loader: torch's ``DataLoader`` or a subclass, with ``num_workers`` > 0.
        budget: how much the consumer may keep in slots.
        arenas: the loader's shared memory between two iterators; taken from here and given back.
        metrics: the loader's numbers.
        cursor: where the epoch is, and where it goes on.
        shards: parts of an iterable dataset, if they are not one a worker; else 0.
        threads: None for worker processes; for threads what is known of the loader's use of random generators.
        locker: page-locks slots; None: where batches are to be pinned a thread copies them.
        faults: what to do about samples that fail, and the account of them; None: torch's way.
        known: samples that kill workers, by index, where another worker takes the place of one that dies; None: that
            is an error, as in torch.
        make: makes the batch of a task, by number and indices, in this process; None: that is left to workers.
        later: workers, and batches in flight for each, should any be wanted: the epoch begins without.
    """

    def __init__(
        self,
        loader: Any,
        budget: Budget,
        arenas: list[Any],
        metrics: LoaderMetrics,
        cursor: Cursor,
        shards: int = 0,
        threads: GlobalRngUse | None = None,
        locker: Locker | None = None,
        faults: tuple[OnError, ErrorLog] | None = None,
        known: dict[Any, Failure] | None = None,
        make: Callable[[int, Any], Any] | None = None,
        later: tuple[int, int] | None = None,
    ) -> None:
        saved, self._cursor, self._locker = cursor.saved, cursor, locker
        self._process = os.getpid()
        with cursor.quiet():
            super().__init__(loader)
        if later is not None:
            self._num_workers = later[0]
        elif not loader.prefetch_factor:
            raise AssertionError("prefetch_factor must be greater than 0 to load in worker processes")
        every = getattr(loader, "snapshot_every_n_steps", None)
        iterable = self._dataset_kind == _DatasetKind.Iterable
        fixed = shards
        workers_there = min(int(self._num_workers), shards) if shards else int(self._num_workers)
        idle, shards = workers_there < int(self._num_workers), 0 if shards == workers_there else shards
        parts_there = shards or workers_there
        one_dataset = threads is not None and not iterable
        cursor.lives_on, cursor.workers = loader.persistent_workers or one_dataset, parts_there
        cursor.one_dataset = one_dataset
        cursor.adopt(self)
        parts: tuple[Part, ...] = ()
        if saved is not None:
            parts = cursor.parts(1 if one_dataset else parts_there)
            if one_dataset and parts:
                put(self._dataset, (parts[0].state or {"dataset": None})["dataset"], "dataset")
                parts = ()
        if one_dataset and every is not None and is_stateful(self._dataset):
            cursor.tell(0, 0, noted(lambda: state_of(loader.dataset, None)))
        cursor.counts = [0] * parts_there if iterable else []
        if idle:
            warnings.warn(
                f"This run of an iterable dataset was begun in {parts_there} parts and keeps them, so {workers_there} "
                f"of {self._num_workers} workers have something to do. load_state_dict({{}}) begins a new run.",
                StokerWarning,
                stacklevel=5,
            )
        prefetch = loader.prefetch_factor if later is None else later[1]
        knobs = self._knobs_of(loader, parts_there, prefetch, threads is not None)
        spec = replace(
            self._spec_of(loader, knobs),
            num_workers=workers_there,
            on_error=None if faults is None else faults[0],
            restart=known is not None,
            parts=parts,
            look=saved is not None and saved.next > 0 and not knobs.task_seeds and (not iterable or not saved.workers),
            shards=shards,
        )
        self._ledger = None if faults is None else faults[1]
        workers: ProcessPool | ThreadPool
        if threads is not None:
            from ..workers.thread_pool import ThreadPool  # only for those who want threads

            workers = ThreadPool(spec, budget, threads, arenas, locker)
        else:
            try:
                context = loader.multiprocessing_context or torch.multiprocessing
                workers, spec = start(spec, context, budget, arenas, locker, fixed, later is not None)
            except (TypeError, AttributeError, pickle.PicklingError) as e:
                warnings.warn(PICKLE_HINT, stacklevel=2)
                raise _named(e, spec) from e
        if spec.num_workers < workers_there:  # there can be no more
            workers_there, shards = spec.num_workers, spec.shards
            parts_there = shards or workers_there
            self._num_workers, knobs = workers_there, replace(knobs, num_workers=parts_there)
            cursor.workers, cursor.counts = parts_there, [0] * parts_there if iterable else []
            if parts and not iterable:
                try:
                    cursor.parts(workers_there)
                except BaseException:
                    workers.close()
                    raise
        pool: Pool = workers
        if self._pin_memory and locker is None:
            pinned = PinnedPool(workers, self._pin_memory_device)
            self._pin_memory_thread = pinned.thread
            pool = pinned
            if make is not None:
                make = _then_pinned(make, self._pin_memory_device)
        if shards:
            from ..workers.shards import ShardPool

            pool = ShardPool(pool, shards, workers_there)
        self._workers: list[Any] = workers.processes
        self._pss, self._metrics = workers.pss, metrics
        self._close = weakref.finalize(self, pool.close)
        restarts = None
        if known is not None and isinstance(workers, ProcessPool):
            restarts = Restarts(workers, spec, known, metrics)
        self._first_epoch = 0 if saved is None else saved.epoch
        self._look_worn = False
        self._scheduler = Scheduler(pool, knobs, metrics, budget, restarts, make)
        if later is not None:
            self._scheduler.here(leave=False)
        self._pressure = Pressure(_steps(self._scheduler, workers, pool, locker), metrics.decisions.append)
        stays = knobs.persistent and not one_dataset
        self._look = Fingerprint(self._dataset, shared=False) if stays else None  # what is shared, workers see
        self._reset(loader, first_iter=True)

    def _knobs_of(self, loader: Any, n: int, prefetch: int, threads: bool) -> Knobs:
        auto, is_map = isinstance(loader.num_workers, AutoWorkers), self._dataset_kind == _DatasetKind.Map
        return Knobs(
            num_workers=n,
            prefetch_factor=prefetch,
            in_order=getattr(loader, "in_order", True),  # torch < 2.6 has no such argument
            persistent=loader.persistent_workers,
            timeout=loader.timeout,
            task_seeds=self._cursor.task_seeds,
            shared=auto and is_map and (threads or supported()),
            ahead=getattr(loader, "_ahead", 0) if auto else 0,
        )

    def _spec_of(self, loader: Any, knobs: Knobs) -> WorkerSpec:
        """What workers are told by the loader; what it says of its run is not in it yet."""
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            init_fn = functools.partial(_sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        every, saved = getattr(loader, "snapshot_every_n_steps", None), self._cursor.saved
        if knobs.task_seeds:
            packages.libraries()  # looked up once here, and not in each worker that looks for generators
        return WorkerSpec(
            kind=self._dataset_kind,
            dataset=self._dataset,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            base_seed=int(self._base_seed),
            init_fn=init_fn,
            num_workers=knobs.num_workers,
            shared_seed=self._shared_seed,
            task_seeds=knobs.task_seeds,
            shared=knobs.shared,
            sample_timeout=getattr(loader, "sample_timeout", None) or 0.0,
            part_epochs=0 if saved is None else saved.epoch,
            batch_size=loader.batch_size,
            tell=-1 if every is None else every,
        )

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        cursor = self._cursor
        with nullcontext() if first_iter else cursor.shadow.over():
            cursor.prepare()
            with cursor.quiet():
                super()._reset(loader, first_iter)
            if cursor.saved is not None:
                self._shared_seed = cursor.saved.shared_seed
            self._finish_reset()
        if self._look is not None and not first_iter:
            self._tell_changes(self._look)  # while workers make the first batch

    def _finish_reset(self) -> None:
        cursor, yielded = self._cursor, 0
        if cursor.saved is not None:
            saved = cursor.saved
            yielded = sum(p.count for p in saved.parts) if saved.kind == "iterable" else saved.next
            self._IterableDataset_len_called = cursor.saved.len_called  # type: ignore[assignment]
        cursor.len_called, cursor.shared_seed = self._IterableDataset_len_called, self._shared_seed
        self._sampler_iter = cursor.begin(self._sampler_iter)
        self._num_yielded = yielded
        # Not self._next_index: the scheduler would hold the iterator, and `del it` would end no worker.
        self._scheduler.begin(functools.partial(next, self._sampler_iter), self._shared_seed, cursor)
        cursor.epoch = self._first_epoch + self._scheduler.epoch

    def _tell_changes(self, look: Fingerprint) -> None:
        """Says once that persistent workers have the dataset as it was when they started."""
        changes = look.changed(self._dataset)
        if changes:
            self._look = None
            warnings.warn(
                f"The dataset has changed since its persistent workers started, and they do not see it: "
                f"{'; '.join(changes[:3])}. persistent_workers=False shows them the dataset as it is at each epoch.",
                StokerWarning,
                stacklevel=4,
            )

    def __next__(self) -> Any:
        if _profiling() or self._IterableDataset_len_called is not None or self._sampler_iter is None:
            return super().__next__()  # record_function, which costs as much as a small batch, and the length warning
        data = self._next_data()
        self._num_yielded += 1
        if not self._num_yielded & 255:
            self._weigh()
        return data

    def arrived(self) -> bool:
        """Whether the next batch is there, so that asking for it does not wait."""
        return self._scheduler.ready()

    def opened(self) -> str:
        """A file or connection that its workers have opened and keep, or why that cannot be said; "" for none."""
        if self._scheduler.stopped:
            return ""
        if self._scheduler.ending:
            return "perhaps something, for its workers are leaving"
        try:
            return opened([p.pid for p in self._workers])
        except OSError as e:
            return str(e)

    def tune(self, tuner: Callable[[int], tuple[str, int] | None]) -> None:
        """Asks ``tuner`` at each delivery. See ``Scheduler``."""
        self._scheduler.tuner = tuner

    def resize(self, n: int) -> None:
        """Another number of workers, in the middle of the epoch. See ``Scheduler.resize``."""
        if os.getpid() != self._process:
            return  # a fork has but a copy
        self._scheduler.resize(n)
        self._num_workers = n

    def _next_data(self) -> Any:
        self._pressure.look()
        if self._locker is not None:
            self._locker.sweep()
        while True:
            try:
                data = self._scheduler.next()
            except StopIteration:
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise
            if type(data) is WorkerReply:
                data = self._heard(data)
            if isinstance(data, ExceptionWrapper):
                data.reraise()
            if type(data) is Partial:
                assert self._ledger is not None
                data = self._ledger.open(data)
            if data is not NOTHING:
                break
        if self._locker is None or not self._pin_memory or self._locker.over:
            return data  # over its budget a batch that is not locked stays so: a copy would be locked, too
        return pin(data, self._pin_memory_device)

    def _heard(self, told: WorkerReply) -> Any:
        self._cursor.tell(self._scheduler.worker, told.at, told.state)
        if told.moved and not self._look_worn:
            self._look_worn = True
            warnings.warn(
                "The dataset draws random numbers, workers are seeded as torch's, and this epoch goes on from its "
                "middle: order and samples are those of the run that was saved, the random numbers are not. "
                "task_seeds=True, from the beginning of a run on, makes them the same.",
                StokerWarning,
                stacklevel=4,
            )
        return told.data

    def state_dict(self) -> dict[str, Any]:
        """The loader's, while this is its iterator."""
        return self._cursor.save().to_dict()

    def _weigh(self) -> None:
        self._metrics.worker_pss.update(self._pss())

    def _shutdown_workers(self) -> None:
        self._weigh()
        self._scheduler.stop()
        self._close()


def _then_pinned(make: Callable[[int, Any], Any], device: str | None) -> Callable[[int, Any], Any]:
    return lambda number, indices: pin(make(number, indices), device)


def _steps(
    scheduler: Scheduler, workers: ProcessPool | ThreadPool, pool: Pool, locker: Locker | None
) -> list[Callable[[], str]]:
    """What an iterator gives up when memory runs short, the least missed first. No batch changes by it."""
    done: set[str] = set()

    def ring() -> str:
        if "ring" in done:
            return ""
        done.add("ring")
        scheduler.prefetch(1, ahead=0)
        if isinstance(workers, ProcessPool):
            workers.shrink()
        return "one batch ahead for each worker, and free slots are given back"

    def pinning() -> str:
        if "pinning" in done or (locker is None and not isinstance(pool, PinnedPool)):
            return ""
        done.add("pinning")
        if locker is not None:
            locker.stop()
            if isinstance(workers, ProcessPool):
                workers.unlock()
        elif isinstance(pool, PinnedPool):
            pool.off = True
        return "no memory is page-locked any more"

    def fewer() -> str:
        n = scheduler.num_workers - 1
        if n < 1 or not scheduler.shared:
            return ""
        scheduler.resize(n)
        return f"{n} workers instead of {n + 1}"

    return [ring, pinning, fewer]


def _named(e: Exception, spec: WorkerSpec) -> Exception:
    """The pickling error again, with the path of what cannot be pickled: ``dataset.transform.fn``."""
    for name in ("dataset", "collate_fn", "init_fn"):
        path = culprit(getattr(spec, name), name.replace("init_fn", "worker_init_fn"))
        if path:
            try:
                return type(e)(f"{e}\nThe worker processes' arguments have to be pickled, and {path} cannot be.")
            except Exception:
                return e
    return e
