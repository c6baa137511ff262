"""Methods of other people's classes that are replaced for a while, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """What was replaced.

    Where somebody else has wrapped a replacement meanwhile, putting back the original would take theirs away. That one
    stays, and is not made a second time: it has to do nothing while nobody wants it.

    Attributes:
        late: methods that call what stands here, by class and name, so that they themselves need not be replaced.

    Example:
        >>> class A:
        ...     def f(self):
        ...         return 1
        >>> patches = Patches()
        >>> patches.put(A, "f", lambda f: lambda self: f(self) + 1)
        >>> A().f()
        2
        >>> patches.undo()
        >>> A().f()
        1
    """

    def __init__(self) -> None:
        self.late: dict[tuple[type, str], Any] = {}
        self._put: dict[tuple[Any, str], tuple[Any, Any]] = {}  # what stood there itself, and what stands there now

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces ``owner.name`` by what ``make`` makes of it, once."""
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
        """Puts back what is still there as it was put."""
        for (owner, name), (own, now) in list(self._put.items()):
            if now is None or vars(owner).get(name) is not now:
                continue
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
            del self._put[owner, name]


def subclasses(cls: Any) -> list[Any]:
    """All there are now, of any depth."""
    found = [s for direct in cls.__subclasses__() for s in (direct, *subclasses(direct))]
    return list(dict.fromkeys(found))
