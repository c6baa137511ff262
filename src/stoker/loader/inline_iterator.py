"""``iter(loader)`` without workers: torch's own iterator, whose position in the epoch can be saved."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from ..core.errors import StateError
from ..core.nested import pin
from ..core.random_state import preserved
from ..core.types import Batch, Index, JsonObject, LoaderLike, MapDataset
from ..sampling.cursor import Cursor
from ..sampling.seeding import seed_here
from ..sampling.stateful import is_stateful, load_into, pickled_state, read_state
from ..sampling.task_seeds import ObjectSeeds, run_here
from ..workers.exceptions import note
from ..workers.faults.guard import Guard
from ..workers.faults.policy import NOTHING, OnError, Partial
from ..workers.fetcher import batches, is_plain, parts, put_back, skip, staged_in, state_of
from ..workers.gather import RowGather, select

if TYPE_CHECKING:
    from ..sampling.state import State as RunState
    from ..sampling.state import WorkerPart
    from ..workers.faults.error_log import ErrorLog
    from ..workers.protocol import LateDataset


Collate: TypeAlias = Callable[..., Batch]
Fetch: TypeAlias = Callable[[Index], Batch]


class InlineIter(_SingleProcessDataLoaderIter):
    """torch's own iterator without workers, whose position in the epoch can be saved."""

    ends_with_epoch = False  # the next epoch needs a new iterator, even with persistent workers
    _late: LateDataset | None = None

    def __init__(self, loader: LoaderLike, cursor: Cursor) -> None:
        saved = cursor.saved
        cursor.prepare()
        part = None if saved is None else _resume_dataset(loader, cursor, saved)
        with cursor.preserve_rng():
            if saved is not None and cursor.kind == "iterable":
                cursor.restore_rng_before(saved)
            super().__init__(loader)  # starts an iterable dataset, which may draw random numbers
        cursor.lives_on = True
        cursor.workers = 0
        cursor.adopt_seeds(self)
        self._cursor = cursor
        self._task_seeds = cursor.task_seeds
        self._object_seeds: ObjectSeeds | None = None
        if cursor.task_seeds and loader._dataset_kind == _DatasetKind.Map:
            self._object_seeds = ObjectSeeds(loader.dataset, loader.collate_fn)
        fetcher = self._dataset_fetcher
        stream = getattr(fetcher, "dataset_iter", None)  # for an iterable dataset
        if part is not None and part.state is not None and stream is not None:
            put_back(fetcher, part.state)
        if is_stateful(self._dataset) or is_stateful(stream):
            dataset = self._dataset
            cursor.live_state = lambda: read_state(pickled_state(lambda: state_of(dataset, fetcher)))
        if saved is not None:
            self._num_yielded = saved.next
        self._sampler_iter = cursor.begin(self._sampler_iter)
        cursor.epoch = 0 if saved is None else saved.epoch
        if saved is not None and stream is not None and part is not None:
            self._skip(saved, part)

    def _skip(self, saved: RunState, part: WorkerPart) -> None:
        """Skips what an iterable dataset has yielded since its state was taken, or since the start."""
        with preserved():
            if not self._task_seeds:
                self._cursor.restore_process_rng(saved)
            for number in range(part.at, part.count):
                if self._task_seeds:
                    seed_here(saved.base_seed, saved.epoch, number)
                if not skip(self._dataset_fetcher, self._cursor.batch_size, plain=is_plain(self._collate_fn)):
                    break

    def _next_data(self) -> Batch:
        cursor = self._cursor
        try:
            index = cursor.take(self._sampler_iter)
            if self._task_seeds:
                place = cursor.base_seed, cursor.epoch, cursor.next
                data = run_here(self._object_seeds, *place, functools.partial(self._fetched, index))
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
            # torch's own function does not know dataclasses, and fails for tensors on a device
            data = pin(data, self._pin_memory_device)
        return data

    def _fetched(self, index: Index) -> Batch:
        if self._late is not None:
            self._use_late_dataset(self._late)
        return self._dataset_fetcher.fetch(index)

    def gather(self, dataset: MapDataset) -> None:
        """Fetches whole batches of the dataset from now on, if it supports that."""
        fetcher = self._fetcher = self._dataset_fetcher
        gather = gathered(dataset, self._auto_collation, self._collate_fn, fetcher.fetch)
        # assigning its own bound method would create a cycle that keeps the dataset alive until a garbage collection
        if gather is not None:
            fetcher.fetch = gather

    def expect(self, late: LateDataset | None) -> None:
        """Another dataset may make the same samples from a cache before this epoch ends."""
        if late is not None and late.is_here and self._auto_collation and not self._cursor.task_seeds:
            self._late = None if is_stateful(self._dataset) else late

    def _use_late_dataset(self, late: LateDataset) -> None:
        """Switches to the cached dataset once there is one."""
        again, dataset = late.ask(), late.read(self._fetcher.dataset)
        staged = staged_in(dataset)
        if staged is not None:
            with contextlib.suppress(Exception):  # the present dataset makes the same samples
                staged._begin()
                make = batches(dataset, self._collate_fn, select, self._collate_fn)
                self._fetcher.dataset, self._fetcher.fetch = dataset, make
        if staged is not None or not again:
            self._late = None

    def state_dict(self) -> JsonObject:
        """The loader's state dict, while this is its iterator."""
        return self._cursor.save().to_dict()


