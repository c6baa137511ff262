"""Memory that this process can give back to the system at any time: caches. Whoever runs short asks here first."""

from __future__ import annotations

import weakref
from typing import Protocol


class Holder(Protocol):
    """Something that holds memory which nobody needs to have."""

    def give_back(self, reason: str) -> int:
        """Gives all of it back, for good. ``reason``: for people. Returns the bytes, 0 where there are none."""


holders: weakref.WeakSet[Holder] = weakref.WeakSet()  # each enters itself


def give_back(reason: str) -> int:
    """Has every holder of this process give back its memory. Returns the bytes."""
    return sum(holder.give_back(reason) for holder in list(holders))
