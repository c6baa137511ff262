"""Batches of a ``Staged``: one gather if all samples are rows of one store, otherwise sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.compare import equal_bits
from ..core.types import Batch, Index, Sample
from ..workers.gather import Select
from ..workers.gather import select as new_tensors
from .store.store import Gone, Store


class PreparedSamples(Protocol):
    """What batches are made from: ``dataset.Staged``."""

    augment_batch: Callable[[Batch], Batch] | None

    @property
    def is_exact(self) -> bool: ...

    def look_again(self) -> None: ...

    def is_same(self, store: Store, indices: Sequence[Index], locations: Sequence[int]) -> bool: ...

    def current(self, indices: Sequence[Index] = ()) -> Store | None: ...

    def make(self, indices: Sequence[Index]) -> list[Sample]: ...


class Batches:
    """Makes batches from indices, with or without workers. ``select`` takes rows of columns; in a worker it writes them
    to a slot. ``plain``: ``collate`` is torch's ``default_collate``, which only stacks."""

    def __init__(
        self, staged: PreparedSamples, collate: Callable[[list[Sample]], Batch], select: Select, plain: bool
    ) -> None:
        self._staged = staged
        self._collate = collate
        # An augmented batch goes to a slot after augmentation.
        self._select = select if staged.augment_batch is None else new_tensors
        self._gathers = plain and staged.is_exact
        self._checked = False
        staged.look_again()

    def __call__(self, indices: Sequence[Index]) -> Batch:
        """Makes the batch for a list of indices."""
        batch = self._batch(indices)
        augment = self._staged.augment_batch
        return batch if augment is None else augment(batch)

    def _batch(self, indices: Sequence[Index]) -> Batch:
        staged = self._staged
        store = staged.current(indices) if self._gathers else None
        where = store.find(indices) if store is not None else None
        rows = store.rows_at(where) if store is not None and where is not None and len(where) else None
        if store is None or rows is None:
            return self._collate(staged.make(indices))
        return self._gathered(store, rows, indices, where)

    def _gathered(
        self, store: Store, rows: torch.Tensor, indices: Sequence[Index], where: NDArray[np.int64] | None
    ) -> Batch:
        made, columns = store.layout, store.columns
        assert made is not None
        if not self._checked and not store.gather_checked:
            # Make the first one both ways: detects a collate function that was modified.
            batch = self._collate(self._staged.make(indices))
            try:
                gathered = made.batch(store.copied(lambda: new_tensors(columns, rows)))
            except Gone:
                return batch
            self._gathers = store.gather_checked = equal_bits(batch, gathered)
            if not self._gathers:
                return batch
        self._checked = True
        if where is not None and not self._staged.is_same(store, indices, where.tolist()):
            return self._collate(self._staged.make(indices))
        try:
            return made.batch(store.copied(lambda: self._select(columns, rows)))
        except Gone:
            return self._collate(self._staged.make(indices))
