"""Sends a ``Staged`` to another machine without the contents of its cache, which is made again there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from stoker.core.types import Attributes
from stoker.staging.change_watch import Discards
from stoker.staging.dataset import Staged

from .cluster_cache import CacheOfWorker, NodeCache, new_cache

ForNodes: TypeAlias = tuple[Callable[[CacheOfWorker | None], Staged], Callable[[int], NodeCache | None]]
"""Two functions for a node: one makes the dataset in a worker, with the cache; one makes that cache, once."""


def for_nodes(staged: Staged) -> ForNodes:
    """Returns the functions that make a dataset again on another machine."""
    samples = staged._samples if staged.usable else 0
    state = staged.__getstate__() | dict.fromkeys(("_store", "_table", "_folder"))
    state |= {"_epoch": 0, "_first_epoch": 0}
    state |= {"_discards": Discards(), "_epochs_are_announced": True}
    state["cache"] = "ram" if samples else None  # also read by code that checks for changes
    sites = None if staged.split is None or staged.split.memo is None else staged.split.memo.sites
    cache = functools.partial(new_cache, samples, sites, staged._budget)
    return functools.partial(_on_node, type(staged), state), cache


def _on_node(cls: type[Staged], state: Attributes, cache: CacheOfWorker | None) -> Staged:
    staged = object.__new__(cls)
    memories = () if cache is None else cache.memories
    staged.__setstate__({**state, "cache": state["cache"] if memories else None, "_memories": memories})
    staged._filler.elsewhere = cache
    return staged
