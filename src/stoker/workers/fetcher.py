"""Fetches the samples of a task, collates them, and times both."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.fetch import _IterableDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind

from ..core.dataset_tree import without_subsets
from ..core.types import Batch, Index, JsonObject, MapDataset, Sample
from ..sampling.stateful import is_stateful, load_into
from .collate import CollateFn, SlotCollate, maps_are_own
from .faults.guard import Ahead, FetchParts, Guard, OnSampleStart
from .faults.policy import Failure, OnError
from .gather import RowGather, Select
from .protocol import MakesBatches, WorkerSpec


class BatchFetcher:
    """Fetches and collates for one worker and one epoch. The constructor calls ``iter()`` on an iterable dataset."""

    def __init__(
        self,
        spec: WorkerSpec,
        dataset: Any,  # the worker's own
        collate: SlotCollate,  # writes to a slot and is timed
        on_sample_start: OnSampleStart | None,  # None if positions are not needed
        reads: Ahead | None,  # loads samples of a batch with threads; None to load them one after the other
    ) -> None:
        self._reads = reads
        self._collate = collate
        self._dataset = dataset
        self._auto_collation = spec.auto_collation
        self.guard: Guard | None = None  # handles samples that fail; None to let errors through
        # nanoseconds spent on the last batch
        self.fetch_ns = 0
        self.collate_ns = 0
        self._run: Callable[[Index], Batch]
        self.fetcher: _IterableDatasetFetcher | None = None  # torch's, for an iterable dataset
        if spec.kind == _DatasetKind.Map:
            self._run = _map(dataset, spec.auto_collation, collate, reads)
            if spec.on_error is not None or on_sample_start is not None:
                self._run = self.guard = self._guarded(spec.on_error or OnError(), on_sample_start)
        else:  # torch's own fetcher decides when an iterable has ended, and how drop_last applies
            self.fetcher = _DatasetKind.create_fetcher(spec.kind, dataset, spec.auto_collation, collate, spec.drop_last)
            self._run = self.fetcher.fetch

    def _guarded(self, on_error: OnError, on_sample_start: OnSampleStart | None) -> Guard:
        made_of = parts(self._dataset, self._auto_collation, self._collate, self._run)
        return Guard(made_of._replace(ahead=self._reads), on_error, on_sample_start)

    def guard_with_positions(self, on_sample_start: OnSampleStart | None) -> Guard:
        """Returns a guard that makes the same batches and reports its position, for tasks of workers that died."""
        if self.guard is None:
            return self._guarded(OnError(), on_sample_start)
        self.guard.on_sample_start = on_sample_start or self.guard.on_sample_start
        return self.guard

    def retry(self, guard: Guard, indices: Index, bad: dict[int, Failure]) -> Batch:
        """Like ``run``, without the samples in ``bad``."""
        run, self._run = self._run, functools.partial(guard, bad=bad)
        try:
            return self.run(indices)
        finally:
            self._run = run

    def run(self, indices: Index) -> Batch:
        """Makes one batch. Sets ``fetch_ns`` and ``collate_ns``."""
        self._collate.spent_ns = 0
        began = time.perf_counter_ns()
        try:
            return self._run(indices)
        finally:
            self.collate_ns = self._collate.spent_ns
            self.fetch_ns = time.perf_counter_ns() - began - self.collate_ns

    def skip(self, size: int | None) -> bool:
        """Takes the samples of one batch from an iterable dataset and drops them. Still calls a user's collate
        function, because it may draw random numbers. Returns False at the end of the dataset."""
        assert self.fetcher is not None
        return skip(self.fetcher, size, plain=is_plain(self._collate.fn))


_END = object()


def state_of(dataset: object, fetcher: object) -> JsonObject:
    """Returns the states of a dataset and of its iterator, if that is another object. ``ended``: a batch was short, so
    the iterator is exhausted, and the dataset may already be at the beginning of the next epoch."""
    inner = getattr(fetcher, "dataset_iter", None)
    return {
        "dataset": dataset.state_dict() if is_stateful(dataset) and inner is not dataset else None,
        "iterator": inner.state_dict() if inner is not None and is_stateful(inner) else None,
        "ended": bool(getattr(fetcher, "ended", False)),
    }


def put_back(fetcher: _IterableDatasetFetcher, state: JsonObject) -> None:
    """Restores the state of an iterable dataset's iterator, once the dataset is restored and ``iter()`` was called."""
    load_into(fetcher.dataset_iter, state["iterator"], "dataset's iterator")
    if state["ended"]:
        if next(fetcher.dataset_iter, _END) is not _END:
            load_into(fetcher.dataset, state["dataset"], "dataset")
            load_into(fetcher.dataset_iter, state["iterator"], "dataset's iterator")
        fetcher.ended = True


