"""The cache on the device: samples that are all in memory are copied there, and their batches are made there.

Nothing crosses the bus any more but indices. It is all or nothing: samples that do not all fit stay in memory. Workers
cannot do this, so the process that owns the device does.
"""

from __future__ import annotations

import torch

from ..core import resources
from ..device.accelerator import current_device
from .store.tiers import TieredStore

SHARE = 0.5  # of the device's free memory: the model wants the rest
accelerator = current_device


def free_bytes(device: torch.device) -> int:
    """Memory that the device has to spare; where it has none of its own, the machine's."""
    ask = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    return int(ask(device)[0]) if ask is not None else resources.memory_available()


class DeviceTier:
    """A store's columns on a device.

    Args:
        store: complete.
        device: where to.
        why: why they are not to go there; "".

    Attributes:
        why: why they are not there; "" where they are.
    """

    def __init__(self, store: TieredStore, device: torch.device, why: str = "") -> None:
        self.device = device
        self._columns: list[torch.Tensor] = []
        self.why = why or self._copy(store)

    def _copy(self, store: TieredStore) -> str:
        first = store.stores[0]
        if len(store.stores) > 1 or first.layout is None or not first.columns:
            return "samples are not all of one shape and kind"
        wanted, most = sum(t.nbytes for t in first.columns), int(SHARE * free_bytes(self.device))
        if wanted > most:
            return f"{wanted:,} bytes are wanted, and half of what is free on {self.device} is {most:,}"
        try:
            self._columns = [t.to(self.device, copy=True) for t in first.columns]
        except torch.OutOfMemoryError as e:
            return f"{self.device} is out of memory: {str(e).splitlines()[0]}"
        return ""

    def describe(self) -> str:
        """Where batches are made, in words."""
        return self.why or f"batches are made on {self.device}"

    def select(self, _: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """As ``gather.select``, from the columns on the device."""
        there = rows.to(self.device, non_blocking=True)
        return [torch.index_select(column, 0, there) for column in self._columns]
