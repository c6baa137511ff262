"""``shard()``: tells an iterable dataset which of the parts over all ranks and workers to read here.

A run keeps its parts to the end of an epoch, even if it is resumed with a different number of workers or ranks. Then a
process reads several parts, or parts that another rank began. A dataset that divides itself by ``shard()`` follows
that. One that divides itself by rank cannot, because it would read other samples.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from torch.utils.data import get_worker_info

from ..core.ranks import rank_and_ranks

READ_HERE = (
    "the iterable dataset draws random numbers, and the run began without workers. A worker has a different random "
    "state, so it cannot reproduce the samples already read"
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

    # worker, workers: as in ``get_worker_info()`` there
    worker: int
    workers: int
    base_seed: int  # of that rank
    shard: Shard | None  # None if the part is this worker's and rank's own


class _Here(threading.local):
    """Per thread: the part that it reads, unless that is its worker's and rank's own, and whether ``shard`` was
    called."""

    shard: Shard | None = None
    asked = False


here = _Here()
_of_parent: list[tuple[int, int]] = []


def set_ranks(ranks: tuple[int, int]) -> None:
    """Sets rank and number of ranks of the training process in a worker process. A spawned one has no process group."""
    _of_parent[:] = [ranks]


def shard() -> Shard:
    """Returns which part of an iterable dataset to read here, out of how many over all ranks and workers.

    Call it in the dataset's ``__iter__``, for instance to read every ``num_shards``-th sample or file from ``id`` on.
    The run can then be resumed with a different number of ranks (docs/resume.md). Also works with torch's loader.

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
