"""Gathers batches of data that is on a device there, in the process that owns it. No workers, no pinning, no copy.

Handles ``TensorDataset`` and tensors on a device, and ``Subset``s of these. A worker process could not access them:
CUDA cannot be used in a forked child.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..core.types import Batch, JsonObject, LoaderLike
from ..sampling.order import with_first_drawn
from ..workers.gather import RowGather

if TYPE_CHECKING:
    from ..sampling.cursor import Cursor


class ResidentIter(_BaseDataLoaderIter):
    """Iterates over a loader in this process, whatever its number of workers."""

    def __init__(self, loader: LoaderLike, gather: RowGather, cursor: Cursor) -> None:
        saved = cursor.saved
        self._gather = gather
        self._cursor = cursor
        cursor.prepare()
        with cursor.preserve_rng():
            super().__init__(loader)  # type: ignore[arg-type]
        cursor.lives_on = loader.persistent_workers or not self._num_workers
        cursor.workers = int(self._num_workers)
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
        # With workers, torch draws the first indices now.
        self._sampler_iter = with_first_drawn(indices) if self._num_workers else indices

    def _next_data(self) -> Batch:
        cursor = self._cursor
        indices = cursor.take(self._sampler_iter)
        cursor.next += 1
        return self._gather(indices)  # draws no random numbers

    def state_dict(self) -> JsonObject:
        """The loader's state dict, while this is its iterator."""
        return self._cursor.save().to_dict()

    def _shutdown_workers(self) -> None:
        """Does nothing: there are no workers."""


def resident(loader: LoaderLike) -> RowGather | None:
    """Returns the gatherer of a loader's batches if its data is on a device; else None."""
    if loader._dataset_kind != _DatasetKind.Map or not loader._auto_collation:
        return None
    dataset, collate = loader.dataset, loader.collate_fn
    if not RowGather.fits(dataset, collate, True) or not any(map(is_on_device, _tensors(dataset))):
        return None
    fetcher = _DatasetKind.create_fetcher(_DatasetKind.Map, dataset, True, collate, loader.drop_last)
    return RowGather(dataset, fetcher.fetch)


def is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _tensors(dataset: object) -> list[torch.Tensor]:
    if type(dataset) is Subset:
        dataset = dataset.dataset
    held = dataset.tensors if type(dataset) is TensorDataset else [dataset]
    return [t for t in held if isinstance(t, torch.Tensor)]
