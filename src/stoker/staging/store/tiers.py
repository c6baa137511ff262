"""Several stores, one behind the other: memory first, and what does not fit there on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.types import Sample
from .decode import Layout
from .store import Store, StoreStats
from .tables import Samples

TIER = 1 << 56  # a location is that in a store, plus this times the number of the store


class GatherPlan(NamedTuple):
    """A batch that is one gather.

    Attributes:
        store: that has all its samples.
        layout: of them.
        columns: of the store.
        rows: of the samples.
    """

    store: Store
    layout: Layout
    columns: list[torch.Tensor]
    rows: torch.Tensor


class TieredStore:
    """Several stores with the interface of one. A sample is stored in the first that has room, and stays there.

    Args:
        stores: the fastest first; at most 64.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)

    @property
    def usable(self) -> bool:
        """Whether samples may be served or stored."""
        return any(s.usable for s in self.stores)

    def shut(self, reason: str) -> bool:
        """From now on nothing is served or stored. Returns whether this call did it."""
        done = [s.shut(reason) for s in self.stores]  # all of them
        return any(done)

    def where(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The location of each sample, for ``read`` and ``gather_plan``; 0 where it is not stored."""
        first = self.stores[0]
        at = first.where(indices) if first.usable else np.zeros(len(indices), np.int64)
        for k, store in enumerate(self.stores[1:], 1):
            missing = np.flatnonzero(at == 0)
            if len(missing) and store.usable:
                found = store.where(indices[missing])
                at[missing] = found + np.sign(found) * k * TIER
        return at

    def read(self, location: int) -> Sample:
        """The sample at a location; its memory is its own."""
        k, rest = divmod(abs(location), TIER)
        return self.stores[k].read(rest if location > 0 else -rest)

    def gather_plan(self, locations: NDArray[np.int64]) -> GatherPlan | None:
        """How to gather samples that are all rows of one store; None where they are not."""
        least, most = int(locations.min()), int(locations.max())
        k = least // TIER
        if least <= 0 or most // TIER != k:
            return None
        store = self.stores[k]
        if store.layout is None or not store.columns:
            return None
        return GatherPlan(store, store.layout, store.columns, torch.from_numpy(locations - (k * TIER + 1)))

    def admit(self, samples: Samples, prepare_ns: int, keep_ns: int = 0) -> None:
        """Stores samples as far as there is room. See ``Store.admit``."""
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
            return self.stores[0].account.describe()
        return "; ".join(f"{s.medium.kind}: {s.account.describe()}" for s in self.stores)
