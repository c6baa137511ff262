"""Opens the store of a cache, in memory or on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..core import resources
from ..core.compare import equal_bits
from ..core.errors import UsageError
from ..core.options import parse_bytes
from ..core.types import JsonObject, Sample
from ..core.warn import warn_user
from .isolate import run_isolated
from .store.decode import stored_copy
from .store.encode import CacheError
from .store.folder import discard, open_for, root
from .store.memory import MemoryTables
from .store.store import Gone, Store, size_of

RAM_SHARE = 0.5  # of the free memory, without a budget
DISK_SHARE = 0.5  # of the free disk space
TRIES = 16  # samples of which one must be undamaged to be compared
TIERS = ("auto", "ram", "disk", None)


GONE = {
    "compressed": 'use "ram", or "disk" if memory is short',
    "device": "a TensorDataset with tensors on the device is indexed there",
}


def check_tier(cache: object) -> None:
    """Raises UsageError for an invalid value of ``cache``."""
    if str(cache) in GONE:
        raise UsageError(f"cache={cache!r} is no longer supported: {GONE[str(cache)]}")
    if cache not in TIERS:
        raise UsageError(f"cache must be one of {', '.join(map(repr, TIERS))}, not {cache!r}")


class CachePlan(NamedTuple):
    """Parameters of the store to open."""

    cache: str | None  # "ram", "disk" or "auto"; None: no cache
    samples: int  # of the dataset
    slots: int  # number of cached items; more than samples if calls are cached
    budget: int  # bytes; 0: half of what is free
    folder: Path | None  # of caches on disk; None: the cache is in memory
    memories: Sequence[MemoryTables]  # shared by the ranks of a node
    name: str  # of the cache on disk
    key: Callable[[], JsonObject]  # what the samples depend on
    prepare: Callable[[int], Sample]  # makes the deterministic part of a sample


def new_store(plan: CachePlan) -> Store | None:
    """Opens or creates the store. Returns None if that is impossible, with a warning that says why."""
    if plan.cache is None or not plan.samples:
        return None
    folder = plan.folder if plan.slots == plan.samples else None  # results of calls are cached in memory only
    try:
        if folder is not None:
            return _on_disk(plan, folder, plan.budget or max(1, int(disk_free(folder) * DISK_SHARE)))
        budget = plan.budget or ram_budget() // resources.ranks()
        memory = plan.memories[0] if plan.memories else MemoryTables(size_of(plan.slots, budget))
        store = Store(memory, plan.slots, budget)
        if plan.memories:
            store.join()
        return store
    except (OSError, CacheError) as e:
        reason = (e.strerror or e) if isinstance(e, OSError) else e
        warn_user(f"There is no cache in {folder or 'memory'}: {reason}.")
    return None


def _on_disk(plan: CachePlan, base: Path, budget: int) -> Store:
    """Opens a cache on disk. Recreates it if it is damaged, too small, or has a sample that differs."""
    key = plan.key()
    why = ""
    for attempt in (1, 2):
        folder, note = open_for(base, plan.name, key)
        try:
            store = Store(folder, plan.samples, budget)
            store.ready()
            stats = store.account
            if stats.reason and stats.budget < budget and not store.complete:
                raise CacheError(f"{folder.path} was full with {stats.budget:,} bytes")
            differing, _ = differing_sample(store, plan.prepare)
            if differing is not None:
                raise CacheError(f"sample {differing} differs from the one in {folder.path}")
            break
        except CacheError as e:
            if attempt == 2 or not folder.writable:
                raise
            why = f"{e}: creating a new cache"
            discard(folder.path)
    store.clear_full()
    if why or note:
        warn_user(f"{why or note}.")
    return store


def differing_sample(store: Store, make: Callable[[int], Sample]) -> tuple[int | None, bool]:
    """Recomputes one stored sample in a child process, to detect a change that the key does not cover before any sample
    is served. Returns its index if it differs, else None; and whether a sample was compared."""
    stored = np.flatnonzero(store.locations)
    for i in np.roll(stored, -(len(stored) // 2))[:TRIES].tolist():
        location = store.location(i)
        if location:
            break
    else:
        return None, False  # damaged ones are recreated on request
    try:
        before = store.read(location)
        # An error while making it reaches the user when the sample is requested.
        is_same = run_isolated(lambda: equal_bits(stored_copy(make(i)), before))
    except (Gone, UsageError):  # another process has closed the store; the sample cannot be made without writing
        return None, False
    return None if is_same else i, True


def ram_budget() -> int:
    """Bytes of memory for a node's cache if the user sets no budget."""
    return max(1 << 20, int(resources.memory_available() * RAM_SHARE))


def cache_folder(cache: str | None, cache_dir: str | os.PathLike[str] | None) -> Path | None:
    """Folder of the cache on disk; None if the cache is in memory."""
    if cache == "disk":
        return Path(cache_dir or root())
    if cache == "auto" and (cache_dir is not None or "STOKER_CACHE" in os.environ):
        return Path(cache_dir or root())
    return None


def budget_of(asked: int | float | str | None, cache: str | None) -> int:
    """Bytes that the user grants; 0: they do not say."""
    return 0 if cache is None or asked is None else parse_bytes(asked, resources.memory_of_rank(), "cache_budget")


def disk_free(folder: Path) -> int:
    """Free bytes of the disk of a folder, which may not exist yet. Raises OSError if the disk cannot be asked."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
