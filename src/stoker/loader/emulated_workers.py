"""Runs an epoch of a map-style dataset without worker processes, with exactly the batches that workers would give.

torch seeds worker *w* of an epoch with ``base_seed + w`` and gives it tasks *w*, *w* + N, *w* + 2N, ... So a batch
depends on the worker's number and on what that worker drew before, not on the process. This iterator keeps the random
state of N workers that do not exist, and makes each batch under the state of the worker whose turn it is::

    consumer          next()                          next()
    script's state    |  saved ........... restored  |  saved ........... restored
    worker 0's state  |  loaded, batch 0, saved      |
    worker 1's state  |                              |  loaded, batch 1, saved

A forked worker also has the dataset as it was when the epoch began. If the dataset, its transforms or the collate
function hold random generators, each emulated worker has its own copies of the objects that lead to them.

This saves starting workers and moving batches between processes. A batch is made while its consumer waits.

A sample that fails here may not fail in a worker: a library may open a file only once per process. So after an error,
real workers redo the epoch from the same seed and indices, and deliver the batches from the failed one on.
"""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Subset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import _generate_state
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..core.dataset_tree import inner_datasets
from ..core.errors import StokerError
from ..core.nested import pin
from ..core.random_state import RandomState, preserved
from ..core.types import Batch, Index, LoaderLike
from ..sampling.generators import Found, find_generators, namespace, own_copies
from ..transport.thread_slots import HeapWriter
from ..workers.collate import SlotCollate
from ..workers.exceptions import Caught
from ..workers.fetcher import BatchFetcher, staged_in
from ..workers.native_threads import OneThread
from . import engine
from .inline_iterator import here
from .loader_state import state_of


class WorkerlessIter(_BaseDataLoaderIter, ABC):
    """Iterates over a loader in the consumer's process, as torch's iterator with ``num_workers`` processes would.

    Reads the sampler as far ahead as torch does, because a sampler may draw from a generator that the script uses.

    Args:
        loader: torch's ``DataLoader`` or a subclass, map-style, ``num_workers`` > 0, without ``persistent_workers`` and
            ``timeout``; its ``worker_init_fn`` only seeds. ``loader.dataset`` is read here.
    """

    def __init__(self, loader: LoaderLike) -> None:
        self._loader = loader
        self._drawn_from = loader.generator or torch.default_generator
        self._before = self._drawn_from.get_state()
        super().__init__(loader)  # type: ignore[arg-type]  # draws the base seed
        self._workers: list[object] = []  # frameworks look for this attribute
        self._drawn: list[Index] = []  # the indices of all tasks so far
        self._indices: deque[Index] = deque()
        self._made = 0
        self._by_workers: Iterator[Batch] | None = None  # set after an error
        self.failed_here: Callable[[str], object] = lambda error: None  # called with an error that no worker had
        for _ in range((loader.prefetch_factor or 2) * self._num_workers):
            self._draw()

    @abstractmethod
    def _run(self, number: int, indices: Index) -> Batch:
        """Makes a task's batch; returns an error instead of raising it."""

    def _draw(self) -> None:
        """Draws the indices of one more task."""
        try:
            self._drawn.append(self._next_index())  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        self._indices.append(self._drawn[-1])

    def _next_data(self) -> Batch:
        if self._by_workers is not None:
            return next(self._by_workers)
        if not self._indices:
            raise StopIteration
        batch = self._run(self._made, self._indices.popleft())
        if isinstance(batch, ExceptionWrapper):
            if issubclass(batch.exc_type, StokerError):  # meant for the user: a stale cache, which workers do not use
                batch.reraise()
            self._by_workers = self._begin_anew()
            batch, error = next(self._by_workers), batch  # raises what a worker raises, as torch does
            self.failed_here(error.exc_msg.strip().rpartition("\n")[2])
            return batch
        self._made += 1
        self._draw()
        if self._pin_memory:
            batch = pin(batch, self._pin_memory_device)
        return batch

    def _begin_anew(self) -> Iterator[Batch]:
        """Starts workers that redo this epoch, and drops the batches already delivered. They read the script's own
        dataset, without a cache."""
        again = copy.copy(self._loader)
        sampler = "batch_sampler" if self._auto_collation else "sampler"
        vars(again)[sampler] = itertools.chain(self._drawn, self._sampler_iter)
        now = self._drawn_from.get_state()
        self._drawn_from.set_state(self._before)  # so that the same base seed is drawn again
        try:
            it = engine.get_iterator(again)
        finally:
            self._drawn_from.set_state(now)
        for _ in range(self._made):
            next(it)
        return it

    def _shutdown_workers(self) -> None:
        """Does nothing, as there are no workers; frameworks call it."""


class SeededTasksIter(WorkerlessIter):
    """For a loader that sets random state per task: a batch depends neither on its worker nor on what
    ``worker_init_fn`` seeds."""

    def __init__(self, loader: LoaderLike) -> None:
        super().__init__(loader)
        self._one_thread = OneThread()
        seeds = int(self._base_seed), 0  # always the first epoch: new workers would start at it
        self._make = here(loader.dataset, self._auto_collation, self._collate_fn, self._drop_last, lambda: seeds)

    def _run(self, number: int, indices: Index) -> Batch:
        try:
            with self._one_thread:
                return self._make(number, indices)
        except Exception:
            return Caught(f"in DataLoader worker process {number % self._num_workers}", self._dataset, "")


