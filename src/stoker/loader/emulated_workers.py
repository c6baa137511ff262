"""An epoch of a map-style dataset without worker processes, in which a script sees what its workers would have given.

torch seeds worker *w* of an epoch with ``base_seed + w`` and gives it tasks *w*, *w* + N, *w* + 2N, ... So a batch
depends on the worker's number and on what that worker drew before, not on the process. This iterator keeps the random
state of N workers that do not exist, and makes each batch under the state of the worker whose turn it is::

    consumer          next()                          next()
    script's state    |  saved ........... restored  |  saved ........... restored
    worker 0's state  |  loaded, batch 0, kept       |
    worker 1's state  |                              |  loaded, batch 1, kept

Starting workers and moving batches between processes then cost nothing. A batch is made while its consumer waits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import _generate_state
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..core import numpy_state
from ..core.nested import pin
from ..core.types import Batch, Index, LoaderLike
from ..sampling.seeding import unchanged
from ..workers.collate import SlotCollate
from ..workers.exceptions import Caught
from ..workers.fetcher import batches
from ..workers.gather import RowGather, select
from ..workers.native_threads import OneThread


class NoSlots:
    """The writer of a process that hands its batches to nobody else: there is no slot to write to."""

    whole = None

    def take(self, nbytes: int) -> bool:
        """There is no slot."""
        return False

    def room(self, nbytes: int) -> int | None:
        """There is no slot."""
        return None

    def cancel(self) -> None:
        """Nothing was written."""


class EmulatedWorkersIter(_BaseDataLoaderIter):
    """Iterates over a loader as torch's iterator with ``num_workers`` processes does, in the consumer's process.

    The sampler is read as far ahead as torch reads it, since a sampler may draw from a generator that the script uses.

    Args:
        loader: torch's ``DataLoader`` or a subclass, map-style, ``num_workers`` > 0, without ``persistent_workers``,
            ``worker_init_fn`` and ``timeout``. ``loader.dataset`` is read here.
    """

    def __init__(self, loader: LoaderLike) -> None:
        super().__init__(loader)  # type: ignore[arg-type]  # draws the base seed
        self._workers: list[object] = []  # frameworks look for it
        self._prefetch_factor = loader.prefetch_factor or 2
        self._collate = SlotCollate(loader.collate_fn, NoSlots(), loader._auto_collation)
        self._one_thread = OneThread()
        self._plain = loader.collate_fn in (torch_collate.default_collate, torch_collate.default_convert)
        self._dataset_fetcher = _DatasetKind.create_fetcher(
            _DatasetKind.Map, self._dataset, self._auto_collation, self._collated, self._drop_last
        )
        self._dataset_fetcher.fetch = self._fetch_of(self._dataset_fetcher.fetch)
        shown = getattr(self._dataset, "stands_for", None) or self._dataset
        self._infos = [
            torch_worker.WorkerInfo(
                id=worker, num_workers=self._num_workers, seed=int(self._base_seed) + worker, dataset=shown
            )
            for worker in range(self._num_workers)
        ]
        self._states: list[tuple[object, torch.Tensor, object] | None] = [None] * self._num_workers
        self._indices: deque[Index] = deque()
        self._made = 0
        for _ in range(self._prefetch_factor * self._num_workers):
            self._draw()

    def _fetch_of(self, fetch: Callable[[Index], Batch]) -> Callable[[Index], Batch]:
        fn = self._collate.fn
        if RowGather.fits(self._dataset, fn, self._auto_collation):
            return RowGather(self._dataset, fetch)
        if not self._auto_collation:
            return fetch
        return batches(self._dataset, self._collated, select, fn) or fetch

    def _collated(self, data: object) -> Batch:
        """Calls the loader's collate function.

        torch's own takes shared memory where ``get_worker_info()`` says that this is a worker, so it is called without.
        """
        if not self._plain:
            return self._collate.fn(data)
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            with self._one_thread.lifted():
                return self._collate.fn(data)
        finally:
            torch_worker._worker_info = info

    def _draw(self) -> None:
        """Reads the sampler for one task more."""
        try:
            self._indices.append(self._next_index())  # type: ignore[no-untyped-call]
        except StopIteration:
            return

    def _next_data(self) -> Batch:
        if not self._indices:
            raise StopIteration
        worker = self._made % self._num_workers
        batch = self._make(worker, self._indices.popleft())
        self._made += 1
        self._draw()
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()
        if self._pin_memory:
            batch = pin(batch, self._pin_memory_device)
        return batch

    def _make(self, worker: int, indices: Index) -> Batch:
        """The batch of a task, or the error in its place."""
        with unchanged(), self._one_thread, self._collate.active(), self._as_worker(worker):
            try:
                return self._dataset_fetcher.fetch(indices)
            except Exception:
                return Caught(f"in DataLoader worker process {worker}", self._dataset, "")

    @contextmanager
    def _as_worker(self, worker: int) -> Iterator[None]:
        """The random state of a worker, and what ``get_worker_info()`` says there."""
        state = self._states[worker]
        if state is None:
            seed = int(self._base_seed) + worker
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
            np.random.seed(_generate_state(int(self._base_seed), worker))
        else:
            random.setstate(state[0])  # type: ignore[arg-type]
            torch.default_generator.set_state(state[1])
            numpy_state.restore(state[2])
        before, torch_worker._worker_info = torch_worker._worker_info, self._infos[worker]
        try:
            yield
        finally:
            torch_worker._worker_info = before
            self._states[worker] = random.getstate(), torch.default_generator.get_state(), numpy_state.save()

    def _shutdown_workers(self) -> None:
        """There are none; frameworks call it."""
