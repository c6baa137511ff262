"""Batches of data that lies on a device: gathered there, in the process that owns it. No workers, no pinning, no copy.

``TensorDataset`` and tensors on a device, ``Subset``s of these, and a ``Staged`` with ``cache="device"`` that is full.
A worker process could not touch them: CUDA cannot be used in a forked child.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from .gather import Gather
from .source import order
from .stage import batches, staged_in

Batch = Callable[[Any], Any]


class ResidentIter(_BaseDataLoaderIter):
    """Iterates over a loader in this process, whatever its number of workers.

    Args:
        loader: torch's ``DataLoader`` or a subclass.
        batch: a list of indices to a batch.
    """

    def __init__(self, loader: Any, batch: Batch) -> None:
        super().__init__(loader)
        self._batch = batch
        self._sampler_iter = order(self._index_sampler) or self._sampler_iter

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._sampler_iter = order(self._index_sampler) or self._sampler_iter

    def _next_data(self) -> Any:
        return self._batch(next(self._sampler_iter))

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
    if not Gather.fits(dataset, collate, True) or not any(map(off_host, _tensors(dataset))):
        return None
    inner: Any = dataset
    many = getattr(inner, "__getitems__", None)

    def loop(indices: Any) -> Any:
        return collate(many(indices) if many else [inner[i] for i in indices])

    return Gather(dataset, loop)


def settled(loader: Any) -> Any:
    """The iterator of a loader with persistent workers for its next epoch; None if workers are to be started anew.

    Its data may have moved to the device since the last one, or may not be there any more.
    """
    before, there = loader._iterator, resident(loader)
    if isinstance(before, ResidentIter) == (there is not None):
        return before
    before._shutdown_workers()
    if there is None:
        return None
    # Persistent workers draw no seed for their second epoch, so neither does what stands in their place.
    generator = torch.default_generator if loader.generator is None else loader.generator
    state = generator.get_state()
    it = ResidentIter(loader, there)
    generator.set_state(state)
    return it


def off_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a device."""
    return tensor.device.type not in ("cpu", "meta")


def _tensors(dataset: Any) -> list[torch.Tensor]:
    if type(dataset) is Subset:
        dataset = dataset.dataset
    held = dataset.tensors if type(dataset) is TensorDataset else [dataset]
    return [t for t in held if isinstance(t, torch.Tensor)]
