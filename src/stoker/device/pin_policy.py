"""Decides a loader's pinning: whether page-locked memory pays here, and whether to lock slots or copy batches.

The copy engine can read a page-locked batch while the CPU goes on (CUDA C++ Best Practices Guide, "Pinned Memory").
Locked memory cannot be swapped out or used by other processes, so slots are locked within a budget.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..core import resources
from ..core.options import parse_bytes
from ..core.warn import warn_user
from .accelerator import accelerator
from .pinned_slots import Locker

if TYPE_CHECKING:
    from .cuda import Cuda

SHARE = 4  # without ``budget=``, at most a quarter of the granted memory is locked


@dataclass(frozen=True)
class Choice:
    """Whether to pin, and why."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"pin_memory={self.on}: {self.why}"


def kind() -> str | None:
    """Returns torch's name for the accelerator; None without one."""
    device = accelerator()
    return None if device is None else device.type


def decide(refused: str = "") -> Choice:
    """Decides ``pin_memory="auto"``: on for an accelerator with its own memory. ``refused``: the system's reason for
    refusing to lock a page; "" if it did not refuse."""
    device = kind()
    if device is None:
        return Choice(False, "there is no accelerator")
    if unified(device):
        return Choice(False, f"{device} shares its memory with the processor")
    if refused:
        return Choice(False, f"memory cannot be page-locked here: {refused}")
    return Choice(True, f"{device} reads page-locked memory on its own")


def unified(accelerator: str) -> bool:
    if accelerator == "mps":
        return True
    if accelerator == "cuda":
        return bool(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "is_integrated", False))
    return False


class Pinning:
    """A loader's decisions about pinning, kept between its iterators."""

    def __init__(self) -> None:
        self.auto = False  # ``pin_memory="auto"`` was asked for
        self.choice: Choice | None = None  # the last decision
        self.locker: Locker | None = None  # locks slots; None if none can be locked, or before the first ``lock``
        self.refused = ""  # why no slot can be locked; else ""
        self._asked = False

    def decide(self) -> bool:
        """Decides whether to pin under ``pin_memory="auto"``."""
        self.choice = decide(self.refused)
        return self.choice.on

    def lock(self, asked: int | float | str | None) -> Locker | None:
        """Returns the loader's locker, made on first use. Warns once if slots cannot be locked. ``asked``: the loader's
        ``budget=``; None for a quarter of the granted memory."""
        if self._asked:
            return self.locker
        self._asked = True
        found = runtime()
        if found is None:
            return None
        granted = resources.memory_of_rank()
        budget = granted // SHARE if asked is None else parse_bytes(asked, granted)
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
    """Returns the device's runtime if slots may be locked for it, else None."""
    if kind() != "cuda" or not getattr(torch.version, "cuda", None):
        return None  # ROCm, XPU: torch pins there
    from .cuda import Cuda  # imported only on machines with CUDA

    try:
        return Cuda()
    except (RuntimeError, AttributeError):
        return None


def _probe(found: Cuda) -> str:
    """Locks and unlocks one page. Returns the reason for a failure, or ""."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    memory = (ctypes.c_ubyte * mmap.PAGESIZE).from_buffer(page)
    address = ctypes.addressof(memory)
    failed = found.register(address, mmap.PAGESIZE)
    if not failed:
        found.unregister(address)
    return failed
