"""Memory that this process can give back to the system at any time: caches. Whoever runs short asks here first."""

from __future__ import annotations

import weakref
from typing import Protocol


class Holder(Protocol):
    """Something that holds memory which nobody needs to have."""

    def give_back(self, reason: str) -> int:
        """Gives all of it back, for good. ``reason``: for people. Returns the bytes, 0 where there are none."""


_holders: set[weakref.ref[Holder]] = set()


def add(holder: Holder) -> None:
    """From now on it is asked, while it lives."""
    _holders.add(weakref.ref(holder, _holders.discard))


def give_back(reason: str) -> int:
    """Has every holder of this process give back its memory. Returns the bytes."""
    holders = [ref() for ref in _holders.copy()]  # copied in one step: other threads add some
    return sum(holder.give_back(reason) for holder in holders if holder is not None)
