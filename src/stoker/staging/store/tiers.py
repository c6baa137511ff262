"""Several stores one behind the other: memory first, and what does not fit there on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .encode import Leaf
from .store import Store, StoreStats, describe

TIER = 1 << 56  # above it a place says which store it is in


class TieredStore:
    """Stores that look like one. A sample is let into the first that has room, and stays there.

    Args:
        stores: the nearest first; at most 64.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)

    @property
    def usable(self) -> bool:
        """Whether anything may be served or let in."""
        return any(s.usable for s in self.stores)

    def shut(self, reason: str) -> bool:
        """Nothing is served or let in from now on. Returns whether this call did it."""
        done = [s.shut(reason) for s in self.stores]  # all of them
        return any(done)

    def where(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where each sample is, 0 where it is not in; for ``read`` and ``together``."""
        first = self.stores[0]
        at = first.where(indices) if first.usable else np.zeros(len(indices), np.int64)
        for k, store in enumerate(self.stores[1:], 1):
            out = np.flatnonzero(at == 0)
            if len(out) and store.usable:
                found = store.where(indices[out])
                at[out] = found + np.sign(found) * k * TIER
        return at

    def read(self, at: int) -> Any:
        """The sample at a place; its memory is its own."""
        k, rest = divmod(abs(at), TIER)
        return self.stores[k].read(rest if at > 0 else -rest)

    def together(self, at: np.ndarray[Any, Any]) -> tuple[Store, list[torch.Tensor], torch.Tensor] | None:
        """The store, its columns and the rows of samples that are all rows of one store; else None."""
        least, most = int(at.min()), int(at.max())
        k = least // TIER
        if least <= 0 or most // TIER != k:
            return None
        store = self.stores[k]
        if store.layout is None or not store.columns:
            return None
        return store, store.columns, torch.from_numpy(at - (k * TIER + 1))

    def admit(self, samples: dict[int, tuple[str, list[Leaf]]], prepare_ns: int, keep_ns: int = 0) -> None:
        """Lets samples in as far as there is room."""
        for store in self.stores:
            if not samples:
                return
            if store.usable:
                samples = store.admit(samples, prepare_ns, keep_ns)
                prepare_ns = keep_ns = 0

    @property
    def account(self) -> StoreStats:
        """All of them in one."""
        each = [s.account for s in self.stores]
        last = each[-1]
        return last._replace(
            filled=sum(a.filled for a in each),
            nbytes=sum(a.nbytes for a in each),
            budget=sum(a.budget for a in each),
            prepared=each[0].prepared,
            prepare_s=each[0].prepare_s,
            keep_s=each[0].keep_s,
            reason=next((a.reason for a in each if "budget" not in a.reason and a.reason), last.reason),
        )

    def describe(self) -> str:
        """In words; each of them where there are several."""
        if len(self.stores) == 1:
            return describe(self.stores[0].account)
        return "; ".join(f"{s.medium.kind}: {describe(s.account)}" for s in self.stores)