class EmulatedWorkersIter(WorkerlessIter):
    """For a loader with torch's seeds. ``own``: the items of ``worker_copies``, one per worker. They are made first: if
    that fails, no random number has been drawn."""

    def __init__(self, loader: LoaderLike, own: Sequence[tuple[object, Callable[..., Batch]]]) -> None:
        self._shared = _shared_generators(loader, own)
        self._at_start = RandomState(self._shared, ())
        super().__init__(loader)
        self._one_thread = OneThread()
        self._worker_init_fn = loader.worker_init_fn
        heaps = state_of(loader).heaps
        self._heap = heaps.pop() if heaps else HeapWriter(engine.budget(loader).lease_bytes)
        weakref.finalize(self, heaps.append, self._heap).atexit = False  # no other iterator uses it meanwhile
        self._emulated = [self._emulate(worker, *of_worker) for worker, of_worker in enumerate(own)]

    def _emulate(self, number: int, dataset: object, collate_fn: Callable[..., Batch]) -> _EmulatedWorker:
        info = torch_worker.WorkerInfo(
            id=number,
            num_workers=self._num_workers,
            seed=int(self._base_seed) + number,
            dataset=getattr(dataset, "stands_for", None) or dataset,  # type: ignore[arg-type]
        )
        collate = _Collate(collate_fn, self._heap, self._auto_collation, self._one_thread)
        fetcher = BatchFetcher(_DatasetKind.Map, dataset, self._auto_collation, collate, self._drop_last)
        shared = self._shared, self._at_start
        return _EmulatedWorker(int(self._base_seed), info, collate, fetcher, self._worker_init_fn, shared)

    def _run(self, number: int, indices: Index) -> Batch:
        with preserved(*(generator for _, generator in self._shared)), self._one_thread:
            return self._emulated[number % self._num_workers].run(indices)


class _EmulatedWorker:
    """One emulated worker."""

    def __init__(
        self,
        base_seed: int,
        info: torch_worker.WorkerInfo,
        collate: SlotCollate,
        fetcher: BatchFetcher,
        init_fn: Callable[[int], object] | None,
        shared: tuple[Found, RandomState],
    ) -> None:
        self._base_seed = base_seed
        self._info = info
        self._init_fn = init_fn
        self._collate = collate
        self._fetcher = fetcher
        self._shared, self._at_start = shared  # generators that it has in common with the script, and their first state
        self._state: RandomState | None = None

    def run(self, indices: Index) -> Batch:
        """Makes a task's batch, or returns the error, and leaves the random state as this worker's."""
        before = torch_worker._worker_info
        torch_worker._worker_info = self._info
        try:
            self._load_state()
            with self._collate.active():
                return self._fetcher.run(indices)
        except Exception:
            return Caught(f"in DataLoader worker process {self._info.id}", self._info.dataset, "")
        finally:
            self._collate.finish()  # frees the slot after an error
            torch_worker._worker_info = before
            self._state = RandomState(self._shared)

    def _load_state(self) -> None:
        if self._state is not None:
            self._state.restore()
            return
        self._at_start.restore()
        random.seed(self._info.seed)
        torch.default_generator.manual_seed(self._info.seed)
        np.random.seed(_generate_state(self._base_seed, self._info.id))
        if self._init_fn is not None:
            self._init_fn(self._info.id)


class _Collate(SlotCollate):
    """Collates in the script's own process. ``one_thread``: the thread cap while samples are made; lifted for torch's
    collate functions, which only copy, so threads do not change the result."""

    def __init__(
        self, collate_fn: Callable[..., Batch], heap: HeapWriter, batched: bool, one_thread: OneThread
    ) -> None:
        super().__init__(collate_fn, heap, batched)
        self._one_thread = one_thread
        self._is_torchs = collate_fn in (torch_collate.default_collate, torch_collate.default_convert)

    def __call__(self, data: object) -> Batch:
        if not self._is_torchs:
            return super().__call__(data)
        with self._one_thread.lifted(), _not_a_worker():
            return super().__call__(data)


@contextmanager
def _not_a_worker() -> Iterator[None]:
    """Hides the worker info from torch's collate function, which would otherwise allocate shared memory."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def worker_copies(loader: LoaderLike, alone: bool = False) -> list[tuple[object, Callable[..., Batch]]]:
    """The dataset and collate function for each worker: copied if they hold random generators. ``alone``: always copies
    the dataset, because samples may set its attributes. Otherwise all workers started later would share a file that the
    script's own dataset had opened, and its offset. Raises any exception that copying an object raises."""
    return [_copies(loader.dataset, loader.collate_fn, alone) for _ in range(loader.num_workers)]


def _shared_generators(loader: LoaderLike, own: Sequence[tuple[object, Callable[..., Batch]]]) -> Found:
    """The generators that no copy of the dataset and the collate function has for itself: those of modules, classes and
    closures, of which each of torch's workers has one as it was when the epoch began."""
    scripts = {id(generator) for _, generator in find_generators(loader.dataset, loader.collate_fn)}
    found = [pair for copies in own for pair in find_generators(*copies) if id(pair[1]) in scripts]
    return list({id(generator): (path, generator) for path, generator in found}.values())


def _copies(dataset: object, collate_fn: Callable[..., Batch], alone: bool) -> tuple[object, Callable[..., Batch]]:
    if type(dataset) is Subset and staged_in(dataset) is not None:
        own_inner, own_collate = _copies(dataset.dataset, collate_fn, alone)
        subset = copy.copy(dataset)
        vars(subset)["dataset"] = own_inner
        return subset, own_collate
    for_worker = getattr(type(dataset), "for_worker", None)  # the cache is shared, its dataset is copied
    inner = dataset if for_worker is None else dataset.dataset  # type: ignore[attr-defined]
    copied = [x for x in inner_datasets(inner) if namespace(x) is not None] if alone else []
    own, own_collate = own_copies(inner, collate_fn, alone=copied)
    if for_worker is not None:
        own = dataset if own is inner else for_worker(dataset, own)
    return own, own_collate
