"""Stand-ins for what a transform will return, which show whether ``__getitem__`` does anything with it.

A dataset's code goes on after its transform, and nobody knows how. So it is handed a ``Mark`` in place of a result: any
use of it but passing it on raises ``Touched``. What comes out of ``__getitem__`` with the marks still in it has not
looked at them, and putting the real results in their places afterwards is the same as having had them all along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..cache.leaves import CacheError


class Touched(CacheError):
    """The code after the transform works on what it returned."""


class Called(NamedTuple):
    """A transform's call for a sample, of which the deterministic part is done.

    Attributes:
        place: how many calls for this sample came before it.
        hook: which transform.
        args, kwargs: what its random part is to be called with.
    """

    place: int
    hook: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Mark:
    """The place of a result: of which call, and which of its values. Nothing can be done with it.

    Attributes, items, comparisons, truth, length, conversion and ``isinstance`` raise ``Touched``.
    """

    __slots__ = ("_called", "_key")

    def __init__(self, called: Called, key: Any) -> None:
        object.__setattr__(self, "_called", called)
        object.__setattr__(self, "_key", key)

    def __getattribute__(self, name: str) -> Any:
        raise Touched(f"asks for .{name}")


_called: Callable[[Mark], Called] = Mark.__dict__["_called"].__get__
_key: Callable[[Mark], Any] = Mark.__dict__["_key"].__get__


def _refuses(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise Touched(f"calls {name}")

    return refuse


_OPERATORS = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]
_OTHERS = """lt le gt ge eq ne bool len iter next contains getitem setitem delitem call int float complex index neg pos
abs invert round hash str repr format bytes setattr delattr array array_interface array_struct enter exit reduce
reduce_ex copy deepcopy"""
_NAMES = [f"{side}{op}" for op in _OPERATORS for side in ("", "r", "i")] + _OTHERS.split()
for _name in _NAMES:
    setattr(Mark, f"__{_name}__", _refuses(_name))


def marked(called: Called) -> Any:
    """What stands for the result of a call: one mark, a tuple of marks, or a dict of marks."""
    if called.kwargs:
        return {k: Mark(called, k) for k in called.kwargs}
    n = len(called.args)
    return Mark(called, 0) if n == 1 else tuple(Mark(called, i) for i in range(n))


def replace(sample: Any, put: Callable[[Called, Any], Any]) -> Any:
    """A sample with something else in the place of each mark; what has no marks in it stays the object it was.

    Only tuples, named tuples, lists and dicts are looked into.
    """
    kind = type(sample)
    if kind is Mark:
        return put(_called(sample), _key(sample))
    if kind is dict:
        new = {k: replace(v, put) for k, v in sample.items()}
        return new if any(new[k] is not v for k, v in sample.items()) else sample
    if kind is list or isinstance(sample, tuple):
        items = [replace(v, put) for v in sample]
        if all(a is b for a, b in zip(items, sample, strict=True)):
            return sample
        return items if kind is list else kind(*items) if hasattr(kind, "_fields") else kind(items)
    return sample
