"""What a loader's pinning is to be, decided when an iterator is made: whether at all, and by locked slots or a copy."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

import torch

from ..core import resources
from ..core.options import parse_bytes
from ..core.warn import warn_user
from ..device import pin_policy
from ..device.pinned_slots import Locker

if TYPE_CHECKING:
    from ..device.cuda import Cuda

MEASURED_FROM = 1 << 12  # bytes: below, a copy is all overhead and measuring says nothing


class Pinning:
    """A loader's decisions about pinning, kept between its iterators.

    Attributes:
        auto: ``pin_memory="auto"`` was asked for.
        choice: the last decision.
        locker: locks slots; None where none can be locked, or before the first ``lock``.
        refused: why none can be locked; else "".
    """

    def __init__(self) -> None:
        self.auto = False
        self.choice: pin_policy.Choice | None = None
        self.locker: Locker | None = None
        self.refused = ""
        self._asked = False
        self._gain: tuple[int, float | None] | None = None

    def decide(self, batch_bytes: int, batches: int) -> pin_policy.Choice:
        """``pin_memory="auto"``: whether to pin.

        Args:
            batch_bytes: of the largest batch so far; 0 before the first.
            batches: that may be locked at a time.
        """
        if pin_policy.kind() is not None and batch_bytes >= MEASURED_FROM and self._gain is None:
            self._gain = batch_bytes, pin_policy.gain(batch_bytes, str(pin_policy.kind()))
        measured = None if self._gain is None else self._gain[1]
        self.choice = pin_policy.decide(pin_policy.facts(batch_bytes, batches, self.refused, measured))
        return self.choice

    def lock(self, asked: int | float | str | None) -> Locker | None:
        """The loader's locker, made on first use. Where slots cannot be locked it warns once.

        Args:
            asked: the loader's ``budget=``; None: a quarter of what is granted.
        """
        if self._asked:
            return self.locker
        self._asked = True
        found = runtime()
        if found is None:
            return None
        granted = resources.memory_of_rank()
        budget = granted // pin_policy.SHARE if asked is None else parse_bytes(asked, granted)
        self.refused = _probe(found)
        if self.refused:
            warn_user(
                f"Slots cannot be page-locked here ({self.refused}): batches are copied to page-locked memory, as "
                "torch does."
            )
            return None
        self.locker = Locker(found, budget)
        return self.locker


def runtime() -> Cuda | None:
    """The device's runtime, where slots may be locked for it."""
    if pin_policy.kind() != "cuda" or not getattr(torch.version, "cuda", None):
        return None  # ROCm, XPU: torch pins there
    from ..device.cuda import Cuda  # not every machine has one

    try:
        return Cuda()
    except (RuntimeError, AttributeError):
        return None


def _probe(found: Cuda) -> str:
    """Locks one page. Returns what went wrong."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    memory = (ctypes.c_ubyte * mmap.PAGESIZE).from_buffer(page)
    address = ctypes.addressof(memory)
    failed = found.register(address, mmap.PAGESIZE)
    if not failed:
        found.unregister(address)
    return failed
