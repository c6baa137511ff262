"""Caches that a dataset keeps itself: ``if i not in self.cache: self.cache[i] = load(i)``.

A worker that is made anew for each epoch begins with an empty one, so they bring nothing there; and yet each sample
changes the dataset. The first part of a sample is made as in a new worker: with an empty cache, which is dropped. So
nothing of the dataset changes, and samples are kept once.

``TrialSamples`` decides what is such a cache. A sample that it holds must be read from it and not be put there again,
as a count or a note would be; and samples must have the same bits whether it holds them or not.
"""

from __future__ import annotations

import ast
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from ..core.types import Attributes, MapDataset
from .callee import Value

NESTED = 4  # wrappers around the dataset that has the cache
LONGEST = 10_000  # items of a list of None in which samples are put
Path: TypeAlias = tuple[str, ...]  # ("dataset", "cache"): the attribute ``cache`` of the dataset in a ``Subset``


class OwnDict(dict[object, object]):
    """Stands for a dictionary that is a cache, in a trial, and notes what is done with it."""

    was_read = was_written = False

    def __getitem__(self, key: object) -> object:
        self.was_read = True
        return super().__getitem__(key)

    def get(self, key: object, default: object = None) -> object:
        self.was_read = True
        return super().get(key, default)

    def __setitem__(self, key: object, value: object) -> None:
        self.was_written = True
        super().__setitem__(key, value)


class OwnList(list[object]):
    """The same for a list."""

    was_read = was_written = False

    def __getitem__(self, k: Value) -> Value:
        self.was_read = True
        return super().__getitem__(k)

    def __setitem__(self, k: Value, value: Value) -> None:
        self.was_written = True
        super().__setitem__(k, value)


def empty_ones(dataset: MapDataset) -> set[Path]:
    """Attributes that may be such caches: dictionaries without items, and lists of None. What a script has put into
    one must be used."""
    out: set[Path] = set()
    holder: object = dataset
    for depth in range(NESTED):
        for name, value in (getattr(holder, "__dict__", None) or {}).items():
            is_list = type(value) is list and 0 < len(value) <= LONGEST and all(x is None for x in value)
            if is_list or (type(value) is dict and not value):
                out.add((*("dataset",) * depth, name))
        holder = getattr(holder, "__dict__", {}).get("dataset")
    return out


@contextlib.contextmanager
def watched(dataset: MapDataset, paths: list[Path]) -> Iterator[list[OwnDict | OwnList]]:
    """Within it, those that note what is done with them stand in their place, with the same items."""
    held = [_holder(dataset, path) for path in paths]
    values = [holder[name] for holder, name in held]
    noting = [OwnDict(value) if isinstance(value, dict) else OwnList(value) for value in values]
    for (holder, name), value in zip(held, noting, strict=True):
        holder[name] = value
    try:
        yield noting
    finally:
        for (holder, name), value in zip(held, values, strict=True):
            holder[name] = value


def replace(dataset: MapDataset, path: Path) -> None:
    """Puts an empty one, which is known as a cache, in its place."""
    holder, name = _holder(dataset, path)
    value = holder[name]
    holder[name] = OwnDict() if isinstance(value, dict) else OwnList([None] * len(value))


class _Entered(NamedTuple):
    """A cache that is an empty one at the moment."""

    holder: Attributes
    value: object  # the cache itself
    threads: list[int]  # that are within ``emptied``: they share the empty one


_entered: dict[tuple[int, str], _Entered] = {}  # by the holder's id and the attribute's name
_lock = threading.Lock()


def _after_fork() -> None:
    """The other threads have stayed in the parent."""
    global _lock
    _lock = threading.Lock()
    for (_, name), entered in _entered.items():
        entered.holder[name] = entered.value
    _entered.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def emptied(dataset: MapDataset, paths: list[Path]) -> Iterator[None]:
    """Within it the caches are empty ones, which are dropped at the end."""
    thread = threading.get_ident()
    held = [_holder(dataset, path) for path in paths]
    with _lock if held else contextlib.nullcontext():
        for holder, name in held:
            entered = _entered.setdefault((id(holder), name), _Entered(holder, holder[name], []))
            if not entered.threads:
                holder[name] = _empty_like(entered.value)
            entered.threads.append(thread)
    try:
        yield
    finally:
        with _lock if held else contextlib.nullcontext():
            for holder, name in held:
                entered = _entered[id(holder), name]
                entered.threads.remove(thread)
                if not entered.threads:
                    holder[name] = entered.value
                    del _entered[id(holder), name]


def values(dataset: MapDataset, paths: list[Path]) -> Attributes:
    """The caches by their names, as they are when no thread is within ``emptied``."""
    out = {}
    with _lock if paths else contextlib.nullcontext():
        for path in paths:
            holder, name = _holder(dataset, path)
            entered = _entered.get((id(holder), name))
            out[".".join(path)] = holder[name] if entered is None else entered.value
    return out


def _empty_like(value: object) -> object:
    return type(value)([None] * len(value)) if isinstance(value, list) else type(value)()


def is_stored_in(target: ast.expr, scope: Mapping[str, object]) -> bool:
    """Whether an assignment puts an item into such a cache. ``scope``: what names mean in the function."""
    whole = target.value if isinstance(target, ast.Subscript) else None
    if not isinstance(whole, ast.Attribute) or not isinstance(whole.value, ast.Name):
        return False
    attributes = getattr(scope.get(whole.value.id), "__dict__", None) or {}
    return isinstance(attributes.get(whole.attr), (OwnDict, OwnList))


def _holder(dataset: MapDataset, path: Path) -> tuple[Attributes, str]:
    holder: object = dataset
    for name in path[:-1]:
        holder = getattr(holder, name)
    return vars(holder), path[-1]
