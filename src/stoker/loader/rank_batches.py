"""Warns, before a run hangs, if ranks have unequal numbers of batches: the rank with most blocks forever in a
collective.

The first rank to begin an epoch writes its number to the process group's store; each other rank compares its own. No
rank waits for another. Iterable datasets have no such number.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

from torch.utils.data.dataloader import _DatasetKind

from ..core.random_state import preserved
from ..core.ranks import rank_and_ranks
from ..core.types import LoaderLike
from ..core.warn import warn_user

if TYPE_CHECKING:
    from torch.distributed import Store

KEY = "stoker/batches"
_epochs: Counter[str] = Counter()  # epochs begun in this rank, by loader
_warned: set[str] = set()


def batches_of(loader: LoaderLike) -> int | None:
    """Number of batches in an epoch; None if unknown beforehand."""
    if getattr(loader, "_dataset_kind", None) != _DatasetKind.Map:
        return None
    try:
        with preserved():  # the ``__len__`` of a user's sampler may draw random numbers
            return len(loader._index_sampler)
    except Exception:
        return None


def compare(loader: LoaderLike, name: str) -> int | None:
    """Warns, once per loader, if a rank that began this epoch earlier has a different number of batches. Call when an
    epoch of ``loader`` begins. ``name``: the same in all ranks. Returns this rank's number; None if unknown, or without
    a process group of several ranks."""
    store = _store()
    batches = None if store is None else batches_of(loader)
    if store is None or batches is None:
        return None
    epoch = _epochs[name]
    _epochs[name] += 1
    rank, ranks = rank_and_ranks()
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), ranks  # torchrun may keep the store across a restart
    try:
        written = store.compare_set("/".join(map(str, (KEY, *run, name, epoch))), "", f"{rank} {batches}")
        first_rank, first_batches = map(int, written.decode().split())
    except Exception:  # the store is gone, or does not support this
        return batches
    if first_batches != batches and name not in _warned:
        _warned.add(name)
        warn_user(
            f"Rank {rank} has {batches:,} batches in this epoch of {name}, rank {first_rank} has {first_batches:,}. A "
            "collective in the loop (DistributedDataParallel has one in each step) then waits forever. Use a "
            "DistributedSampler, or drop_last=True on equal shares."
        )
    return batches


def _store() -> Store | None:
    """The process group's store; None without a group of several ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        if distributed.get_world_size() > 1:
            store: Store = distributed.distributed_c10d._get_default_store()
            return store
        return None
    except Exception:
        return None
