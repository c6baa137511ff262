"""Caches that a dataset maintains itself: ``if i not in self.cache: self.cache[i] = load(i)``.

In workers that are recreated for each epoch they start empty, so they gain nothing; yet each sample modifies the
dataset. The first part of a sample is therefore made as in a new worker: with an empty cache, which is then dropped. So
the dataset does not change, and samples are stored only once.

``TrialSamples`` decides which attributes are such caches. A sample in the cache must be read from it and not written
again, as a counter or log would be. Samples must have the same bits whether or not they come from it.
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

NESTED = 4  # nesting depth of wrappers around the dataset that has the cache
LONGEST = 10_000  # items of a list of None that may serve as a cache
Path: TypeAlias = tuple[str, ...]  # ("dataset", "cache") is the attribute ``cache`` of the dataset in a ``Subset``


class _Recording:
    """Records reads and writes of a container."""

    was_read = was_written = False

    def __getitem__(self, key: Value) -> Value:
        self.was_read = True
        return super().__getitem__(key)  # type: ignore[misc]

    def __setitem__(self, key: Value, value: Value) -> None:
        self.was_written = True
        super().__setitem__(key, value)  # type: ignore[misc]


class OwnDict(_Recording, dict[object, object]):
    """Replaces a cache dictionary in a trial."""

    def get(self, key: object, default: object = None) -> object:
        self.was_read = True
        return super().get(key, default)


class OwnList(_Recording, list[object]):
    """Replaces a list in which samples are cached."""


def empty_ones(dataset: MapDataset) -> set[Path]:
    """Attributes that may be such caches: empty dictionaries, and lists of None. The script has put nothing in."""
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
    """Inside the ``with``, replaces the caches by recording ones with the same items."""
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
    """Replaces a cache by an empty one that is recognizable as a cache."""
    holder, name = _holder(dataset, path)
    value = holder[name]
    holder[name] = OwnDict() if isinstance(value, dict) else OwnList([None] * len(value))


class _Entered(NamedTuple):
    """A cache currently replaced by an empty one."""

    holder: Attributes
    value: object  # the real cache
    threads: list[int]  # threads inside ``emptied``, which share the empty one


_entered: dict[tuple[int, str], _Entered] = {}  # by the holder's id and the attribute's name
_lock = threading.Lock()


def _after_fork() -> None:
    """Restores the caches in a forked child: the other threads exist only in the parent."""
    global _lock
    _lock = threading.Lock()
    for (_, name), entered in _entered.items():
        entered.holder[name] = entered.value
    _entered.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def emptied(dataset: MapDataset, paths: list[Path]) -> Iterator[None]:
    """Inside the ``with``, replaces the caches by empty ones, which are then dropped."""
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
    """The caches by name, as they are outside ``emptied``."""
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
    """Whether an assignment stores an item in such a cache. ``scope``: values of the names in the function."""
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