def is_plain(collate_fn: object) -> bool:
    """Whether a collate function is torch's, which draws no random numbers and calls no function of the user's."""
    if collate_fn is torch_collate.default_collate:
        return maps_are_own()
    return collate_fn is torch_collate.default_convert


def skip(fetcher: _IterableDatasetFetcher, size: int | None, plain: bool) -> bool:
    """See ``BatchFetcher.skip``."""
    try:
        if not plain:
            fetcher.fetch([None] * (size or 1))
            return True
        for _ in range(size or 1):
            next(fetcher.dataset_iter)
    except StopIteration:
        return False
    except Exception:
        pass  # it was reported the first time
    return True


def is_asked_one_by_one(dataset: object, collate_fn: object, auto_collation: bool) -> bool:
    """Whether the samples of a batch are requested one at a time."""
    if not auto_collation or staged_in(dataset) is not None or RowGather.fits(dataset, collate_fn, auto_collation):
        return False
    return not hasattr(without_subsets(dataset), "__getitems__")


def _map(
    dataset: MapDataset, auto_collation: bool, collate: SlotCollate, reads: Ahead | None
) -> Callable[[Index], Batch]:
    """torch's ``_MapDatasetFetcher``, with attributes looked up once instead of for each sample."""
    if not auto_collation:
        alone(dataset)
        return lambda index: collate(dataset[index])
    staged = batches(dataset, collate, collate.select, collate.fn)
    if staged is not None:
        return staged
    if reads is not None:
        return functools.partial(_loop_with_threads, dataset, collate, reads)
    many = getattr(dataset, "__getitems__", None)

    def loop(indices: list[Index]) -> Batch:
        if many:
            return collate(many(indices))
        samples = []
        for index in indices:  # not a comprehension: on an error ``exceptions`` reads the index from this frame
            samples.append(dataset[index])
        return collate(samples)

    return RowGather(dataset, loop, collate.select) if RowGather.fits(dataset, collate.fn, auto_collation) else loop


def _loop_with_threads(dataset: MapDataset, collate: SlotCollate, reads: Ahead, indices: list[Index]) -> Batch:
    made = reads(indices)
    samples = []
    for k, index in enumerate(indices):
        samples.append(made[k] if k in made else dataset[index])
    return collate(samples)


def staged_in(dataset: object) -> MakesBatches | None:
    """Unwraps ``Subset``s; returns the inner dataset if it makes its own batches (``Staged``), else None."""
    inner = without_subsets(dataset)
    return inner if hasattr(type(inner), "_stoker_batches") else None


def parts(
    dataset: MapDataset | Dataset[Sample], auto_collation: bool, collate: CollateFn, run: Callable[[Index], Batch]
) -> FetchParts:
    """Splits the way ``run`` makes a batch of a map-style dataset into parts."""
    if not auto_collation:
        return FetchParts(dataset, False, None, dataset.__getitem__, lambda samples: collate(samples[0]))
    staged = staged_in(dataset)
    if staged is not None:

        def finish(samples: list[Sample]) -> Batch:
            batch = collate(samples)
            return batch if staged.augment_batch is None else staged.augment_batch(batch)

        return FetchParts(dataset, True, run, functools.partial(_staged_one, dataset), finish)
    fn = collate.fn if isinstance(collate, SlotCollate) else collate
    many = hasattr(without_subsets(dataset), "__getitems__") or RowGather.fits(dataset, fn, auto_collation)
    return FetchParts(dataset, True, run if many else None, dataset.__getitem__, collate)


def _staged_one(dataset: Any, index: Index) -> Sample:
    """Makes one sample of a staged dataset, including its random part."""
    while type(dataset) is Subset:
        dataset, index = dataset.dataset, dataset.indices[index]
    return dataset.make([index])[0]


def alone(dataset: object) -> None:
    """Checks that samples can be requested one by one: raises if a staged dataset augments whole batches."""
    staged = staged_in(dataset)
    if staged is not None and staged.augment_batch is not None:
        staged._no_batch()


def batches(
    dataset: object, collate: CollateFn, select: Select, fn: CollateFn
) -> Callable[[list[Index]], Batch] | None:
    """Returns the function with which a dataset makes its own batches from lists of indices; None if it has none."""
    staged = staged_in(dataset)
    if staged is None:
        return None
    if type(dataset) is Subset:
        inner = batches(dataset.dataset, collate, select, fn)
        assert inner is not None
        make, subset = inner, dataset
        return lambda indices: make([subset.indices[i] for i in indices])
    is_default = fn is torch_collate.default_collate and is_plain(fn)
    return staged._stoker_batches(collate, select, is_default)
