"""Walks the objects reachable from an object by attributes and items. Runs no code of their classes."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterator
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch

from . import packages
from .types import Attributes

DEPTH = 8  # a Subset of a Subset of a dataset with a Compose of transforms with arguments
WIDTH = 200  # attributes or items of one object that are followed at most
OBJECTS = 2_000  # yielded by ``walk`` at most
PLAIN = (bool, int, float, complex, str, bytes, type(None))
VALUES = (torch.dtype, torch.device, np.generic, range, slice, PurePath, Enum, datetime.date, decimal.Decimal)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
TABLES = ("pandas", "polars")
_TABLE_CLASSES = ("DataFrame", "Series", "Index")
Table: TypeAlias = Any  # one of these
# standard-library modules whose objects are data; those of others are locks, loggers, ...
_RECORDS = ("argparse", "types")
_CODE = (types.FunctionType, types.MethodType, functools.partial)  # other code need not mention what these hold by name


def attributes(obj: object) -> Attributes:
    """Returns what an object holds in its ``__dict__`` and slots. Runs no code of its class."""
    out: Attributes = {}
    with contextlib.suppress(Exception):  # a proxy
        out.update(getattr(obj, "__dict__", {}))
    for c in type(obj).__mro__:
        for name, slot in vars(c).items() if "__slots__" in vars(c) else ():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # not set yet
                    out.setdefault(name, slot.__get__(obj))
    return out


def is_filesystem(obj: object) -> bool:
    """Whether an object is an fsspec filesystem. Several threads may share one."""
    spec = sys.modules.get("fsspec.spec")
    return spec is not None and isinstance(obj, spec.AbstractFileSystem)


def package_of(cls: type) -> str:
    """The top-level package that defines a class."""
    return str(cls.__module__).partition(".")[0]


@functools.cache
def _is_stdlib(package: str) -> bool:
    """Whether a package is from the standard library, rather than the user's own ``test`` or ``profile``."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return package in sys.stdlib_module_names and (file is None or packages.in_stdlib(file))


def is_table(obj: object) -> TypeGuard[Table]:
    """Whether an object is a pandas or polars table, column or index. These are data, like an array."""
    found = (getattr(sys.modules.get(package), name, None) for package in TABLES for name in _TABLE_CLASSES)
    return any(isinstance(cls, type) and isinstance(obj, cls) for cls in found)


def children(obj: object) -> Iterator[tuple[str, object]]:
    """Yields attributes and items of an object, each with its path step; class attributes come first. A stoker class
    defines ``_stoker_children`` to yield only what its user gave it."""
    if isinstance(obj, (dict, list, tuple, *_CODE)):
        yield from parts(obj)
    elif (own := getattr(type(obj), "_stoker_children", None)) is not None:
        yield from own(obj)
    elif is_filesystem(obj):  # its listings and connections are not part of the dataset's data
        yield from ((f".{name}", getattr(obj, name, None)) for name in ("storage_args", "storage_options"))
    elif not isinstance(obj, (type, types.ModuleType, torch.Tensor)) and not is_table(obj):
        package = package_of(type(obj))
        if package in _RECORDS or not _is_stdlib(package):
            yield from _of_instance(obj)


def parts(obj: object) -> Iterator[tuple[str, object]]:
    """Yields the items of a container, or what a function, bound method or partial holds; nothing for other objects."""
    if isinstance(obj, dict):
        yield from ((f"[{k!r}]", v) for k, v in list(itertools.islice(obj.items(), WIDTH)))
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{i}]", v) for i, v in enumerate(obj[:WIDTH]))
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, types.MethodType):
        yield from ((".__func__", obj.__func__), (".__self__", obj.__self__))
    elif isinstance(obj, types.FunctionType):
        yield from ((".__defaults__", obj.__defaults__), (".__kwdefaults__", obj.__kwdefaults__))
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not set yet
                yield f".{name}", cell.cell_contents


def _of_instance(obj: object) -> Iterator[tuple[str, object]]:
    own = dict(itertools.islice(attributes(obj).items(), WIDTH))
    for c in reversed(type(obj).__mro__):
        if package_of(c) != "torch" and not _is_stdlib(package_of(c)):
            for k, v in list(vars(c).items())[:WIDTH]:
                if k not in own and k[:2] != "__" and type(v) in (*PLAIN, *CONTAINERS):
                    yield f".{k}", v
    yield from ((f".{k}", v) for k, v in own.items())


def walk(obj: object, names: set[str] | None = None) -> Iterator[tuple[str, object]]:
    """Yields the objects reachable by attributes and items, each with its path, except values, arrays and tensors.
    Follows only attributes in ``names``; None: all."""
    waiting: list[tuple[str, object, int]] = [("dataset", obj, DEPTH)]
    seen: set[int] = set()
    while waiting and len(seen) < OBJECTS:
        path, x, depth = waiting.pop()
        if id(x) not in seen and not isinstance(x, (*PLAIN, *VALUES, np.ndarray, torch.Tensor)):
            seen.add(id(x))
            yield path, x
            for step, v in children(x) if depth else ():
                if names is None or step[0] != "." or step[1:] in names or isinstance(x, _CODE):
                    waiting.append((path + step, v, depth - 1))
