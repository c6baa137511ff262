"""The stages inside a worker: fetch the samples of a task, collate them, and say what each cost."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import Subset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataloader import _DatasetKind

from ..sampling.stateful import is_stateful, load_into
from .collate import SlotCollate
from .faults.guard import Guard, Mark, Parts
from .faults.policy import Failure, OnError
from .gather import RowGather


class BatchFetcher:
    """fetch, then collate, for one worker and one epoch.

    Args:
        kind: torch's ``_DatasetKind``.
        dataset: map- or iterable-style; an iterable one is started here.
        auto_collation: whether a task is a list of indices.
        collate: collate function, wrapped so that it writes to a slot and is timed.
        drop_last: torch's.
        on_error: what to do about samples that fail; None: torch's way.
        mark: is told where in its task the worker is, before each sample; None: nobody wants to know.

    Attributes:
        guard: what does both, and wants to know of each task.
    """

    def __init__(
        self,
        kind: int,
        dataset: Any,
        auto_collation: bool,
        collate: SlotCollate,
        drop_last: bool,
        on_error: OnError | None = None,
        mark: Mark | None = None,
    ) -> None:
        self._collate = collate
        self._what = dataset, auto_collation
        self.guard: Guard | None = None
        self.fetch_ns = 0
        self.collate_ns = 0
        self._run: Callable[[Any], Any]
        self.fetcher: Any = None  # torch's, of an iterable dataset
        if kind == _DatasetKind.Map:
            self._run = _map(dataset, auto_collation, collate)
            if on_error is not None or mark is not None:
                self._run = self.guard = self._guarded(on_error or OnError(), mark)
        else:  # torch's own: when an iterable has ended, and what drop_last means then, is decided in there
            self.fetcher = _DatasetKind.create_fetcher(kind, dataset, auto_collation, collate, drop_last)
            self._run = self.fetcher.fetch

    def _guarded(self, on_error: OnError, mark: Mark | None) -> Guard:
        dataset, auto_collation = self._what
        return Guard(parts(dataset, auto_collation, self._collate, self._run), on_error, mark)

    def watched(self, mark: Mark) -> Guard:
        """What makes the same batches and says where it is; for tasks of workers that died."""
        if self.guard is None:
            return self._guarded(OnError(), mark)
        self.guard.mark = mark
        return self.guard

    def again(self, guard: Guard, indices: Any, bad: dict[int, Failure]) -> Any:
        """``run`` with samples that are not to be tried."""
        run, self._run = self._run, functools.partial(guard, bad=bad)
        try:
            return self.run(indices)
        finally:
            self._run = run

    def run(self, indices: Any) -> Any:
        """One batch. Leaves the nanoseconds of both stages in ``fetch_ns`` and ``collate_ns``."""
        self._collate.spent_ns = 0
        began = time.perf_counter_ns()
        try:
            return self._run(indices)
        finally:
            self.collate_ns = self._collate.spent_ns
            self.fetch_ns = time.perf_counter_ns() - began - self.collate_ns

    def skip(self, size: int | None) -> bool:
        """Takes the samples of one batch from an iterable dataset, and drops them. A collate function of the user's is
        called, for it may draw random numbers. Returns False at the end."""
        return skip(self.fetcher, size, plain=is_plain(self._collate.fn))


_END = object()


def state_of(dataset: Any, fetcher: Any) -> dict[str, Any]:
    """What a dataset says of its state, and its iterator if there is one that is not the dataset; ``ended``: a batch
    came out short, so the iterator has seen its end and the dataset may be at the next epoch's beginning."""
    inner = getattr(fetcher, "dataset_iter", None)
    return {
        "dataset": dataset.state_dict() if is_stateful(dataset) and inner is not dataset else None,
        "iterator": inner.state_dict() if inner is not None and is_stateful(inner) else None,
        "ended": bool(getattr(fetcher, "ended", False)),
    }


