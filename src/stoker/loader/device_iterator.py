"""Batches of data that lies on a device: gathered there, in the process that owns it. No workers, no pinning, no copy.

``TensorDataset`` and tensors on a device, ``Subset``s of these, and a ``Staged`` with ``cache="device"`` that is full.
A worker process could not touch them: CUDA cannot be used in a forked child.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..sampling.task_seeds import ObjectSeeds, run_here
from ..workers.fetcher import batches, staged_in
from ..workers.gather import RowGather

if TYPE_CHECKING:
    from ..sampling.cursor import Cursor

Batch = Callable[[Any], Any]
_END = object()


class ResidentIter(_BaseDataLoaderIter):
    """Iterates over a loader in this process, whatever its number of workers.

    Args:
        loader: torch's ``DataLoader`` or a subclass.
        batch: a list of indices to a batch.
        cursor: where the epoch is, and where it goes on.
        again: it takes the place of an iterator with persistent workers, which has drawn its seeds, and is reset next.
    """

    def __init__(self, loader: Any, batch: Batch, cursor: Cursor, again: bool = False) -> None:
        saved, self._batch, self._cursor = cursor.saved, batch, cursor
        self._own: ObjectSeeds | None = None
        if not again:
            cursor.prepare()
        with cursor.quiet(again):
            super().__init__(loader)
        cursor.told, cursor.live, cursor.one_dataset = {}, None, False  # there is no state but the sampler's
        cursor.lives_on, cursor.workers = loader.persistent_workers or not self._num_workers, int(self._num_workers)
        if again:
            self._base_seed, self._shared_seed = cursor.base_seed, cursor.shared_seed
            return
        cursor.adopt(self)
        self._begin()
        cursor.epoch = 0 if saved is None else saved.epoch

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        cursor = self._cursor
        with cursor.shadow.over():
            cursor.prepare()
            super()._reset(loader, first_iter)
            self._begin()
        cursor.epoch += 1

    def _begin(self) -> None:
        cursor = self._cursor
        self._num_yielded = 0 if cursor.saved is None else cursor.saved.next
        cursor.shared_seed = self._shared_seed
        found = cursor.begin(self._sampler_iter)
        if self._num_workers:  # with workers torch asks the sampler now
            head = next(found, _END)
            found = iter(()) if head is _END else itertools.chain([head], found)
        self._sampler_iter = found

    def _next_data(self) -> Any:
        cursor = self._cursor
        indices, number = cursor.take(self._sampler_iter), cursor.next
        cursor.next += 1
        if not cursor.task_seeds or isinstance(self._batch, RowGather):  # which draws nothing
            return self._batch(indices)
        if self._own is None:
            self._own = ObjectSeeds(self._dataset, self._collate_fn)
        place = cursor.base_seed, cursor.epoch, number
        return run_here(self._own, *place, functools.partial(self._batch, indices))

    def state_dict(self) -> dict[str, Any]:
        """The loader's, while this is its iterator."""
        return self._cursor.save().to_dict()

    def _shutdown_workers(self) -> None:
        """There are none."""


def resident(loader: Any) -> Batch | None:
    """What makes a loader's batches where its data lies on a device; else None."""
    if loader._dataset_kind != _DatasetKind.Map or not loader._auto_collation:
        return None
    dataset, collate = loader.dataset, loader.collate_fn
    staged = staged_in(dataset)
    if staged is not None:
        select = staged._on_device(collate is torch_collate.default_collate)
        return batches(dataset, collate, select, collate) if select is not None else None
    if not RowGather.fits(dataset, collate, True) or not any(map(off_host, _tensors(dataset))):
        return None
    inner: Any = dataset
    many = getattr(inner, "__getitems__", None)

    def loop(indices: Any) -> Any:
        return collate(many(indices) if many else [inner[i] for i in indices])

    return RowGather(dataset, loop)


def settled(loader: Any) -> Any:
    """The iterator of a loader with persistent workers for its next epoch; None if workers are to be started anew.

    Its data may have moved to the device since the last one, or may not be there any more.
    """
    before, there = loader._iterator, resident(loader)
    if isinstance(before, ResidentIter) == (there is not None):
        return before
    before._shutdown_workers()
    if there is None or not hasattr(before, "_cursor"):
        return None
    # Persistent workers draw no seed for their second epoch, so neither does what stands in their place.
    return ResidentIter(loader, there, before._cursor, again=True)


def off_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a device."""
    return tensor.device.type not in ("cpu", "meta")


def _tensors(dataset: Any) -> list[torch.Tensor]:
    if type(dataset) is Subset:
        dataset = dataset.dataset
    held = dataset.tensors if type(dataset) is TensorDataset else [dataset]
    return [t for t in held if isinstance(t, torch.Tensor)]
