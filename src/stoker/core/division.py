"""Whether an iterable dataset splits its samples among workers. Otherwise every worker yields all of them."""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

from . import packages
from .object_tree import walk

ASKS = "get_worker_info"
SHARD = "stoker.sampling.shard"  # module of ``stoker.shard``, which calls ``get_worker_info`` for the dataset
SHARDS = "apply_sharding"  # method of torch's IterDataPipes that their workers call
STARTS = ("__iter__", "__next__", "__call__")
MOST = 5_000  # functions inspected at most


def divides(dataset: object) -> bool:
    """Guesses from names whether the code that iterates a dataset asks which worker it runs in. Follows the methods and
    functions that this code names; calls none."""
    objects = [x for _, x in walk(dataset)]
    classes = dict.fromkeys(type(x) for x in objects)
    if any(hasattr(cls, SHARDS) for cls in classes):
        return True
    waiting = [x for x in objects if isinstance(x, types.FunctionType)]
    for cls in classes:
        if issubclass(cls, IterableDataset) or not hasattr(cls, "__getitem__"):  # others give samples by index
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


def _values(fn: types.FunctionType, names: set[str]) -> Iterator[object]:
    """The values of the names in a function: globals, and members of the modules it names."""
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
    """Whether a function belongs to torch, stoker or the standard library."""
    file = fn.__code__.co_filename
    return file.startswith((packages.PACKAGE, packages.torch())) or packages.in_stdlib(file)
