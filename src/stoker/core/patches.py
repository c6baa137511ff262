"""Temporarily replaces methods of foreign classes, and restores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Patches:
    """The methods that are currently replaced.

    If another library has wrapped a replacement in the meantime, restoring the original would remove its wrapper as
    well. Such a replacement stays in place and is not made again; it must do nothing while it is not wanted."""

    def __init__(self) -> None:
        # by class and name, functions that replaced methods look up here on each call: the method itself need not be
        # replaced
        self.late: dict[tuple[object, str], Any] = {}
        self._put: dict[tuple[object, str], tuple[object, object]] = {}  # the original and the new attribute

    def put(self, owner: object, name: str, make: Callable[[Any], object]) -> None:
        """Replaces ``owner.name`` by ``make(owner.name)``, unless it is replaced already."""
        key = owner, name
        if key in self._put:
            return
        if key in self.late:
            self.late[key] = make(self.late[key])
            self._put[key] = None, None
            return
        own = vars(owner).get(name)
        now = make(getattr(owner, name, None) if own is None else own)
        self._put[key] = own, now
        setattr(owner, name, now)

    def undo(self) -> None:
        """Restores the originals of replacements that are still in place."""
        for (owner, name), (own, now) in list(self._put.items()):
            if now is None or vars(owner).get(name) is not now:
                continue
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
            del self._put[owner, name]


def subclasses(cls: type[T]) -> list[type[T]]:
    """All subclasses of a class that exist now, direct and indirect."""
    found = [s for direct in cls.__subclasses__() for s in (direct, *subclasses(direct))]
    return list(dict.fromkeys(found))
