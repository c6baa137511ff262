"""Opening what a staged dataset keeps its samples in: memory, and behind it the disk."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core import resources
from ..core.errors import StokerWarning, UsageError
from ..core.options import parse_bytes
from ..core.types import JsonObject
from .isolate import run_isolated
from .store.encode import CacheError, take
from .store.folder import Folder, SourceFile, discard, open_for
from .store.memory import Memory
from .store.store import Store, size_of
from .store.tiers import TieredStore

RAM_SHARE = 0.5  # of the memory that is free, where no budget is given
DISK_SHARE = 0.5  # of the disk


class CachePlan(NamedTuple):
    """What a staged dataset wants of its cache.

    Attributes:
        cache: "ram", "compressed", "disk", "auto" or "device"; None: no cache.
        samples: how many there are.
        slots: entries that are kept; with kept calls there are others than samples.
        budgets: bytes of memory, and of disk.
        folder: where caches on disk lie.
        memories: memory that the ranks of a node share.
        name: of the cache on disk.
        key: what the samples depend on, and their source files.
        prepare: makes the kept part of a sample anew.
        dense: nothing runs after the kept part, so samples may lie in rows.
    """

    cache: str | None
    samples: int
    slots: int
    budgets: tuple[int, int]
    folder: Path | None
    memories: Sequence[Memory]
    name: str
    key: Callable[[], tuple[JsonObject, list[SourceFile]]]
    prepare: Callable[[int], Any]
    dense: bool


def new_store(plan: CachePlan) -> TieredStore | None:
    """What a dataset's cache lies in, opened or made; None where there can be none, which is said."""
    if plan.cache is None or not plan.samples:
        return None
    stores: list[Store] = []
    ram, disk = plan.budgets
    if plan.slots != plan.samples:
        ram, disk = ram or disk, 0  # answers of calls are kept in memory only
    try:
        if ram:
            memory = plan.memories[0] if plan.memories else Memory(size_of(plan.slots, ram))
            stores.append(Store(memory, plan.slots, ram, compress=plan.cache == "compressed"))
            if plan.memories:
                stores[0].join()
        if disk:
            stores.append(_on_disk(plan, disk))
    except (OSError, CacheError) as e:
        words = (e.strerror or e) if isinstance(e, OSError) else e
        where = plan.folder if len(stores) == bool(ram) and disk else "memory"
        warnings.warn(f"There is no cache in {where}: {words}.", StokerWarning, stacklevel=5)
    return TieredStore(stores) if stores else None


def _on_disk(plan: CachePlan, budget: int) -> Store:
    assert plan.folder is not None
    key, sources = plan.key()
    why = ""
    for attempt in (1, 2):
        folder, words = open_for(plan.folder, plan.name, key, sources)
        try:
            store = Store(folder, plan.samples, budget)
            store.ready()
            if store.account.reason and store.account.budget < budget and not store.complete:
                raise CacheError(f"{folder.path} was full with {store.account.budget:,} bytes")
            _compare(plan, store, folder)
            break
        except CacheError as e:
            if attempt == 2 or not folder.writable:
                raise
            why = f"{e}: it is made anew"
            discard(folder.path)
    store.clear_full()
    words = why or words
    if words:
        warnings.warn(f"{words}.", StokerWarning, stacklevel=6)
    return store


def _compare(plan: CachePlan, store: Store, folder: Folder) -> None:
    """One sample made anew: what changed without anybody's knowing is found before it is served."""
    there = np.flatnonzero(store.locations)
    if not len(there):
        return
    i = int(there[len(there) // 2])
    at = int(store.where(np.array([i]))[0])
    if not at:
        return  # damaged; whoever asks for it makes it anew

    def bits(sample: Any) -> Any:
        words, leaves = take(sample, dense=plan.dense)
        return words, [x.tobytes() for x in leaves]

    kept = bits(store.read(at))

    def again() -> bool:
        try:
            return bool(bits(plan.prepare(i)) == kept)
        except Exception:
            return True  # whoever asks for it hears why

    try:
        same = run_isolated(again)
    except UsageError:
        return  # it cannot be made where nothing can be written: whoever asks for it is told what is wrong
    if not same:
        raise CacheError(f"sample {i} is another than in {folder.path}")


def ram_budget() -> int:
    """Bytes of memory for the cache of a node, where its user says nothing."""
    return max(1 << 20, int(resources.memory_available() * RAM_SHARE))


def budgets(asked: int | float | str | None, cache: str | None, disk: Path | None) -> tuple[int, int]:
    """Bytes of memory, and of disk."""
    if cache is None:
        return 0, 0
    given = None if asked is None else parse_bytes(asked, resources.memory_of_rank(), "cache_budget")
    ram = 0 if cache == "disk" else given or ram_budget() // resources.ranks()
    if disk is None:
        return ram, 0
    if cache == "disk" and given:
        return 0, given
    there = disk
    while not there.exists() and there != there.parent:
        there = there.parent
    return ram, max(1, int(shutil.disk_usage(there).free * DISK_SHARE))
