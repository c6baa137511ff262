"""Batches of a staged dataset: one gather where all samples lie in rows, else sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..core.types import Batch, Index
from ..workers.gather import select as new_tensors
from .compare import equal_bits
from .store.tiers import GatherPlan, TieredStore


class PreparedSamples(Protocol):
    """What batches are made of: ``dataset.Staged``."""

    augment_batch: Callable[[Any], Any] | None

    @property
    def is_exact(self) -> bool:
        """Whether what is kept is the whole sample."""
        ...

    def look_again(self) -> None:
        """An epoch begins: changes of the dataset are looked for."""
        ...

    def current(self, indices: Sequence[Any] = ()) -> TieredStore | None:
        """The store, unless the dataset has changed."""
        ...

    def where(self, store: TieredStore, indices: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """Where samples lie in the store; None where one is not in it."""
        ...

    def make(self, indices: Sequence[Any]) -> list[Any]:
        """Samples, from the store or made."""
        ...

    def is_on_device(self, select: Any) -> bool:
        """Whether ``select`` makes batches on the accelerator."""
        ...


class Batches:
    """Makes batches of indices, in a worker or without any.

    Args:
        staged: the dataset.
        collate: samples to a batch.
        select: rows of tables; a worker's puts them into a slot.
        plain: ``collate`` is torch's ``default_collate``, so stacking is all it does.
    """

    def __init__(self, staged: PreparedSamples, collate: Callable[[Any], Any], select: Any, plain: bool) -> None:
        self._staged, self._collate = staged, collate
        # What is augmented as a batch lies in a slot only when that is done; what is on a device never does.
        in_slot = staged.augment_batch is not None and not staged.is_on_device(select)
        self._select = new_tensors if in_slot else select
        self._gathers = plain and staged.is_exact
        self._checked = False
        staged.look_again()  # an epoch begins

    def __call__(self, indices: Any) -> Any:
        """The batch of a list of indices."""
        batch = self._batch(indices)
        augment = self._staged.augment_batch
        return batch if augment is None else augment(batch)

    def _batch(self, indices: Any) -> Any:
        staged = self._staged
        if self._gathers:
            store = staged.current()
            where = staged.where(store, indices) if store is not None else None
            found = store.gather_plan(where) if store is not None and where is not None and len(where) else None
            if found is not None:
                return self._gathered(found, indices)
        return self._collate(staged.make(indices))

    def _gathered(self, plan: GatherPlan, indices: Sequence[Index]) -> Batch:
        store, made, columns, rows = plan
        if not self._checked and not store.gather_checked:
            # Once both ways: this finds a collate function that was changed inside.
            batch = self._collate(self._staged.make(indices))
            self._gathers = store.gather_checked = equal_bits(batch, made.batch(new_tensors(columns, rows)))
            if not self._gathers:
                return batch
        self._checked = True
        return made.batch(self._select(columns, rows))
