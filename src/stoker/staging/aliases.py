"""Detects values that share memory, which cached copies would not."""

from __future__ import annotations

import array
import datetime
import enum
import itertools
import pathlib
import re
import types
from collections.abc import Iterable
from typing import Literal, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.compare import IDENTICAL
from ..core.object_tree import children, walk
from ..core.types import Attributes
from .store.encode import CacheError

NUMBERS_AND_TEXT = (int, float, complex, str, bytes, bool, type(None), np.generic)
DESCRIPTIONS = (type, range, np.dtype, torch.dtype, torch.device, pathlib.PurePath, enum.Enum, types.ModuleType)
PLAIN = frozenset((int, float, str, bytes, bool, type(None)))  # exact types: a subclass may have attributes
FEW, MOST_WORK = 16, 10_000  # arrays compared in pairs; see ``numpy.shares_memory``
DEPTH = 6  # nesting depth of containers and objects
WITHOUT_STATE = (tuple, frozenset, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
Array: TypeAlias = torch.Tensor | NDArray[np.generic]
IMMUTABLE = (*NUMBERS_AND_TEXT, *DESCRIPTIONS, datetime.date, datetime.timedelta)


def share_memory(a: object, b: object) -> bool:
    """Whether two results of the same call share memory. If so, it belongs to the dataset."""
    if isinstance(a, (torch.Tensor, np.ndarray)) and isinstance(b, (torch.Tensor, np.ndarray)):
        return _overlap(_range_of(a), _range_of(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a is b or any(share_memory(a[k], b.get(k)) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return (a is b and isinstance(a, list)) or any(map(share_memory, a, b))
    return a is b and not isinstance(a, (*IMMUTABLE, *IDENTICAL))


class OtherNames:
    """Finds under which names a dataset holds an object or the memory of an array: ``self.cur = self.state[1:2]``.
    ``scopes``: global variables of its functions."""

    def __init__(self, dataset: object, scopes: Iterable[Attributes]) -> None:
        self._names: dict[int, set[str]] = {}  # by id of an object
        self._ranges: list[tuple[tuple[int, int], str]] = []
        self._held: list[object] = []  # keeps ids from being used again
        for path, x in walk(dataset):
            last = re.findall(r"[A-Za-z_]\w*", path)[-1]
            for step, value in children(x):
                self._add(step[1:] if step.startswith(".") else last, value)
        for scope in {id(scope): scope for scope in scopes}.values():
            for name, value in list(scope.items()):
                self._add(name, value)

    def _add(self, name: str, value: object) -> None:
        memory = _memory_of(value)
        if memory is not None:
            self._ranges.append((memory, name))
        elif not isinstance(value, (*IMMUTABLE, *WITHOUT_STATE)):
            self._held.append(value)
            self._names.setdefault(id(value), set()).add(name)

    def of(self, value: object) -> set[str]:
        """Names of a value."""
        memory = _memory_of(value)
        if memory is None:
            return self._names.get(id(value), set())
        return {name for known, name in self._ranges if _overlap(memory, known)}

    def more(self, names: set[str]) -> set[str]:
        """These names, and others of the same values."""
        groups = [found for found in self._names.values() if not names.isdisjoint(found)]
        memories = [memory for memory, name in self._ranges if name in names]
        others = {name for known, name in self._ranges if any(_overlap(known, memory) for memory in memories)}
        return names.union(others, *groups)


def _memory_of(value: object) -> tuple[int, int] | None:
    """Address range of an array, tensor or buffer; None for anything else."""
    if isinstance(value, (memoryview, bytearray, array.array)):
        try:
            value = np.frombuffer(value, np.uint8)
        except ValueError:  # with gaps
            return None
    return _range_of(value) if isinstance(value, (torch.Tensor, np.ndarray)) else None


def hold_one_object(a: object, b: object, depth: int = DEPTH) -> bool:
    """Whether two results of the same call hold one object: the dataset's. Cached copies miss later changes."""
    if isinstance(a, (*IMMUTABLE, *IDENTICAL, torch.Tensor, np.ndarray)) or type(a) is not type(b) or not depth:
        return False
    if isinstance(a, (list, tuple)):
        return any(hold_one_object(x, y, depth - 1) for x, y in zip(a, b, strict=False))  # type: ignore[call-overload]
    if a is b and not isinstance(a, dict):
        return True
    inside, other = (x if isinstance(x, dict) else getattr(x, "__dict__", {}) for x in (a, b))
    return any(hold_one_object(inside[k], other.get(k), depth - 1) for k in inside)


def refuse_aliases(state: object, dataset: object) -> None:
    """Checks that no two variables are the same object or share memory, and that none is the dataset itself: cached
    copies would separate them. Raises CacheError otherwise.

    Repeated references within a pickled object (such as a table row) are fine: ``pickle`` preserves them."""
    seen: dict[int, tuple[object, object]] = {}  # by id: a value, and the pickled object that contains it
    ranges: list[tuple[tuple[int, int], int, Array]] = []
    waiting: list[tuple[object, object]] = [(state, None)]
    while waiting:
        x, holder = waiting.pop()
        if dataset is not None and x is dataset:
            raise CacheError("a variable before the cut is the dataset itself")
        if isinstance(x, IMMUTABLE) or callable(x):
            continue
        if id(x) in seen and not isinstance(x, (tuple, frozenset)):
            if holder is None or seen[id(x)][1] is not holder:
                raise CacheError("two variables before the cut refer to the same object")
            continue
        seen[id(x)] = x, holder
        inside: Iterable[object] = ()
        if isinstance(x, (tuple, list, set, frozenset)):
            inside = () if PLAIN.issuperset(map(type, x)) else x
        elif isinstance(x, dict):
            inside = x.values()
        elif isinstance(x, (torch.Tensor, np.ndarray)):
            ranges.append((_range_of(x), len(ranges), x))
        else:
            inside = getattr(x, "__dict__", {}).values()
            holder = x if holder is None else holder
        waiting += [(value, holder) for value in inside]
    ranges.sort(key=lambda found: found[:2])
    pairs = itertools.combinations(ranges, 2) if len(ranges) <= FEW else itertools.pairwise(ranges)
    if any(_overlap(one[0], other[0]) and _share(one[2], other[2]) for one, other in pairs):
        raise CacheError("two variables before the cut share memory")


def _share(a: Array, b: Array) -> bool:
    """Whether two arrays or tensors share an element: ``boxes[:, :4]`` and ``boxes[:, 4]`` do not."""
    try:
        most = cast("Literal[0]", MOST_WORK)  # NumPy's stubs allow two values only
        return np.shares_memory(np.asarray(a), np.asarray(b), max_work=most)
    except Exception:  # too hard to tell, or no array
        return True


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _range_of(x: Array) -> tuple[int, int]:
    """Address range of an array or tensor."""
    if isinstance(x, np.ndarray):
        first = int(x.__array_interface__["data"][0])
        steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        return (first + low, first + high + x.itemsize) if x.size else (0, 0)
    if x.layout is not torch.strided or not x.numel():
        return 0, 0
    first = x.data_ptr()
    last = first + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) * x.element_size()
    return first, last + x.element_size()
