"""Opening what a staged dataset keeps its samples in: memory, and behind it the disk."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import resources
from ..core.errors import StokerWarning, UsageError
from ..core.options import parse_bytes
from .cache_key import name_of
from .isolate import run_isolated
from .store.encode import CacheError, take
from .store.folder import Folder, discard, open_for
from .store.memory import Memory
from .store.store import Store, size_of
from .store.tiers import Tiers

if TYPE_CHECKING:
    from .dataset import Staged

RAM_SHARE = 0.5  # of the memory that is free, where no budget is given
DISK_SHARE = 0.5  # of the disk


def new_store(staged: Staged) -> Tiers | None:
    """What a dataset's cache lies in, opened or made; None where there can be none, which is said."""
    if staged.cache is None or not staged.samples:
        return None
    stores: list[Store] = []
    ram, disk = staged._budgets
    if staged.slots != staged.samples:
        ram, disk = ram or disk, 0  # answers of calls are kept in memory only
    try:
        if ram:
            squeeze = {"auto": None, "compressed": True}.get(str(staged.cache), False)
            shared, staged._memories = staged._memories[:1], ()  # a dataset that was changed has its own
            memory = shared[0] if shared else Memory(size_of(staged.slots, ram))
            stores.append(Store(memory, staged.slots, ram, squeeze))
            if shared:
                stores[0].join()
        if disk:
            stores.append(_on_disk(staged, disk))
    except (OSError, CacheError) as e:
        words = (e.strerror or e) if isinstance(e, OSError) else e
        where = staged._disk if len(stores) == bool(ram) and disk else "memory"
        warnings.warn(f"There is no cache in {where}: {words}.", StokerWarning, stacklevel=4)
    return Tiers(stores) if stores else None


def _on_disk(staged: Staged, budget: int) -> Store:
    assert staged._disk is not None
    key, sources = staged._key()
    why = ""
    for attempt in (1, 2):
        folder, words = open_for(staged._disk, name_of(staged.dataset), key, sources)
        try:
            store = Store(folder, staged.samples, budget)
            store.ready()
            if store.account.reason and store.account.budget < budget and not store.complete:
                raise CacheError(f"{folder.path} was full with {store.account.budget:,} bytes")
            _compare(staged, store, folder)
            break
        except CacheError as e:
            if attempt == 2 or not folder.writable:
                raise
            why = f"{e}: it is made anew"
            discard(folder.path)
    store.again()
    words = why or words
    if words:
        warnings.warn(f"{words}.", StokerWarning, stacklevel=5)
    return store


def _compare(staged: Staged, store: Store, folder: Folder) -> None:
    """One sample made anew: what changed without anybody's knowing is found before it is served."""
    there = np.flatnonzero(store.place)
    if not len(there):
        return
    i = int(there[len(there) // 2])
    at = int(store.where(np.array([i]))[0])
    if not at:
        return  # damaged; whoever asks for it makes it anew

    def bits(sample: Any) -> Any:
        words, leaves = take(sample, dense=staged._augment is None)
        return words, [x.tobytes() for x in leaves]

    kept = bits(store.read(at))

    def again() -> bool:
        try:
            return bool(bits(staged._prepare(i)) == kept)
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
