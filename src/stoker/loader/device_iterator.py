"""Batches of data that lies on a device: gathered there, in the process that owns it. No workers, no pinning, no copy.

``TensorDataset`` and tensors on a device, ``Subset``s of these, and a ``Staged`` with ``cache="device"`` that is full.
A worker process could not touch them: CUDA cannot be used in a forked child.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..core.types import Batch, Index, JsonObject, LoaderLike
from ..sampling.order import with_first_drawn
from ..sampling.task_seeds import ObjectSeeds, run_here
from ..workers.fetcher import batches, staged_in
from ..workers.gather import RowGather

if TYPE_CHECKING:
    from ..sampling.cursor import Cursor

Gather: TypeAlias = Callable[[list[Index]], Batch]  # makes a batch of its indices


class ResidentIter(_BaseDataLoaderIter):
    """Iterates over a loader in this process, whatever its number of workers. ``gather`` makes a batch of a list of
    indices. ``replacing``: it takes the place of an iterator with persistent workers, which has drawn its seeds, and is
    reset next."""

    def __init__(self, loader: LoaderLike, gather: Gather, cursor: Cursor, replacing: bool = False) -> None:
        saved = cursor.saved
        self._gather = gather
        self._cursor = cursor
        self._object_seeds: ObjectSeeds | None = None
        if not replacing:
            cursor.prepare()
        with cursor.preserve_rng(replacing):
            super().__init__(loader)  # type: ignore[arg-type]
        cursor.worker_states = {}  # there is no state but the sampler's
        cursor.live_state = None
        cursor.one_dataset = False
        cursor.lives_on = loader.persistent_workers or not self._num_workers
        cursor.workers = int(self._num_workers)
        if replacing:
            self._base_seed = cursor.base_seed
            self._shared_seed = cursor.shared_seed
            return
        cursor.adopt_seeds(self)
        self._begin()
        cursor.epoch = 0 if saved is None else saved.epoch

    def _reset(self, loader: LoaderLike, first_iter: bool = False) -> None:
        self._cursor.prepare()
        super()._reset(loader, first_iter)
        self._begin()
        self._cursor.epoch += 1

    def _begin(self) -> None:
        cursor = self._cursor
        self._num_yielded = 0 if cursor.saved is None else cursor.saved.next
        cursor.shared_seed = self._shared_seed
        indices = cursor.begin(self._sampler_iter)
        # With workers torch asks the sampler now.
        self._sampler_iter = with_first_drawn(indices) if self._num_workers else indices

    def _next_data(self) -> Batch:
        cursor = self._cursor
        indices, number = cursor.take(self._sampler_iter), cursor.next
        cursor.next += 1
        if not cursor.task_seeds or isinstance(self._gather, RowGather):  # which draws nothing
            return self._gather(indices)
        if self._object_seeds is None:
            self._object_seeds = ObjectSeeds(self._dataset, self._collate_fn)
        run = functools.partial(self._gather, indices)
        return run_here(self._object_seeds, cursor.base_seed, cursor.epoch, number, run)

    def state_dict(self) -> JsonObject:
        """The loader's, while this is its iterator."""
        return self._cursor.save().to_dict()

    def _shutdown_workers(self) -> None:
        """There are none."""


def resident(loader: LoaderLike) -> Gather | None:
    """What makes a loader's batches where its data lies on a device; else None."""
    if loader._dataset_kind != _DatasetKind.Map or not loader._auto_collation:
        return None
    dataset, collate = loader.dataset, loader.collate_fn
    staged = staged_in(dataset)
    if staged is not None:
        select = staged._on_device(collate is torch_collate.default_collate)
        return batches(dataset, collate, select, collate) if select is not None else None
    if not RowGather.fits(dataset, collate, True) or not any(map(is_on_device, _tensors(dataset))):
        return None
    many = getattr(dataset, "__getitems__", None)

    def loop(indices: list[Index]) -> Batch:
        return collate(many(indices) if many else [dataset[i] for i in indices])

    return RowGather(dataset, loop)


def reuse_or_replace(loader: LoaderLike) -> _BaseDataLoaderIter | None:
    """The iterator of a loader with persistent workers for its next epoch; None if workers are to be started anew. Its
    data may have moved to the device since the last one, or may not be there any more. Parts of an iterable dataset
    that were dealt anew are those of one epoch."""
    before, gather = loader._iterator, resident(loader)
    if getattr(before, "ends_with_epoch", False):
        if hasattr(before, "_shutdown_workers"):
            before._shutdown_workers()
        return None
    if isinstance(before, ResidentIter) == (gather is not None):
        return before  # type: ignore[no-any-return]
    before._shutdown_workers()
    if gather is None or not hasattr(before, "_cursor"):
        return None
    # Persistent workers draw no seed for their second epoch, and neither does what takes their place.
    return ResidentIter(loader, gather, before._cursor, replacing=True)


def is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _tensors(dataset: object) -> list[torch.Tensor]:
    if type(dataset) is Subset:
        dataset = dataset.dataset
    held = dataset.tensors if type(dataset) is TensorDataset else [dataset]
    return [t for t in held if isinstance(t, torch.Tensor)]
