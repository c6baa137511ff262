"""What a loader's pinning is to be: whether page-locked memory pays here, and by locked slots or by a copy.

It lets the copy engine read a batch while the processor goes on (CUDA C++ Best Practices Guide, "Pinned Memory").
Locked memory cannot be swapped, and no other process can have it, so it has a budget. Where it brings nothing it is
not locked.
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
from .accelerator import accelerator, copy_rates
from .pinned_slots import Locker

if TYPE_CHECKING:
    from .cuda import Cuda

SHARE = 4  # at most a quarter of the memory that is granted is locked, unless asked
MIN_FREE = 1 << 30  # bytes of memory that stay free beside what is locked
MIN_GAIN = 1.05  # times as fast a copy from page-locked memory has to be
MEASURED_FROM = 1 << 12  # bytes: below, a copy is all overhead and measuring says nothing


@dataclass(frozen=True)
class Choice:
    """Whether to pin, and why."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"pin_memory={self.on}: {self.why}"


def decide(batch_bytes: int = 0, batches: int = 1, refused: str = "", gain: float | None = None) -> Choice:
    """The decision. The first reason that applies is given.

    Args:
        batch_bytes: of the largest batch so far; 0 before the first.
        batches: how many may be locked at a time: those made ahead and those the consumer keeps.
        refused: what the system said when a page was to be locked; "" where it was locked.
        gain: how many times as fast a batch is copied from page-locked memory, measured; None before that.
    """
    device, need = kind(), batches * rounded(batch_bytes)
    if device is None:
        return Choice(False, "there is no accelerator")
    if unified(device):
        return Choice(False, f"{device} shares its memory with the processor")
    if refused:
        return Choice(False, f"no page can be locked here: {refused}")
    most, free = resources.memory_of_rank() // SHARE, resources.memory_available()
    if need > most:
        return Choice(False, f"{_mb(need)} would be locked, and a quarter of the memory granted is {_mb(most)}")
    if need and need + MIN_FREE > free:
        return Choice(False, f"{_mb(need)} would be locked, and {_mb(free)} are free")
    if gain is not None and gain < MIN_GAIN:
        return Choice(
            False, f"batches of {batch_bytes:,} bytes are copied {gain:.2f} times as fast, so it brings nothing"
        )
    measured = "" if gain is None else f"; batches are copied {gain:.1f} times as fast"
    return Choice(True, f"{device} reads page-locked memory on its own{measured}")


def rounded(nbytes: int) -> int:
    """What torch's allocator locks for ``nbytes``: the next power of two (``CachingHostAllocator``)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def kind() -> str | None:
    """torch's name of the accelerator; None without one."""
    device = accelerator()
    return None if device is None else device.type


def unified(accelerator: str) -> bool:
    """Whether the device has no memory of its own."""
    if accelerator == "mps":
        return True
    if accelerator == "cuda":
        return bool(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "is_integrated", False))
    return False


def gain(nbytes: int, accelerator: str) -> float | None:
    """How many times as fast a batch of ``nbytes`` reaches the device from page-locked memory. Takes milliseconds.

    None where it cannot be measured.
    """
    try:
        plain, pinned = copy_rates(torch.device(accelerator), nbytes)
        return pinned / plain
    except RuntimeError:  # out of memory, on either side
        return None


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


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
        self.choice: Choice | None = None
        self.locker: Locker | None = None
        self.refused = ""
        self._asked = False
        self._gain: tuple[int, float | None] | None = None

    def decide(self, batch_bytes: int, batches: int) -> Choice:
        """``pin_memory="auto"``: whether to pin. See the function ``decide``."""
        if kind() is not None and batch_bytes >= MEASURED_FROM and self._gain is None:
            self._gain = batch_bytes, gain(batch_bytes, str(kind()))
        measured = None if self._gain is None else self._gain[1]
        self.choice = decide(batch_bytes, batches, self.refused, measured)
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
