"""Indices for measurements: like those the loader would draw, but from separate generators."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.distributed import DistributedSampler

from ...core.errors import UsageError
from ...core.types import Index, LoaderLike
from ...sampling.order import FeistelSampler

SEED = 0x570C
KEPT = 512  # tasks that are drawn again, so that the data they read is in memory
FEW = 16  # fewer tasks than this do not represent a dataset fairly
_PLAIN = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    FeistelSampler,
)
_END = object()


class MeasuringTasks:
    """Draws indices like the loader would, but from separate generators."""

    def __init__(self, loader: LoaderLike) -> None:
        self.fresh = True  # draw new tasks, as a first epoch does, or earlier ones, as later epochs do
        self.note = ""  # remark for the user; "" for none
        self._kept: list[Index] = []
        self._rng = random.Random(SEED)
        self._total = self._count = 0
        self._source = self._tasks_of(loader)

    def _tasks_of(self, loader: LoaderLike) -> Iterator[Index]:
        if loader._dataset_kind == _DatasetKind.Iterable:
            many = loader.batch_size if loader._auto_collation else 0
            self.fresh = False
            return itertools.repeat([None] * many if many else None)
        if type(loader.sampler) is SequentialSampler and type(loader.batch_sampler) is BatchSampler:
            return _cycle(loader.batch_sampler)  # the sampler has no state
        drawn = _draw_like(loader)
        if drawn is not None:
            return drawn
        sampler = loader._index_sampler
        try:
            sampler = copy.deepcopy(sampler)
        except Exception:
            self.note = f"{type(sampler).__name__} cannot be copied: its own state has advanced"
        return _cycle(sampler)

    def resized(self, loader: LoaderLike) -> MeasuringTasks:
        """Tasks of another size, that of ``loader``: they have the samples that were drawn here, so that these are in
        memory for one size as for the other; new ones where those are to be drawn."""
        out = MeasuringTasks(loader)
        size = loader.batch_size
        if size and not self.fresh and self.has_enough:
            samples = itertools.cycle([index for task in self._kept for index in task])
            out._source = (list(itertools.islice(samples, size)) for _ in itertools.count())
        out.fresh = self.fresh
        return out

    @property
    def samples(self) -> float:
        """Average number of samples per task."""
        return self._total / self._count if self._count else 1.0

    @property
    def has_enough(self) -> bool:
        """Whether there are enough tasks to draw again."""
        return len(self._kept) >= FEW

    def __call__(self) -> Index:
        if not self.fresh and self._kept and self.has_enough:
            return self._kept[self._rng.randrange(len(self._kept))]
        task = next(self._source)
        if len(self._kept) < KEPT:
            self._kept.append(task)
        self._total += len(task) if isinstance(task, (list, tuple)) else 1
        self._count += 1
        return task


def _cycle(sampler: Iterable[Index]) -> Iterator[Index]:
    """Yields a sampler's tasks, epoch after epoch."""
    while True:
        tasks = iter(sampler)
        first = next(tasks, _END)
        if first is _END:
            raise UsageError(f"{type(sampler).__name__} yields no batches")
        yield first
        yield from tasks


def keys_of(loader: LoaderLike) -> Sequence[Index]:
    """The indices with which a map-style dataset is accessed. Raises TypeError if the dataset has no length."""
    if isinstance(loader.sampler, SubsetRandomSampler):
        return loader.sampler.indices
    return range(len(loader.dataset))


def _draw_like(loader: LoaderLike) -> Iterator[Index] | None:
    """Yields tasks like a loader's from a separate generator; None if only the loader's sampler can produce them."""
    if type(loader.sampler) not in _PLAIN or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return None
    try:
        keys = keys_of(loader)
    except TypeError:
        return None
    size = None if loader.batch_sampler is None else loader.batch_sampler.batch_size
    return _draw(keys, size) if len(keys) else None


def _draw(keys: Sequence[Index], size: int | None) -> Iterator[Index]:
    rng = random.Random(SEED)
    while True:
        drawn = [keys[rng.randrange(len(keys))] for _ in range(size or 1)]
        yield drawn if size else drawn[0]
