"""``shard()``: which part of an iterable dataset is to be read here, of the parts in all ranks and workers.

A run keeps its parts to the end of an epoch, also where it is resumed with other workers or ranks. Then a process reads
several parts, or parts that another rank began. A dataset that divides itself by ``shard()`` follows that. One that
divides itself by its rank cannot, for it would read other samples.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from torch.utils.data import get_worker_info

from ..core.ranks import rank_and_ranks

READ_HERE = (
    "the iterable dataset draws random numbers, and the run began without workers: a worker, which has another random "
    "state, cannot read again what was read"
)


class Shard(NamedTuple):
    """A part of an iterable dataset.

    Attributes:
        id: from 0 to ``num_shards - 1``.
        num_shards: parts in all ranks and workers.
    """

    id: int
    num_shards: int


class ShardStart(NamedTuple):
    """Where a part was begun."""

    # worker, workers: what ``get_worker_info()`` says there
    worker: int
    workers: int
    base_seed: int  # of that rank
    shard: Shard | None  # None where the part is that of its worker and rank


class _Here(threading.local):
    """Of this thread: the part that it reads, if not the one of its worker and rank; and whether it was asked for."""

    shard: Shard | None = None
    asked = False


here = _Here()
_of_parent: list[tuple[int, int]] = []


def set_ranks(ranks: tuple[int, int]) -> None:
    """In a worker process: rank and ranks of the training process. A spawned one has no process group."""
    _of_parent[:] = [ranks]


def shard() -> Shard:
    """Which part of an iterable dataset to read here, and of how many: over all ranks and workers.

    A dataset asks in ``__iter__``. It may read every ``num_shards``-th sample from ``id`` on, or file.
    Then a run may go on with another number of ranks (docs/resume.md). Works with torch's loader, too.

    Returns:
        ``Shard(id, num_shards)``, a tuple.

    Example:
        >>> from torch.utils.data import IterableDataset
        >>> class Lines(IterableDataset):
        ...     def __iter__(self):
        ...         part = shard()
        ...         return iter(range(part.id, 6, part.num_shards))
        >>> from stoker import DataLoader
        >>> [x.tolist() for x in DataLoader(Lines(), batch_size=2, num_workers=2)]
        [[0, 2], [1, 3], [4], [5]]
    """
    here.asked = True
    if here.shard is not None:
        return here.shard
    rank, ranks = _of_parent[0] if _of_parent else rank_and_ranks()
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return Shard(worker * ranks + rank, workers * ranks)
