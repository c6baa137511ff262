"""What a loader's pinning is to be: whether page-locked memory pays here, and by locked slots or by a copy.

It lets the copy engine read a batch while the processor goes on (CUDA C++ Best Practices Guide, "Pinned Memory").
Locked memory cannot be swapped, and no other process can have it, so slots are locked within a budget.
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

SHARE = 4  # at most a quarter of the memory that is granted is locked, unless asked


@dataclass(frozen=True)
class Choice:
    """Whether to pin, and why."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"pin_memory={self.on}: {self.why}"


def kind() -> str | None:
    """torch's name of the accelerator; None without one."""
    device = accelerator()
    return None if device is None else device.type


def decide(refused: str = "") -> Choice:
    """``pin_memory="auto"``: on with an accelerator that has memory of its own. ``refused``: what the system said when
    a page was to be locked; "" where it was locked."""
    device = kind()
    if device is None:
        return Choice(False, "there is no accelerator")
    if unified(device):
        return Choice(False, f"{device} shares its memory with the processor")
    if refused:
        return Choice(False, f"no page can be locked here: {refused}")
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
        self.locker: Locker | None = None  # locks slots; None where none can be locked, or before the first ``lock``
        self.refused = ""  # why none can be locked; else ""
        self._asked = False

    def decide(self) -> bool:
        """``pin_memory="auto"``: whether to pin."""
        self.choice = decide(self.refused)
        return self.choice.on

    def lock(self, asked: int | float | str | None) -> Locker | None:
        """The loader's locker, made on first use. Where slots cannot be locked it warns once. ``asked``: the loader's
        ``budget=``; None: a quarter of what is granted."""
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
    """The device's runtime, where slots may be locked for it."""
    if kind() != "cuda" or not getattr(torch.version, "cuda", None):
        return None  # ROCm, XPU: torch pins there
    from .cuda import Cuda  # not every machine has one

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
