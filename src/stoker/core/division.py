"""Whether an iterable dataset divides its samples among workers. One that does not gives all of them from each."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from . import packages
from .object_tree import walk

ASKS = "get_worker_info"
SHARD = "stoker.sampling.shard"  # the module of ``stoker.shard``, which asks for the dataset
SHARDS = "apply_sharding"  # of torch's IterDataPipes, which its workers call
STARTS = ("__iter__", "__next__", "__call__")
MOST = 5_000  # functions that are looked at


def divides(dataset: object) -> bool:
    """Whether the code that iterates a dataset asks which worker it is in, as far as its names say: methods and
    functions that it names are looked at, too, and none is called.

    Example:
        >>> divides(iter([1, 2]))
        False
    """
    objects = [x for _, x in walk(dataset)]
    classes = dict.fromkeys(type(x) for x in objects)
    if any(hasattr(cls, SHARDS) for cls in classes):
        return True
    waiting = [x for x in objects if isinstance(x, types.FunctionType)]
    for cls in classes:
        if issubclass(cls, IterableDataset) or not hasattr(cls, "__getitem__"):  # others give samples by their indices
            waiting += _methods(cls, STARTS)
    seen: set[types.CodeType] = set()
    while waiting and len(seen) < MOST:
        fn = waiting.pop()
        if fn.__code__ in seen or _is_closed(fn):
            continue
        seen.add(fn.__code__)
        names = _names(fn.__code__)
        if ASKS in names or {"stoker", "shard"} <= names:
            return True
        for value in _values(fn, names):
            if value is get_worker_info or getattr(value, "__module__", "") == SHARD:
                return True
            if isinstance(value, type):
                classes[value] = None
                waiting += _methods(value, ("__init__", *STARTS))
            elif isinstance(value, types.FunctionType):
                waiting.append(value)
        waiting += [method for cls in classes for method in _methods(cls, names)]
    return False


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _values(fn: types.FunctionType, names: set[str]) -> Iterator[Any]:
    """What the names in a function stand for: global variables, and what it names of modules."""
    found = [fn.__globals__[name] for name in names if name in fn.__globals__]
    yield from found
    for module in found:
        if isinstance(module, types.ModuleType):
            yield from (vars(module)[name] for name in names if name in vars(module))


def _methods(cls: type, names: set[str] | tuple[str, ...]) -> Iterator[types.FunctionType]:
    for name in names:
        found = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if isinstance(found, types.FunctionType):
            yield found


def _is_closed(fn: types.FunctionType) -> bool:
    """Whether it is torch's, stoker's or the standard library's."""
    file = fn.__code__.co_filename
    return file.startswith((packages.PACKAGE, packages.torch())) or packages.in_stdlib(file)
