"""Caches that a dataset keeps itself: ``if i not in self.cache: self.cache[i] = load(i)``.

A worker that is made anew for each epoch begins with an empty one, so they bring nothing there; and yet each sample
changes the dataset. The first part of a sample is made as in a new worker: with an empty cache, which is dropped. So
nothing of the dataset changes, and samples are kept once. ``TrialSamples`` decides what is such a cache: samples must
have the same bits whether it holds them or not.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from typing import TypeAlias

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


@contextlib.contextmanager
def emptied(dataset: MapDataset, paths: list[Path]) -> Iterator[None]:
    """Within it the caches are empty ones, which are dropped at the end."""
    held = [(*_holder(dataset, path),) for path in paths]
    values = [holder[name] for holder, name in held]
    for (holder, name), value in zip(held, values, strict=True):
        kind = type(value)
        holder[name] = kind() if isinstance(value, dict) else kind([None] * len(value))
    try:
        yield
    finally:
        for (holder, name), value in zip(held, values, strict=True):
            holder[name] = value


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
