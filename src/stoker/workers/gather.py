"""Makes a batch by one gather instead of a loop, for datasets that are tables of rows.

For ``TensorDataset``, a tensor, a NumPy array or memory map, or a ``Subset`` of one of these, with ``default_collate``,
a batch is an ``index_select`` by its indices. This excludes derived classes, whose ``__getitem__`` may do anything, and
datasets for which the gathered first batch differs from the loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils import collate as torch_collate

from ..core.compare import equal_bits
from ..core.types import Batch, Index
from .collate import maps_are_own

Select = Callable[[list[torch.Tensor], torch.Tensor], list[torch.Tensor]]
_OWN = (TensorDataset.__getitem__, Subset.__getitem__)
_KNOWN = ("torch.utils.data._utils.collate", "stoker.workers.collate")
_INT = np.dtype(np.int64)


def select(tables: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns these rows of each table, as new tensors on the table's device."""
    return [torch.index_select(table, 0, rows.to(table.device, non_blocking=True)) for table in tables]


class RowGather:
    """Makes the batches of a dataset that ``fits`` by ``index_select``. ``loop`` makes a batch as torch does: the first
    batch, and any that cannot be gathered. ``select`` returns rows of tables; a worker's puts them into a slot."""

    def __init__(self, dataset: object, loop: Callable[[list[Index]], Batch], select: Select = select) -> None:
        self._subset = dataset if type(dataset) is Subset else None
        self._data: Any = dataset.dataset if type(dataset) is Subset else dataset
        self._loop, self._select = loop, select
        self._source: object = None
        self._tables: list[torch.Tensor] | None = None
        self._checked = False
        self.gathered = 0

    @staticmethod
    def fits(dataset: object, collate_fn: object, auto_collation: bool) -> bool:
        if not auto_collation or collate_fn is not torch_collate.default_collate or not maps_are_own():
            return False
        stack = torch_collate.default_collate_fn_map[torch.Tensor]
        if (TensorDataset.__getitem__, Subset.__getitem__) != _OWN or stack.__module__ not in _KNOWN:
            return False  # other code has replaced methods of torch's classes
        if type(dataset) is Subset:
            dataset = dataset.dataset
        return type(dataset) in (TensorDataset, torch.Tensor, np.ndarray, np.memmap)

    def __call__(self, indices: list[Index]) -> Batch:
        """Makes the batch for a list of indices."""
        if not self._checked:
            return self._first(indices)
        if self._tables is not None and self._source is self._sources():
            try:
                rows = self._rows(indices)
                if rows is not None:
                    batch = self._batch(self._select(self._tables, rows))
                    self.gathered += 1
                    return batch
            except Exception:  # an index is negative, out of range, or not an integer: the loop handles it
                pass
        return self._loop(indices)

    def _sources(self) -> Any:
        return self._data.tensors if type(self._data) is TensorDataset else self._data

    def _rows(self, indices: Sequence[Index]) -> torch.Tensor | None:
        if self._subset is not None:
            indices = [self._subset.indices[i] for i in indices]
        rows = np.array(indices)
        return torch.from_numpy(rows) if rows.dtype == _INT and rows.ndim == 1 else None

    def _batch(self, selected: list[torch.Tensor]) -> Batch:
        return selected if type(self._data) is TensorDataset else selected[0]

    def _first(self, indices: list[Index]) -> Batch:
        """Makes the first batch both ways. If the results are the same, later batches are gathered."""
        batch = self._loop(indices)
        self._checked = True
        try:
            source = self._source = self._sources()
            data = source if type(source) is tuple else [source]
            tables = [torch.from_numpy(t) if isinstance(t, np.ndarray) else t for t in data]
            rows = self._rows(indices)
            may_gather = all(_plain(t) and (t.is_cpu or self._select is select) for t in tables)
            if rows is not None and may_gather and equal_bits(batch, self._batch(select(tables, rows))):
                self._tables = tables
        except Exception:  # torch cannot read the array; the loop has made the batch
            pass
        return batch


def _plain(t: torch.Tensor) -> bool:
    simple = type(t) is torch.Tensor and t.is_contiguous() and not t.requires_grad and t.ndim > 0
    return simple and not t.is_quantized  # reading its bytes crashes the process