def _resume_dataset(loader: LoaderLike, cursor: Cursor, saved: RunState) -> WorkerPart | None:
    """Restores the dataset's saved state. Returns the part of the saved run that is read here."""
    cursor.kind = "iterable" if loader._dataset_kind == _DatasetKind.Iterable else "map"
    if saved.dealt_anew and saved.parts:
        raise StateError(
            "the parts of the iterable dataset are redistributed among the ranks, and only a worker can continue a "
            "part that another rank began. Set num_workers to 1 or more"
        )
    part = next(iter(cursor.saved_parts(1)), None)
    if part is not None:
        load_into(loader.dataset, part.dataset_state, "dataset")
    return part


def here(
    dataset: MapDataset,
    auto_collation: bool,
    collate_fn: Collate,
    drop_last: bool,
    seeds: Callable[[], tuple[int, int]] | None,
) -> Callable[[int, Index], Batch]:
    """Returns a function that makes batches of a map-style dataset in this process, as any worker would make them, from
    task number and indices. ``seeds``: base seed and epoch; None: from the generators as they are, as without
    workers."""
    fetch = _DatasetKind.create_fetcher(_DatasetKind.Map, dataset, auto_collation, collate_fn, drop_last).fetch
    fetch = gathered(dataset, auto_collation, collate_fn, fetch) or fetch
    object_seeds: ObjectSeeds | None = None

    def make(number: int, indices: Index) -> Batch:
        nonlocal object_seeds
        if seeds is None or isinstance(fetch, RowGather):  # which draws no random numbers
            return fetch(indices)
        if object_seeds is None:
            object_seeds = ObjectSeeds(dataset, collate_fn)
        return run_here(object_seeds, *seeds(), number, functools.partial(fetch, indices))

    return make


def gathered(dataset: MapDataset, auto_collation: bool, collate_fn: Collate, fetch: Fetch) -> Fetch | None:
    """Returns a function that fetches whole batches, if the dataset supports that; else None."""
    if RowGather.fits(dataset, collate_fn, auto_collation):
        return RowGather(dataset, fetch)
    return batches(dataset, collate_fn, select, collate_fn) if auto_collation else None


class DebugIter(InlineIter):
    """For ``debug=True`` and ``stoker run --debug``: runs everything in this process, with any number of workers, so
    that breakpoints stop and tracebacks are plain. Order and shapes are the loader's own. Random augmentation differs,
    because it draws from this process' random state. ``worker_init_fn`` is not called, and an iterable dataset is read
    as a whole."""

    def __init__(self, loader: LoaderLike, cursor: Cursor | None = None) -> None:
        alone = copy.copy(loader)
        vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, _iterator=None)
        super().__init__(alone, Cursor(loader._index_sampler, loader.generator) if cursor is None else cursor)


class GuardedIter(InlineIter):
    """``InlineIter`` for a loader with a policy for failing samples."""

    def __init__(self, loader: LoaderLike, cursor: Cursor, policy: OnError, error_log: ErrorLog) -> None:
        super().__init__(loader, cursor)
        fetcher = self._dataset_fetcher
        # Looks ``fetch`` up when called: it may by then be a gather, or a function that takes times.
        made = parts(self._dataset, self._auto_collation, self._collate_fn, lambda indices: fetcher.fetch(indices))
        self._error_log = error_log
        self._guard = Guard(made, policy)

    def _fetched(self, index: Index) -> Batch:
        place = self._cursor.base_seed, self._cursor.epoch, self._cursor.next
        self._guard.begin(*place, functools.partial(self._seed_again, *place) if self._task_seeds else None)
        return self._guard(index)

    def _seed_again(self, base_seed: int, epoch: int, task: int) -> None:
        seed_here(base_seed, epoch, task)
        if self._object_seeds is not None:
            self._object_seeds.seed(base_seed, epoch, task)

    def _next_data(self) -> Batch:
        while True:
            data = super()._next_data()
            if type(data) is Partial:
                data = self._error_log.open(data)
            if data is not NOTHING:
                return data
