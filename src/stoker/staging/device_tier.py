"""The tier on the device: a set that is all in memory is copied there, and its batches are made there.

What fits lies on the device: nothing crosses the bus any more but indices. Of a set that does not fit whole the rest
stays where it is, in memory that is now page-locked, and its samples are copied one by one by the device itself,
straight from the cache into the batch: nobody gathers them first. That pays for large samples, and is measured before
it is done. Workers cannot do either, so the process that owns the device does.
"""

from __future__ import annotations

import ctypes
import math
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core import resources
from ..core.errors import StokerWarning
from .store.tiers import Tiers

if TYPE_CHECKING:
    from ..device.cuda import Runtime
    from ..device.pinned_slots import Locker
    from ..workers.gather import Select
    from .dataset import Staged

SHARE = 0.5  # of the device's free memory: the model wants the rest
TRIES, ROWS = 5, 64  # how often, and with how many samples, the two ways are compared


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
    return int(ask(device)[0]) if ask is not None else resources.memory_available()


def runtime() -> Runtime | None:
    """What locks memory for the device, where something does."""
    from ..loader.pin_setup import runtime as found  # only who has a device asks

    return found()


def wait(device: torch.device) -> None:
    """Until the device has done all it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Column:
    """One part of every sample: the first rows on the device, the others in memory that is page-locked.

    Args:
        table: of the store, a row for each sample.
        device: where to.
        rows: how many of them go there.
        locker: locks the rest.

    Raises:
        torch.OutOfMemoryError: the device has less than it said.
        OSError: the memory cannot be locked.
    """

    def __init__(self, table: torch.Tensor, device: torch.device, rows: int, locker: Locker | None) -> None:
        self._device, self._rows, self._table = device, rows, table
        self._near = table[:rows].to(device)
        self._whole = rows == len(table)
        if not self._whole:
            assert locker is not None
            # Unlocked when this dies, before the mapping that it holds can.
            held: Any = table.as_strided((table.nbytes // table.element_size(),), (1,)).view(torch.uint8).numpy()
            self._memory = (ctypes.c_ubyte * held.nbytes).from_buffer(held)
            locker.lock(self._memory)
            if not locker.is_locked(self._memory):
                raise OSError(locker.failed or "more than may be page-locked, a quarter of the memory granted")

    def select(self, rows: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Rows, on the device. ``there``: the same numbers, on the device."""
        if self._whole:
            return torch.index_select(self._near, 0, there)
        table = self._table
        strides = (math.prod(table.shape[1:]), *table.stride()[1:])
        out = torch.empty_strided((len(rows), *table.shape[1:]), strides, dtype=table.dtype, device=self._device)
        numbers = rows.tolist()
        near = [k for k, row in enumerate(numbers) if row < self._rows]
        if near:
            at = torch.tensor(near).to(self._device, non_blocking=True)
            out.index_copy_(0, at, torch.index_select(self._near, 0, there.index_select(0, at)))
        for k, row in enumerate(numbers):
            if row >= self._rows:
                out[k].copy_(table[row], non_blocking=True)
        return out


class Columns:
    """A store's columns on a device, as far as they fit there.

    Args:
        store: complete.
        device: where to.
        why: why they are not to go there; "".

    Attributes:
        why: why they are not there; "" where they are.
        locked: bytes that are in page-locked memory instead.
    """

    def __init__(self, store: Tiers, device: torch.device, why: str = "") -> None:
        self.device = device
        self.locked = 0
        self._columns: list[Column] = []
        self.why = why or self._place(store)
        if self.why:
            self._columns, self.locked = [], 0

    def _place(self, store: Tiers) -> str:
        first = store.stores[0]
        if len(store.stores) > 1 or first.layout is None or not first.columns:
            return "samples are not all of one shape and kind"
        tables = first.columns
        wanted, most = sum(t.nbytes for t in tables), int(SHARE * free_bytes(self.device))
        short = f"{wanted:,} bytes are wanted, and half of what is free on {self.device} is {most:,}"
        locker = None
        if wanted > most:
            found = runtime()
            if found is None:
                return short
            slower = _slower(tables, self.device)
            if slower:
                return f"{short}; {slower}"
            from ..device.pin_policy import SHARE as OF_MEMORY
            from ..device.pinned_slots import Locker

            locker = Locker(found, resources.memory_of_rank() // OF_MEMORY)
        placed: dict[int, Column] = {}
        try:
            for j in sorted(range(len(tables)), key=lambda j: tables[j].nbytes):  # labels first: copies of bytes cost
                rows = min(len(tables[j]), most // max(1, tables[j][0].nbytes))
                placed[j] = Column(tables[j], self.device, rows, locker)
                most -= rows * tables[j][0].nbytes
                self.locked += (len(tables[j]) - rows) * tables[j][0].nbytes
        except torch.OutOfMemoryError as e:
            return f"{self.device} is out of memory: {str(e).splitlines()[0]}"
        except OSError as e:
            return f"{short}; the rest cannot be page-locked: {e}"
        self._columns = [placed[j] for j in range(len(tables))]
        return ""

    def describe(self) -> str:
        """Where batches are made, in words."""
        rest = f", {self.locked:,} bytes of the samples lie in page-locked memory" if self.locked else ""
        return self.why or f"batches are made on {self.device}{rest}"

    def select(self, _: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """As ``gather.select``, from the columns that are there."""
        there = rows.to(self.device, non_blocking=True)
        return [c.select(rows, there) for c in self._columns]


def _slower(tables: list[torch.Tensor], device: torch.device) -> str:
    """Whether samples copied one by one take longer than gathered and copied at once, both from page-locked memory;
    in words, "" where they do not."""
    table = max(tables, key=lambda t: t.nbytes)
    some = table[: 4 * ROWS].contiguous()
    if device.type != "cpu":
        some = some.pin_memory()
    batch = some[:ROWS]
    staging = torch.empty_like(batch, pin_memory=some.is_pinned())
    out = torch.empty_like(batch, device=device)
    singly, together = math.inf, math.inf
    for _ in range(TRIES):
        rows = torch.from_numpy(np.random.default_rng().integers(0, len(some), len(batch)))
        wait(device)
        began = time.perf_counter()
        for k, row in enumerate(rows.tolist()):
            out[k].copy_(some[row], non_blocking=True)
        wait(device)
        between = time.perf_counter()
        torch.index_select(some, 0, rows, out=staging)
        out.copy_(staging, non_blocking=True)
        wait(device)
        singly, together = min(singly, between - began), min(together, time.perf_counter() - between)
    if singly <= together:
        return ""
    return (
        f"and {table[0].nbytes:,} bytes of a sample take {singly / len(batch) * 1e6:.1f} us from page-locked memory, "
        f"{together / len(batch) * 1e6:.1f} us where they are gathered first"
    )


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
        if not staged.is_exact:
            why = "augment= is called sample by sample; augment_batch= is not"
        staged._there = Columns(store, where, why)
        if staged._there.why:
            warnings.warn(f'cache="device" stays in RAM: {staged._there.why}.', StokerWarning, stacklevel=6)
    return None if staged._there.why else staged._there.select
