"""A complete cache on the device: columns are copied there once, and batches are gathered there.

After that only indices cross the bus. Samples that do not all fit stay in memory. The process that owns the device does
this; workers cannot.
"""

from __future__ import annotations

import torch

from ..core import resources
from ..core.warn import warn_user
from ..device.accelerator import current_device
from .store.store import Gone, Store

SHARE = 0.5  # of the device's free memory: the model wants the rest
accelerator = current_device


def free_bytes(device: torch.device) -> int:
    """Memory that the device has to spare; where it has none of its own, the machine's."""
    ask = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    return int(ask(device)[0]) if ask is not None else resources.memory_available()


class DeviceTier:
    """The columns of a complete store on a device. ``plain``: batches are made by torch's ``default_collate``;
    ``exact``: what is stored is the whole sample. ``why`` says why they are not there; "" where they are."""

    def __init__(self, store: Store, device: torch.device, plain: bool, exact: bool) -> None:
        self.device = device
        self._columns: list[torch.Tensor] = []
        if not exact:
            self.why = "augment= is called sample by sample; augment_batch= is not"
        elif not plain:
            self.why = "collate_fn is not torch's default_collate"
        else:
            self.why = self._copy(store)

    def _copy(self, store: Store) -> str:
        if store.layout is None or not store.columns:
            return "samples are not all of one shape and kind"
        wanted, most = sum(t.nbytes for t in store.columns), int(SHARE * free_bytes(self.device))
        if wanted > most:
            return f"{wanted:,} bytes are wanted, and half of what is free on {self.device} is {most:,}"
        try:
            self._columns = store.copied(lambda: [t.to(self.device, copy=True) for t in store.columns])
        except Gone:
            return store.reason
        except torch.OutOfMemoryError as e:
            return f"{self.device} is out of memory: {str(e).splitlines()[0]}"
        return ""

    def describe(self) -> str:
        return self.why or f"batches are made on {self.device}"

    def select(self, _: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """As ``gather.select``, from the columns on the device."""
        rows = rows.to(self.device, non_blocking=True)
        return [torch.index_select(column, 0, rows) for column in self._columns]


def tier_for(known: DeviceTier | None, store: Store, plain: bool, exact: bool) -> DeviceTier | None:
    """A complete store on the accelerator that is current; ``known``, if it is there already. None: there is none."""
    device = accelerator()
    if device is None:
        return None
    if known is not None and known.device == device:
        return known
    tier = DeviceTier(store, device, plain, exact)
    if tier.why:
        warn_user(f'cache="device" stays in RAM: {tier.why}.')
    return tier
