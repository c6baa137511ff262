"""Registry of caches whose memory can be freed at any time. Code that runs short of memory asks here first."""

from __future__ import annotations

import weakref
from typing import Protocol


class Holder(Protocol):
    """A holder of memory that nobody needs."""

    def give_back(self, reason: str) -> int:
        """Frees all of it permanently. ``reason``: readable text. Returns the bytes freed, 0 if there were none."""


_holders: set[weakref.ref[Holder]] = set()


def add(holder: Holder) -> None:
    """Registers a holder for as long as it lives."""
    _holders.add(weakref.ref(holder, _holders.discard))


def give_back(reason: str) -> int:
    """Has every holder of this process free its memory. Returns the bytes freed."""
    holders = [ref() for ref in _holders.copy()]  # copied in one step: other threads may add holders
    return sum(holder.give_back(reason) for holder in holders if holder is not None)
