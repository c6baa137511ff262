"""Caches that a dataset keeps itself: ``if i not in self.cache: self.cache[i] = load(i)``.

A worker that is made anew for each epoch begins with an empty one, so they bring nothing there; and yet each sample
changes the dataset. The first part of a sample is made as in a new worker: with an empty cache, which is dropped. So
nothing of the dataset changes, and samples are kept once. ``TrialSamples`` decides what is such a cache: samples must
have the same bits whether it holds them or not.
"""

from __future__ import annotations

import ast
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from ..core.types import Attributes, MapDataset

NESTED = 4  # wrappers around the dataset that has the cache
LONGEST = 10_000  # items of a list of None in which samples are put
Path: TypeAlias = tuple[str, ...]  # ("dataset", "cache"): the attribute ``cache`` of the dataset in a ``Subset``


class OwnDict(dict[object, object]):
    """Stands for a dictionary that is a cache, in a trial."""


class OwnList(list[object]):
    """Stands for a list that is a cache, in a trial."""


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
