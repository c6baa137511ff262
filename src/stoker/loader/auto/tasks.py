"""Index to measure with: like those the loader would draw, from generators of their own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.distributed import DistributedSampler

from ...core.errors import UsageError
from ...core.types import Index, LoaderLike
from ...sampling.order import FeistelSampler

SEED = 0x570C
KEPT = 512  # tasks that are drawn again, so that what they read is in memory
FEW = 16  # fewer tasks than this are no fair sample of a dataset


class Tasks:
    """Index like those the loader would draw, from generators of their own.

    Args:
        loader: the loader.

    Attributes:
        fresh: draw what was not drawn before (as a first epoch does), or what was (as later ones do).
        note: what the user has to know about it; "" for nothing.
    """

    def __init__(self, loader: LoaderLike) -> None:
        self.fresh = True
        self.note = ""
        self._kept: list[Index] = []
        self._rng = random.Random(SEED)
        self._total = self._count = 0
        self._next = self._source(loader)

    def _source(self, loader: LoaderLike) -> Callable[[], Index]:
        if loader._dataset_kind == _DatasetKind.Iterable:
            many = loader.batch_size if loader._auto_collation else 0
            self.fresh = False
            return lambda: [None] * many if many else None
        if type(loader.sampler) is SequentialSampler and type(loader.batch_sampler) is BatchSampler:
            return _Cycle(loader.batch_sampler)  # it has no state
        draw = Draw.like(loader)
        if draw is not None:
            return draw
        sampler = loader._index_sampler
        try:
            sampler = copy.deepcopy(sampler)
        except Exception:
            self.note = f"{type(sampler).__name__} cannot be copied: its own state has moved"
        return _Cycle(sampler)

    @property
    def samples(self) -> float:
        """Samples in a task, on average."""
        return self._total / self._count if self._count else 1.0

    @property
    def has_enough(self) -> bool:
        """Whether there are tasks to draw again."""
        return len(self._kept) >= FEW

    def __call__(self) -> Index:
        if not self.fresh and self._kept and self.has_enough:
            return self._kept[self._rng.randrange(len(self._kept))]
        task = self._next()
        if len(self._kept) < KEPT:
            self._kept.append(task)
        self._total += len(task) if isinstance(task, (list, tuple)) else 1
        self._count += 1
        return task


class _Cycle:
    """A sampler's tasks, epoch after epoch."""

    def __init__(self, sampler: Iterable[Index]) -> None:
        self._sampler, self._it = sampler, iter(sampler)

    def __call__(self) -> Index:
        try:
            return next(self._it)
        except StopIteration:
            self._it = iter(self._sampler)
        try:
            return next(self._it)
        except StopIteration:
            raise UsageError(f"{type(self._sampler).__name__} gives no batches") from None


def keys_of(loader: LoaderLike) -> Sequence[Index]:
    """The indices that a map-style dataset is asked for.

    Raises:
        TypeError: the dataset has no length.
    """
    if isinstance(loader.sampler, SubsetRandomSampler):
        return loader.sampler.indices
    return range(len(loader.dataset))


class Draw:
    """Draws tasks like a loader's, from a generator of its own.

    Args:
        keys: what may be drawn.
        size: samples in a task; 0 for a single key.
    """

    def __init__(self, keys: Sequence[Index], size: int) -> None:
        self._keys, self._size, self._rng = keys, size, random.Random(SEED)

    @classmethod
    def like(cls, loader: LoaderLike) -> Draw | None:
        """None where only the loader's sampler could."""
        plain = (
            RandomSampler,
            SequentialSampler,
            SubsetRandomSampler,
            WeightedRandomSampler,
            DistributedSampler,
            FeistelSampler,
        )
        if type(loader.sampler) not in plain or type(loader.batch_sampler) not in (BatchSampler, type(None)):
            return None
        try:
            keys = keys_of(loader)
        except TypeError:
            return None
        if not len(keys):
            return None
        return cls(keys, 0 if loader.batch_sampler is None else loader.batch_sampler.batch_size)

    def __call__(self) -> Index:
        if not self._size:
            return self._one()
        return [self._one() for _ in range(self._size)]

    def _one(self) -> Index:
        return self._keys[self._rng.randrange(len(self._keys))]