def put_back(fetcher: Any, state: dict[str, Any]) -> None:
    """Goes on with an iterable dataset that has its state already, and was started."""
    load_into(fetcher.dataset_iter, state["iterator"], "dataset's iterator")
    if state["ended"]:
        if next(fetcher.dataset_iter, _END) is not _END:
            load_into(fetcher.dataset, state["dataset"], "dataset")
            load_into(fetcher.dataset_iter, state["iterator"], "dataset's iterator")
        fetcher.ended = True


def is_plain(collate_fn: Any) -> bool:
    """Whether it is torch's, which draws no random numbers."""
    return collate_fn in (torch_collate.default_collate, torch_collate.default_convert)


def skip(fetcher: Any, size: int | None, plain: bool) -> bool:
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
        pass  # it was told when it came the first time
    return True


def _map(dataset: Any, auto_collation: bool, collate: SlotCollate) -> Callable[[Any], Any]:
    """torch's ``_MapDatasetFetcher`` with its look-ups done once and not once a sample."""
    if not auto_collation:
        alone(dataset)
        return lambda index: collate(dataset[index])
    staged = batches(dataset, collate, collate.select, collate.fn)
    if staged is not None:
        return staged
    many = getattr(dataset, "__getitems__", None)

    def loop(indices: Any) -> Any:
        if many:
            return collate(many(indices))
        samples = []
        for index in indices:  # no comprehension: where one fails, ``blame`` finds the index in this frame
            samples.append(dataset[index])
        return collate(samples)

    return RowGather(dataset, loop, collate.select) if RowGather.fits(dataset, collate.fn, auto_collation) else loop


def staged_in(dataset: Any) -> Any:
    """The dataset, or that of a ``Subset``, if it makes batches of its own (``Staged``); else None."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset if hasattr(type(dataset), "_stoker_batches") else None


def parts(dataset: Any, auto_collation: bool, collate: Callable[[Any], Any], run: Callable[[Any], Any]) -> Parts:
    """The ways in which ``run`` makes a batch of a map-style dataset, one by one."""
    if not auto_collation:
        return Parts(dataset, False, None, dataset.__getitem__, lambda samples: collate(samples[0]))
    staged = staged_in(dataset)
    if staged is not None:

        def finish(samples: list[Any]) -> Any:
            batch = collate(samples)
            return batch if staged.augment_batch is None else staged.augment_batch(batch)

        return Parts(dataset, True, run, functools.partial(_staged_one, dataset), finish)
    inner, fn = dataset, collate.fn if isinstance(collate, SlotCollate) else collate
    while type(inner) is Subset:
        inner = inner.dataset
    many = hasattr(inner, "__getitems__") or RowGather.fits(dataset, fn, auto_collation)
    return Parts(dataset, True, run if many else None, dataset.__getitem__, collate)


def _staged_one(dataset: Any, index: Any) -> Any:
    """A sample of a staged dataset, its own random part included."""
    while type(dataset) is Subset:
        dataset, index = dataset.dataset, dataset.indices[index]
    return dataset.make([index])[0]


def alone(dataset: Any) -> None:
    """Samples are asked for one by one: an error where a staged dataset wants whole batches."""
    staged = staged_in(dataset)
    if staged is not None and staged.augment_batch is not None:
        staged._no_batch()


def batches(dataset: Any, collate: Any, select: Any, fn: Any) -> Callable[[Any], Any] | None:
    """How a dataset makes batches of its own, if it does: of a list of indices.

    Args:
        dataset: the loader's.
        collate: samples to a batch.
        select: rows of tables, as ``gather.select``.
        fn: the user's collate function.
    """
    if staged_in(dataset) is None:
        return None
    if type(dataset) is Subset:
        inner = batches(dataset.dataset, collate, select, fn)
        assert inner is not None
        make, subset = inner, dataset
        return lambda indices: make([subset.indices[i] for i in indices])
    made: Callable[[Any], Any] = dataset._stoker_batches(collate, select, fn is torch_collate.default_collate)
    return made
