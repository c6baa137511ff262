"""Looks into a dataset, by the paths of its attributes: what is big, what changed, what cannot be pickled."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch

DEPTH = 4
LOOK_DEPTH = 8  # a Subset of a dataset with a Compose of transforms with arguments
NODES = 20_000  # that one look takes in
WHOLE = 10_000  # plain items of a container that are compared as a whole
WIDTH = 200  # attributes or items of one object that are looked at
MANY = 10_000  # items from which on a container is worth estimating
SAMPLES = 64
ARRAY_BYTES = 1 << 16
PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Big(NamedTuple):
    """A container of many small objects.

    Attributes:
        path: where it is: ``dataset.samples``.
        words: ``a list of 2,000,000 dicts``.
        nbytes: about how much memory its objects take.
    """

    path: str
    words: str
    nbytes: int


def _inside(obj: Any) -> Iterator[tuple[str, Any]]:
    """Attributes and items of an object, each with what it adds to a path."""
    if isinstance(obj, dict):
        for k, v in list(obj.items())[:WIDTH]:
            yield f"[{k!r}]", v
    elif isinstance(obj, (list, tuple)):
        for i, v in enumerate(obj[:WIDTH]):
            yield f"[{i}]", v
    elif not isinstance(obj, (type, torch.Tensor, torch.nn.Module)) and type(obj).__module__ != "builtins":
        for k, v in list(getattr(obj, "__dict__", {}).items())[:WIDTH]:
            yield f".{k}", v


def big(obj: Any, at_least: int, path: str = "dataset", depth: int = DEPTH, seen: set[int] | None = None) -> list[Big]:
    """Lists, tuples, dicts and sets of many small Python objects inside ``obj`` that take ``at_least`` bytes.

    Reading such an object writes its reference count, so a forked worker copies its page; an array of numbers has one
    count for all.
    """
    seen = set() if seen is None else seen
    if id(obj) in seen or not depth:
        return []
    seen.add(id(obj))
    if type(obj) in (list, tuple, dict, set, frozenset) and len(obj) >= MANY:
        found = _estimate(obj, path)
        return [found] if found.nbytes >= at_least else []
    return [b for step, inner in _inside(obj) for b in big(inner, at_least, path + step, depth - 1, seen)]


def _estimate(obj: Any, path: str) -> Big:
    n = len(obj)
    step = max(1, n // SAMPLES)
    items = obj[::step] if isinstance(obj, (list, tuple)) else [x for _, x in zip(range(SAMPLES), obj, strict=False)]
    own = items
    if isinstance(obj, dict):
        own = [obj[k] for k in items]
        items = [*items, *own]
    each = sum(_size(x) for x in items) / max(1, len(own))
    kinds = {type(x).__name__ for x in own}
    of = f"{kinds.pop()}s" if len(kinds) == 1 else "objects"
    return Big(path, f"a {type(obj).__name__} of {n:,} {of}", int(n * each) + sys.getsizeof(obj))


def _size(obj: Any, depth: int = 3) -> int:
    if isinstance(obj, (torch.Tensor, np.ndarray)):
        return 200  # the object; its numbers are not copied
    size = sys.getsizeof(obj, 64)
    if depth and isinstance(obj, dict):
        size += sum(_size(v, depth - 1) for v in list(obj.values())[:WIDTH])
    elif depth and isinstance(obj, (list, tuple, set)):
        size += sum(_size(v, depth - 1) for v in list(obj)[:WIDTH])
    elif depth and hasattr(obj, "__dict__"):
        size += _size(vars(obj), depth - 1)
    return size


class Look:
    """What a dataset looked like, to say later what changed: plain values, tensors, arrays, containers.

    It is a look and no proof: arrays over 64 kB and containers of more than 10,000 items are known by their size and
    some of their values.

    Args:
        obj: the dataset.
        path: its name.
    """

    def __init__(self, obj: Any, path: str = "dataset") -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self._left = NODES
        self._walk(obj, path, LOOK_DEPTH, set())

    def _walk(self, obj: Any, path: str, depth: int, seen: set[int]) -> None:
        if type(obj) in PLAIN:
            self._values[path] = obj
            return
        if id(obj) in seen or not depth or not self._left:
            return
        self._left -= 1
        seen.add(id(obj))
        if isinstance(obj, torch.Tensor):
            if not obj.is_shared():  # else the workers see it, too
                self._values[path] = ("a tensor", tuple(obj.shape), obj.data_ptr(), obj._version)
        elif isinstance(obj, np.ndarray):
            self._values[path] = ("an array", obj.shape, _of_array(obj))
        elif isinstance(obj, torch.nn.Module):
            for name, inner in vars(obj).items():
                self._walk(inner, f"{path}.{name}", depth - 1, seen)
        else:
            if isinstance(obj, (list, tuple, dict, set, frozenset, deque)):
                self._values[path] = f"a {type(obj).__name__} of {len(obj)}", _of_many(obj)
                if len(obj) > WIDTH:
                    return
            for step, inner in _inside(obj):
                self._walk(inner, path + step, depth - 1, seen)

    def changed(self, obj: Any, added: bool = False) -> list[str]:
        """What is otherwise now: ``["dataset.epoch was 0 and is 1"]``.

        Args:
            obj: the same dataset, later.
            added: whether numbers and words that were not there count, too.
        """
        now = Look(obj, self._path)._values
        out = [f"{path} is {_words(v)}" for path, v in now.items() if added and path not in self._values]
        for path, old in self._values.items():
            new = now.get(path, self)
            if new is not self and type(new) is type(old) and new != old and new == new:
                out.append(f"{path} was {_words(old)} and is {_words(new)}" if _words(old) != _words(new) else path)
        return out


def _of_array(x: Any) -> Any:
    if x.dtype.hasobject:
        return _of_many(x.reshape(-1)[:WHOLE].tolist())
    if x.nbytes <= ARRAY_BYTES:
        return zlib.crc32(x.tobytes())
    return (x.reshape(-1)[:: max(1, x.size // SAMPLES)] if x.flags.c_contiguous else x[:1]).tobytes()


def _of_many(x: Any) -> int:
    """The values of a container, where they are plain, or tuples of such."""
    items = x.items() if isinstance(x, dict) else x
    if len(x) > WHOLE:
        items = x[:: len(x) // SAMPLES] if isinstance(x, (list, tuple)) else itertools.islice(items, SAMPLES)
    try:
        found = tuple(items)
        return hash(found) if all(_plain(v) for v in found) else 0
    except Exception:  # somebody else's container
        return 0


def _plain(v: Any) -> bool:
    return type(v) in PLAIN or (type(v) is tuple and all(type(w) in PLAIN for w in v))


def _words(value: Any) -> str:
    return str(value[0]) if isinstance(value, tuple) else repr(value)[:60]


def culprit(obj: Any, path: str, depth: int = 0) -> str | None:
    """Path of the innermost attribute or item that pickle refuses, or None when it takes all."""
    try:
        ForkingPickler.dumps(obj)
        return None
    except Exception:
        inner: list[tuple[str, Any]] = []
        if isinstance(obj, dict):
            inner = [(f"{path}[{k!r}]", v) for k, v in list(obj.items())[:1000]]
        elif isinstance(obj, (list, tuple)):
            inner = [(f"{path}[{i}]", v) for i, v in enumerate(obj[:1000])]
        elif hasattr(obj, "__dict__") and not isinstance(obj, type):
            inner = [(f"{path}.{k}", v) for k, v in vars(obj).items()]
        if depth < 8:
            for name, value in inner:
                found = culprit(value, name, depth + 1)
                if found:
                    return found
        return f"{path} ({type(obj).__name__})"
