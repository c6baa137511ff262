"""The tier on the device: a set that is all in memory and small is copied there whole, and its batches are made there.

Nothing crosses the bus any more but indices. Workers cannot do that, so the process that owns the device does.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from .. import machine
from ..cache.tiers import Tiers
from ..errors import StokerWarning

if TYPE_CHECKING:
    from ..gather import Select
    from .staged import Staged

SHARE = 0.5  # of the device's free memory: the model wants the rest


def accelerator() -> torch.device | None:
    """The device that this process computes on, if it is another than the CPU."""
    found: Any = getattr(torch, "accelerator", None)  # torch < 2.6 has none; there it is CUDA or nothing
    if found is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    if not found.is_available():
        return None
    return torch.device(found.current_accelerator().type, found.current_device_index())


def free_bytes(device: torch.device) -> int:
    """Memory that the device has to spare; where it has none of its own, the machine's."""
    ask = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    return int(ask(device)[0]) if ask is not None else machine.memory_available()


class Columns:
    """A store's columns on a device.

    Args:
        store: complete.
        device: where to.
        why: why they are not to go there; "".

    Attributes:
        why: why they are not there; "" where they are.
    """

    def __init__(self, store: Tiers, device: torch.device, why: str = "") -> None:
        self.device = device
        self.tables: list[torch.Tensor] = []
        self.why = why or self._copy(store)

    def _copy(self, store: Tiers) -> str:
        first = store.stores[0]
        if len(store.stores) > 1 or first.layout is None or not first.columns:
            return "samples are not all of one shape and kind"
        wanted, most = sum(t.nbytes for t in first.columns), int(SHARE * free_bytes(self.device))
        if wanted > most:
            return f"{wanted:,} bytes are wanted, and half of what is free on {self.device} is {most:,}"
        try:
            self.tables = [t.to(self.device) for t in first.columns]
        except torch.OutOfMemoryError as e:
            self.tables = []
            return f"{self.device} is out of memory: {str(e).splitlines()[0]}"
        return ""

    def select(self, _: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """As ``gather.select``, from the columns that are there."""
        there = rows.to(self.device, non_blocking=True)
        return [torch.index_select(table, 0, there) for table in self.tables]


def select(staged: Staged, plain: bool) -> Select | None:
    """What makes a dataset's batches on the accelerator; None while they are made elsewhere.

    Args:
        staged: the dataset.
        plain: what collates them is torch's ``default_collate``.
    """
    store, where = staged._store, accelerator()
    if where is None or store is None or not store.usable or store.account.filled < staged.samples:
        return None
    if staged._there is None or staged._there.device != where:
        why = "" if plain else "collate_fn is not torch's default_collate"
        if staged._augment is not None:
            why = "augment= is called sample by sample; augment_batch= is not"
        staged._there = Columns(store, where, why)
        if staged._there.why:
            warnings.warn(f'cache="device" stays in RAM: {staged._there.why}.', StokerWarning, stacklevel=6)
    return None if staged._there.why else staged._there.select
