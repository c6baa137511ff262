"""What ``iter(loader)`` returns without workers: torch's own iterator, whose place in the epoch can be saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from ..core.nested import pin
from ..sampling.cursor import Cursor
from ..sampling.seeding import seed_here, unchanged
from ..sampling.stateful import is_stateful, noted, put, read
from ..sampling.task_seeds import ObjectSeeds, run_here
from ..workers.exceptions import note
from ..workers.faults.guard import Guard
from ..workers.faults.policy import NOTHING, OnError, Partial
from ..workers.fetcher import batches, is_plain, parts, put_back, skip, state_of
from ..workers.gather import RowGather, select

if TYPE_CHECKING:
    from ..sampling.state import Part, State
    from ..workers.faults.error_log import ErrorLog


class InlineIter(_SingleProcessDataLoaderIter):
    """torch's own iterator without workers, whose place in the epoch can be saved.

    Args:
        loader: torch's ``DataLoader`` or a subclass.
        cursor: where the epoch is, and where it goes on.
    """

    def __init__(self, loader: Any, cursor: Cursor) -> None:
        saved = cursor.saved
        state: Any = None
        found: tuple[Part, ...] = ()
        cursor.prepare()
        if saved is not None:
            cursor.kind = "iterable" if loader._dataset_kind == _DatasetKind.Iterable else "map"
            found = cursor.parts(1)
            state = found[0].state if found else None
            if state is not None:
                put(loader.dataset, state["dataset"], "dataset")
        with cursor.quiet():
            super().__init__(loader)
        cursor.lives_on, cursor.workers = True, 0
        cursor.adopt(self)
        self._cursor, self._task_seeds = cursor, cursor.task_seeds
        self._own: ObjectSeeds | None = None
        if cursor.task_seeds and loader._dataset_kind == _DatasetKind.Map:
            self._own = ObjectSeeds(loader.dataset, loader.collate_fn)
        fetcher = self._dataset_fetcher
        inner = getattr(fetcher, "dataset_iter", None)
        if state is not None and inner is not None:
            put_back(fetcher, state)
        if is_stateful(self._dataset) or is_stateful(inner):
            cursor.live = functools.partial(_live, self._dataset, fetcher)
        if saved is not None:
            self._IterableDataset_len_called = saved.len_called  # type: ignore[assignment]
            self._num_yielded = saved.next
        cursor.len_called = self._IterableDataset_len_called
        self._sampler_iter = cursor.begin(self._sampler_iter)
        cursor.epoch = 0 if saved is None else saved.epoch
        if saved is not None and inner is not None and found:
            self._skip(saved, found[0])

    def _skip(self, saved: State, part: Part) -> None:
        """Takes what an iterable dataset gave since its state was taken, or since the beginning."""
        with unchanged():
            if not self._task_seeds:
                self._cursor.set_random(saved)
            for number in range(part.at, part.count):
                if self._task_seeds:
                    seed_here(saved.base_seed, saved.epoch, number)
                if not skip(self._dataset_fetcher, self._cursor.batch_size, plain=is_plain(self._collate_fn)):
                    break

    def _next_data(self) -> Any:
        cursor = self._cursor
        try:
            index = cursor.take(self._sampler_iter)
            if self._task_seeds:
                place = cursor.base_seed, cursor.epoch, cursor.next
                data = run_here(self._own, *place, functools.partial(self._fetched, index))
            else:
                data = self._fetched(index)
        except StopIteration:
            cursor.finished = True
            raise
        except Exception as e:
            note(e, self._dataset)
            cursor.next += 1
            raise
        cursor.next += 1
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)  # torch's knows no dataclasses, and fails on a device's tensors
        return data

    def _fetched(self, index: Any) -> Any:
        return self._dataset_fetcher.fetch(index)

    def state_dict(self) -> dict[str, Any]:
        """The loader's, while this is its iterator."""
        return self._cursor.save().to_dict()


def here(
    dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool, cursor: Cursor
) -> Callable[[int, Any], Any]:
    """Makes batches of a map-style dataset in this process, by number and indices, as any worker would make them."""
    fetch = _DatasetKind.create_fetcher(_DatasetKind.Map, dataset, auto_collation, collate_fn, drop_last).fetch
    fetch = gathered(dataset, auto_collation, collate_fn, fetch) or fetch
    own: ObjectSeeds | None = None

    def make(number: int, indices: Any) -> Any:
        nonlocal own
        if isinstance(fetch, RowGather):  # which draws nothing
            return fetch(indices)
        if own is None:
            own = ObjectSeeds(dataset, collate_fn)
        return run_here(own, cursor.base_seed, cursor.epoch, number, functools.partial(fetch, indices))

    return make


def gathered(dataset: Any, auto_collation: bool, collate_fn: Any, fetch: Any) -> Callable[[Any], Any] | None:
    """What makes whole batches of a dataset that can be asked for them; else None."""
    if RowGather.fits(dataset, collate_fn, auto_collation):
        return RowGather(dataset, fetch)
    return batches(dataset, collate_fn, select, collate_fn) if auto_collation else None


class GuardedIter(InlineIter):
    """The same for a loader with a policy for samples that fail.

    Args:
        loader: a ``DataLoader`` with 0 workers and a map-style dataset.
        cursor: where the epoch is, and where it goes on.
        policy: what to do.
        ledger: the account of what failed.
    """

    def __init__(self, loader: Any, cursor: Cursor, policy: OnError, ledger: ErrorLog) -> None:
        super().__init__(loader, cursor)
        fetcher = self._dataset_fetcher
        # Whatever stands behind ``fetch`` when it is called: a gather, or somebody who takes times.
        made = parts(self._dataset, self._auto_collation, self._collate_fn, lambda indices: fetcher.fetch(indices))
        self._ledger, self._guard = ledger, Guard(made, policy)

    def _fetched(self, index: Any) -> Any:
        place = self._cursor.base_seed, self._cursor.epoch, self._cursor.next
        self._guard.begin(*place, functools.partial(self._seed_again, *place) if self._task_seeds else None)
        return self._guard(index)

    def _seed_again(self, base_seed: int, epoch: int, task: int) -> None:
        seed_here(base_seed, epoch, task)
        if self._own is not None:
            self._own.seed(base_seed, epoch, task)

    def _next_data(self) -> Any:
        while True:
            data = super()._next_data()
            if type(data) is Partial:
                data = self._ledger.open(data)
            if data is not NOTHING:
                return data


def _live(dataset: Any, fetcher: Any) -> Any:
    """A dataset's state as it is now; a copy, made and read here."""
    return read(noted(lambda: state_of(dataset, fetcher)))
