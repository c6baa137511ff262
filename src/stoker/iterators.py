"""What ``iter(loader)`` returns: torch's iterator to whoever looks, the scheduler behind it.

The base class is torch's own, so the order in which samplers are started and seeds are drawn is torch's too.
"""

from __future__ import annotations

import functools
import pickle
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from .metrics import LoaderMetrics
from .options import AutoWorkers, Budget, Knobs
from .pin import PinnedPool
from .scheduler import Scheduler
from .source import order
from .transport.ring import SlotReader
from .workers.process import ProcessPool
from .workers.protocol import Pool, WorkerSpec

PICKLE_HINT = (
    "Got pickle error when attempting to start a worker Process. This might be because the worker Process arguments "
    "are not picklable. Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms to "
    "'forkserver', which requires the worker Process arguments to be picklable. You can also try "
    "multiprocessing.set_start_method('fork')."
)


_profiling = torch._C._autograd._profiler_enabled


class ProcessIter(_BaseDataLoaderIter):
    """Iterates over a loader whose samples come from worker processes.

    Args:
        loader: torch's ``DataLoader`` or a subclass, with ``num_workers`` > 0.
        budget: how much the consumer may keep in slots.
        arenas: the loader's shared memory between two iterators; taken from here and given back.
        metrics: the loader's numbers.
    """

    def __init__(self, loader: Any, budget: Budget, arenas: list[SlotReader], metrics: LoaderMetrics) -> None:
        super().__init__(loader)
        if not loader.prefetch_factor:
            raise AssertionError("prefetch_factor must be greater than 0 to load in worker processes")
        knobs = Knobs(
            num_workers=int(self._num_workers),
            prefetch_factor=loader.prefetch_factor,
            in_order=getattr(loader, "in_order", True),  # torch < 2.6 has no such argument
            persistent=loader.persistent_workers,
            timeout=loader.timeout,
            task_seeds=isinstance(loader.num_workers, AutoWorkers),
        )
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            init_fn = functools.partial(_sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        spec = WorkerSpec(
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
        )
        try:
            processes = ProcessPool(spec, loader.multiprocessing_context or torch.multiprocessing, budget, arenas)
        except (TypeError, AttributeError, pickle.PicklingError) as e:
            warnings.warn(PICKLE_HINT, stacklevel=2)
            raise _named(e, spec) from e
        pool: Pool = processes
        if self._pin_memory:
            pinned = PinnedPool(processes, self._pin_memory_device)
            self._pin_memory_thread = pinned.thread
            pool = pinned
        self._workers = processes.processes
        self._close = weakref.finalize(self, pool.close)
        self._scheduler = Scheduler(pool, knobs, metrics)
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._sampler_iter = order(self._index_sampler) or self._sampler_iter
        # Not self._next_index: the scheduler would hold the iterator, and `del it` would end no worker.
        self._scheduler.begin(functools.partial(next, self._sampler_iter), self._shared_seed)

    def __next__(self) -> Any:
        if _profiling() or self._IterableDataset_len_called is not None or self._sampler_iter is None:
            return super().__next__()  # record_function, which costs as much as a small batch, and the length warning
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        try:
            data = self._scheduler.next()
        except StopIteration:
            if not self._persistent_workers:
                self._shutdown_workers()
            raise
        if type(data) is ExceptionWrapper:
            data.reraise()
        return data

    def _shutdown_workers(self) -> None:
        self._scheduler.stop()
        self._close()


def _named(e: Exception, spec: WorkerSpec) -> Exception:
    """The pickling error again, with the path of what cannot be pickled: ``dataset.transform.fn``."""
    for name in ("dataset", "collate_fn", "init_fn"):
        path = _culprit(getattr(spec, name), name.replace("init_fn", "worker_init_fn"))
        if path:
            try:
                return type(e)(f"{e}\nThe worker processes' arguments have to be pickled, and {path} cannot be.")
            except Exception:
                return e
    return e


def _culprit(obj: Any, path: str, depth: int = 0) -> str | None:
    """Path of the innermost attribute or item that pickle refuses, or None when it takes all."""
    try:
        ForkingPickler.dumps(obj)
        return None
    except Exception:
        inner: list[tuple[str, Any]] = []
        if isinstance(obj, dict):
            inner = [(f"{path}[{k!r}]", v) for k, v in list(obj.items())[:1000]]
        elif isinstance(obj, (list, tuple)):
            inner = [(f"{path}[{i}]", v) for i, v in enumerate(obj[:1000])]
        elif hasattr(obj, "__dict__") and not isinstance(obj, type):
            inner = [(f"{path}.{k}", v) for k, v in vars(obj).items()]
        if depth < 8:
            for name, value in inner:
                found = _culprit(value, name, depth + 1)
                if found:
                    return found
        return f"{path} ({type(obj).__name__})"
