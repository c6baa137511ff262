"""``Staged``: a dataset that caches its deterministic part and runs its random part every time."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path

import torch

from ..core.errors import StaleCacheError, UsageError
from ..core.types import Attributes, Batch, Index, JsonObject, MapDataset, Sample
from ..core.warn import warn_user
from ..workers.exceptions import users_part
from ..workers.gather import Select
from ..workers.read_threads import ReadThreads
from .batches import Batches
from .branches import Vetted
from .cache_key import key_of, name_of, of_process, why_not_kept
from .callee import call_of
from .change_watch import ON_MISMATCH, ChangeWatch, Discards, shortly
from .executed_code import written_by
from .filling import Failed, Filler, MadePart
from .inputs import Inputs
from .keep import KeptSamples
from .libraries_used import put_into_libraries
from .memoize import Memo, Table, table_for
from .open_store import CachePlan, budget_of, cache_folder, check_tier, new_store
from .plan import PreparedState, Unplanned
from .source_files import SourceFiles
from .split import REMEDY, Split, map_style
from .store.memory import MemoryTables
from .store.store import Gone, Store, StoreStats
from .vetting import mark
from .wrapper import Wrapper

NO_CACHE = "no cache"


class Staged(Wrapper):
    """A map-style dataset whose deterministic part is cached in memory that all workers share.

    The first epoch fills the cache at its usual speed, from all workers of any kind; later epochs read from the cache.
    Stored samples are never evicted. With ``stoker.DataLoader``, a batch whose samples are all stored, of one shape and
    without ``augment``, is a single gather.

    If the dataset changes within an epoch, nothing is served or stored until the next epoch, which starts a new cache.
    If it changes before each of four epochs, caching ends. A cache is discarded in all processes if a recomputed sample
    differs, or if too many samples have no deterministic part.

    Args:
        dataset: map-style; or a list of paths.
        prepare: deterministic, ``prepare(dataset[i])`` or ``prepare(path)``; its result is cached: tensors, arrays, PIL
            images, numbers and strings in tuples, lists and dicts. Anything else is pickled, and only in memory of one
            process and its workers.
        augment: random, ``augment(prepared)``, run every time. Without ``prepare`` and ``augment``, ``split`` finds
            both.
        augment_batch: random, ``augment_batch(batch)``, run once on each collated batch; requires
            ``stoker.DataLoader``.
        cache: "ram": shared memory of this run. "disk": mapped files, which later runs reuse. "auto": disk if
            ``cache_dir`` or ``$STOKER_CACHE`` is given, else memory. None: no cache.
        cache_budget: bytes, ``"4GB"``, or a share of the memory granted; None: half of what is free there.
        cache_dir: folder for caches on disk; None: ``$STOKER_CACHE``, else ``stoker/staged`` in the user's cache
            folder.
        cache_key: text for anything else that the samples depend on; a different text starts a new cache on disk.

    Raises:
        UsageError: a dataset without a length or a deterministic part, an invalid ``cache``, or an invalid budget.

    Example:
        >>> squares = Staged(list(range(8)), prepare=lambda i: torch.tensor(i * i))
        >>> [int(squares[i]) for i in range(4)], squares.account.filled
        ([0, 1, 4, 9], 4)
    """

    def __init__(
        self,
        dataset: MapDataset | torch.utils.data.Dataset[Sample],
        prepare: Callable[[Sample], Sample] | None = None,
        augment: Callable[[Sample], Sample] | None = None,
        *,
        augment_batch: Callable[[Batch], Batch] | None = None,
        cache: str | None = "auto",
        cache_budget: int | float | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_key: str = "",
        _split: Split | None = None,
        _memories: Sequence[MemoryTables] = (),
        _discards: Discards | None = None,
    ) -> None:
        check_tier(cache)
        paths = isinstance(dataset, (list, tuple)) and bool(dataset) and isinstance(dataset[0], (str, os.PathLike))
        if paths and prepare is None:
            raise UsageError("Staged needs prepare= for a list of paths: a function that turns a path into a sample")
        map_style(dataset)
        self.dataset = dataset
        self.augment_batch = augment_batch
        self.cache = cache
        self.split: Split | None = _split
        self._discards = _discards or Discards()
        self._epoch = 0  # number of the current epoch
        self._first_epoch = 0  # first epoch that this cache served
        self._begun = 0  # number of caches so far: nodes of a cluster discard theirs too
        self.stands_for: object = None  # the dataset that a script's workers believe they have
        self._said = (prepare, augment)
        self._cache_key = cache_key
        self._ignored: set[str] | None = None
        self._folder = cache_folder(cache, cache_dir)
        self._budget = budget_of(cache_budget, cache)
        self._vetted = Vetted()  # branches of the user's code that gave the same result under other conditions
        self._memories = tuple(_memories)  # memory of the node, for the first store and its table
        self._table: Table | None = None
        self._store: Store | None = None
        self._kept: KeptSamples | None = None  # between runs
        self._threads_matter = True  # samples may have other bits if other numbers of native threads make them
        self._epochs_are_announced = False  # stoker's loader announces them
        # An owner that runs trials itself announces epochs first, and makes another object after a change.
        self._is_owned, self._is_begun = _discards is not None, False
        self._begin_cache()
        self._seal()

    def _begin_cache(self) -> None:
        """Starts a cache for the current state of the dataset."""
        self._begun += 1
        self._first_epoch = self._epoch
        prepare, augment = self._said
        if prepare is None and augment is None and (self.split is None or self.split.dataset is not self.dataset):
            self.split = Split(self.dataset, changing=self._discards.changing)
        self._samples = len(self.dataset)
        memo = None if self.split is None else self.split.memo
        if memo is not None and self.cache == "disk":
            raise UsageError(
                f"only results of calls can be cached, and only in memory: {'; '.join(memo.root.all_shown())}"
            )
        self._table = None if memo is None else table_for(self._samples, memo.sites, *self._memories[1:])
        self._bind()
        # With ``prepare``, the user asserts that it is deterministic.
        why = (self._watch.why_unknown or self._unmarked) if self.split is not None else ""
        if why:
            raise UsageError(f"{type(self.dataset).__name__} cannot be split: {why}. {REMEDY}")
        self._store = self._open_store()

    def _open_store(self) -> Store | None:
        memories, self._memories = self._memories[:1], ()  # a changed dataset gets its own memory
        return new_store(
            CachePlan(
                cache=self.cache,
                samples=self._samples,
                slots=self.capacity,
                budget=self._budget,
                folder=self._folder,
                memories=memories,
                name=name_of(self.dataset),
                key=self._key,
                prepare=lambda i: self._prepare(i),
            )
        )

    def _bind(self, watch: ChangeWatch | None = None) -> None:
        """Creates what belongs to this process. ``watch``: of the object that this one copies."""
        prepare, augment = self._said
        split = self.split
        if split is not None:
            self._prepare: Callable[[Index], Sample] = split.prepare
            has_rest = split.plan is not None and not split.exact
            self._augment: Callable[[Sample], Sample] | None = split.augment if has_rest else None
        else:
            prepare = prepare or (lambda sample: sample)
            self._prepare, self._augment = lambda i: prepare(self.dataset[i]), augment
        self._memo: Memo | None = None
        opened = {} if split is None else split.opened
        self._watch = watch or ChangeWatch(self._inputs, opened, self._source_files)
        self._unmarked = mark(self._watch.functions) if split is not None else ""
        is_whole = self._augment is None
        asked = self._vetted, self._disable, self._watch.unwatched_file
        self._filler = Filler(self.dataset, split, self._said, self._prepare, is_whole, *asked)
        self._filler.elsewhere = self._kept

    def _inputs(self, across_runs: bool = False) -> Inputs:
        """Current values of what the deterministic part may read."""
        split = self.split
        if split is not None:
            return split.inputs(across_runs)
        # Excludes augment, which runs each time, and shared memory, to which loading may write.
        functions = [self._said[0]]
        if self._ignored is None:  # what ``prepare`` itself writes to, such as a log, does not matter
            found = Inputs(self.dataset, functions, shared=False).functions
            self._ignored = set().union(*map(written_by, found.values()))
        return Inputs(self.dataset, functions, shared=False, ignored=self._ignored, across_runs=across_runs)

    def _source_files(self, inputs: Inputs) -> SourceFiles:
        """The files from which samples are read."""
        split = self.split
        if split is None:
            return SourceFiles(self.dataset)
        return SourceFiles(self.dataset, split.folders, split.files, inputs.texts, inputs.functions.values())

    def _key(self, kept_in: Path | None = None) -> JsonObject:
        """What a cache on disk depends on. ``kept_in``: folder of all caches, of which nobody asked for this one. So it
        must not miss anything, and UsageError is raised if it might."""
        split, inputs = self.split, self._inputs(across_runs=True)
        inputs.add(put_into_libraries(inputs.packages))
        sources = self._source_files(inputs)
        opened, cut = ({}, "") if split is None else (split.opened, split.cut)
        key = key_of(inputs, opened, sources, self._samples, self._cache_key, cut)
        if kept_in is None:
            return key
        if why := sources.why_incomplete or why_not_kept(inputs, opened):
            raise UsageError(why)
        return key | of_process(inputs, kept_in)

    # -- a dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Index) -> Sample:
        if self.augment_batch is not None and torch.utils.data.get_worker_info() is not None:
            self._no_batch()
        return self.make([index])[0]

    def __getitems__(self, indices: Sequence[Index]) -> list[Sample]:
        if self.augment_batch is not None:
            self._no_batch()
        return self.make(indices)

    def _no_batch(self) -> None:
        raise UsageError(
            "augment_batch runs once per batch, which this loader does not support. Use stoker.DataLoader (or "
            "stoker.install()) with a batch size, on this dataset or Subsets of it"
        )

    def __repr__(self) -> str:
        return f"<Staged {type(self.dataset).__name__}: {self.report}>"

    def _stoker_children(self) -> Iterator[tuple[str, object]]:
        """Yields what the user passed. See ``core.object_tree.children``."""
        given = (self.dataset, *self._said, self.augment_batch)
        yield from zip((".dataset", ".prepare", ".augment", ".augment_batch"), given, strict=True)

    def __getstate__(self) -> Attributes:
        state = self.__dict__.copy()
        if get_spawning_popen() is None:
            state["_store"] = state["_table"] = None  # their memory belongs to this run and its workers
        for made in ("_prepare", "_augment", "_watch", "_memo", "_filler"):
            del state[made]
        return state

    def __setstate__(self, state: Attributes) -> None:
        self.__dict__.update(state)
        if self.split is not None and self.split.memo is not None and self._table is None:
            self._table = table_for(self._samples, self.split.memo.sites, *self._memories[1:])
        self._bind()
        if self._store is None:
            self._store = self._open_store()

    # -- what is cached

    @property
    def account(self) -> StoreStats:
        """Statistics of the cache."""
        if self._store is None:
            return StoreStats(self._samples, 0, 0, 0, 0, 0.0, NO_CACHE)
        return self._store.account._replace(samples=self._samples)

    @property
    def report(self) -> str:
        """One-line description of the cache."""
        return NO_CACHE if self._store is None else self._store.account.describe()

    @property
    def capacity(self) -> int:
        """Maximum number of samples, or of call results, in the cache."""
        return self._samples if self._table is None else self._table.slots

    @property
    def usable(self) -> bool:
        """Whether samples may be served from the cache or stored in it."""
        return self._store is not None and self._store.usable

    @property
    def has_effects(self) -> bool:
        """Whether a sample was found, in any process, that changes or prints something."""
        return self._vetted.has_effects

    @property
    def is_exact(self) -> bool:
        """Whether the cached part of a sample is the whole sample."""
        return self._augment is None and self._table is None

    def replace_dataset(self, dataset: MapDataset) -> None:
        """Substitutes another object with the same content: its random part runs from now on; the cache stays."""
        self.dataset = self.stands_for = dataset
        if self.split is not None:
            self.split.dataset = dataset
        self._filler.replace_dataset(dataset)
        self._memo = None

    # -- changes

    def _begin(self, forks_are_same: bool = False) -> None:
        """Begins an epoch in the parent process; starts a new cache if the dataset has changed. ``forks_are_same``: no
        code of the user runs between this call and a worker's first sample, neither in a thread nor in the worker."""
        if self._is_begun:
            self._is_begun, self._watch.forks_are_same = False, forks_are_same
            return
        self._pass_on()
        self._epochs_are_announced = True
        self._epoch += 1
        self._filler.comparison.begin_epoch()
        if self._discards.too_many and not self._is_owned:
            return
        self._watch.forks_are_same = forks_are_same
        changes = self._watch.changes()
        if not changes and len(self.dataset) == self._samples:
            if self._store is not None:
                self._store.forget_begun()
            # otherwise nothing was made since the last change: the same epoch was announced twice
            if self.account.filled:
                self._discards.end_row()
                self._save()
            return
        self._discards.add(changes)
        if self._kept is not None:
            self._kept.end()
            self._kept = None  # it belongs to the dataset as it was
        if self._store is not None and self._store.medium.kind == "RAM" and self.account.ranks == 1:
            self._store.shut("the dataset changed")  # workers of another epoch may still use it
        reason, consequence = shortly(changes) or "its length changed", ""
        self.split, self._vetted = None, Vetted()
        try:
            if self._discards.too_many:
                raise UsageError("it changes before each epoch")
            if self._is_owned:
                self._go_without(self._watch)
            else:
                self._begin_cache()
        except UsageError as e:  # no reason to end a script
            consequence = f" From now on nothing is cached: {str(e).removesuffix('. ' + REMEDY)}."
            self._go_without()
        warn_user(f"Cache discarded, the dataset changed: {reason}.{consequence}")

    def _go_without(self, watch: ChangeWatch | None = None) -> None:
        """Caches nothing from now on. ``watch``: see ``_bind``."""
        self._samples = len(self.dataset)
        self._table = self.split = self._store = None
        self._bind(watch)

    @property
    def changes_always(self) -> bool:
        """Whether what it is made from has changed before each of several epochs."""
        return self._discards.too_many

    def begin_first(self) -> bool:
        """Begins an epoch before its loader does, for the owner. Returns whether the dataset is unchanged since the
        cache was made; if it is not, nothing is cached any more."""
        self._is_begun = False
        self._begin()
        self._is_begun = True
        return self.split is not None

    def set_threads_matter(self, matter: bool) -> None:
        """Sets whether samples may have other bits if another number of native threads makes them."""
        self._threads_matter = matter
        if self._kept is not None:
            self._kept.threads_matter = matter

    def keep_between_runs(self, base: Path, most: int, threads: int = 0) -> int:
        """Reads samples of earlier runs from the folder of all caches, and leaves this run's samples there. Returns how
        many were found. ``most``: bytes that all caches may take; ``threads``: native threads with which samples are
        made, 0 for any. Raises UsageError: the inputs have no key; CacheError: others could rename caches there."""
        key = {**self._key(kept_in=base), "threads": threads}
        kept = KeptSamples(base, name_of(self.dataset), key, self._samples, most)
        kept.threads, kept.threads_matter = threads, self._threads_matter
        if kept.is_right(self._prepare):
            self._kept = self._filler.elsewhere = kept
            atexit.register(_save_at_exit, weakref.ref(self))
        return kept.found

    def _save(self) -> None:
        if self._kept is not None and self._store is not None:
            self._kept.save(self._store)

    def look_again(self) -> None:
        """Begins an epoch in a persistent worker: checks for changes in memory shared with the parent."""
        self._watch.check_soon()
        self._filler.comparison.begin_epoch()
        if self._filler.elsewhere is not None:
            self._filler.elsewhere.look_again()

    def begin_in_helper(self) -> None:
        """Begins in a process that was forked within an epoch: the script may have changed the dataset since."""
        self._watch.forks_are_same = False
        self.look_again()

    def begin_as_forked(self) -> None:
        """Begins an epoch in a worker that equals one forked now: the script's process has looked for changes."""
        self._watch.forked_anew()

    def current(self, indices: Sequence[Index] = ()) -> Store | None:
        """The store, if samples may currently be served from it and stored in it by this process."""
        self._pass_on()
        store = self._store
        if store is None or not store.usable or not self._vetted.is_kind(indices):
            return None
        plan = None if self.split is None else self.split.plan
        if plan is not None and plan.own_caches and torch.utils.data.get_worker_info() is None:
            return None  # the script's own cache serves its process, and keeps what it holds when other data change
        self._watch.check_for(indices, self._epochs_are_announced, plan.head_s if plan else self._filler.part_s)
        if not self._watch.is_current:
            return None
        if self._threads_matter and not store.made_with(torch.get_num_threads(), self._are_same_here):
            return None
        return store

    def _are_same_here(self) -> bool:
        """Whether this process, which has another number of native threads, makes the same bits."""
        return self._store is not None and self._table is None and self._filler.are_same(self._store)

    def _disable(self, reason: str, stale: bool = False) -> None:
        """Ends the cache in all processes. ``stale``: samples served so far may have been wrong."""
        first, last = self._first_epoch + 1, self._epoch
        if stale and last > first:
            reason += f"; epochs {first} to {last} may have had stale samples"
        if self._store is not None and self._store.shut(reason):
            warn_user(f"Cache discarded: {reason}.")
        if stale and self._kept is not None:
            self._kept.discard()
        if stale and os.environ.get(ON_MISMATCH) == "stop":
            raise StaleCacheError(reason)

    @property
    def read_threads(self) -> int | str:
        """Number of threads that make deterministic parts in a worker process. See ``stoker.DataLoader``."""
        return self._filler.read_threads

    @read_threads.setter
    def read_threads(self, asked: int | str) -> None:
        self._filler.read_threads = asked

    @property
    def reads(self) -> ReadThreads | None:
        """The threads that make deterministic parts, if any."""
        return self._filler.reads

    # -- samples

    def make(self, indices: Sequence[Index]) -> list[Sample]:
        """Makes samples, including their random part."""
        store = self.current(indices)
        if store is not None and self._table is not None:
            return [self._with_cached_calls(store, self._table, i) for i in indices]
        if store is not None and self.split is not None and (self.split.in_turn or self._vetted.has_effects):
            # A sample may read what the previous one has changed.
            return [sample for index in indices for sample in self._make(store, [index])]
        return self._make(store, indices)

    def _make(self, store: Store | None, indices: Sequence[Index]) -> list[Sample]:
        """Makes samples: first all deterministic parts, then all random ones."""
        where = store.find(indices) if store is not None else None
        parts = self._filler.fill(store, indices, where) if store is not None and where is not None else None
        if store is None or where is None or parts is None:
            return self._without_cache(indices)
        locations = where.tolist()
        # Another process may have discarded the cache before this process read anything from it.
        if any(locations) and not (store.ready() and self.is_same(store, indices, locations)):
            if not self._filler.were_in_order:
                return self._without_cache(indices)
            locations = [0] * len(locations)  # what was made now has drawn and changed what it should, once
        augment = self._augment
        out = []
        for k, location in enumerate(locations):
            if not location and k not in parts:
                out.append(self._whole(indices[k]))  # in its turn, because it draws random numbers
                continue
            try:
                part = store.read(location) if location else parts[k]
            except Gone:
                out.append(self._whole(indices[k]))
                continue
            if type(part) is Failed:
                try:
                    raise part.error.with_traceback(users_part(part.error.__traceback__))
                finally:
                    del part, parts, out  # the error's traceback holds this frame
            out.append(part if augment is None else self._finished(indices[k], part, augment))
        return out

    def _finished(self, index: Index, part: PreparedState, augment: Callable[[PreparedState], Sample]) -> Sample:
        """Runs the random part. If the dataset now calls another function at the cut, which nothing compared, the
        dataset makes the sample: the random part begins with this call, so it has drawn nothing yet."""
        try:
            return augment(part)
        except Unplanned:
            self._disable("the dataset calls another function than in the trial", stale=True)
            return self.dataset[index]

    @property
    def may_fill_ahead(self) -> bool:
        """Whether any process may make deterministic parts, and store them."""
        store, split = self._store, self.split
        if store is None or split is None or split.plan is None or split.in_turn or self._vetted.has_effects:
            return False
        if split.plan.own_caches:
            return False  # each process would fill its own
        return store.usable and not store.complete and not store.reason

    def fill_ahead(self, indices: Sequence[Index]) -> bool:
        """Stores the deterministic parts of samples that are not stored yet. Returns whether more may be stored."""
        store = self.current(indices)
        if store is None or not self.may_fill_ahead:
            return False
        where = store.find(indices)
        self._filler.leaves_begun = True
        if where is not None:
            self._filler.fill(store, indices, where)
        return True

    def is_same(self, store: Store, indices: Sequence[Index], locations: Sequence[int]) -> bool:
        """Occasionally recomputes a stored sample of a batch. Returns False, and discards the cache, if it differs."""
        k = self._filler.to_compare(locations)
        if k is None:
            return True
        read: Callable[[], Sample] = lambda: store.read(locations[k])  # noqa: E731
        if self.split is None or not self.split.has_no_effects:
            is_same = self._filler.compare_part(indices[k], read)
        else:
            is_same = self._filler.compare_whole(indices[k], read, self._augment)
        store.count_compared(self._filler.comparison.take_same())
        return is_same

    def _with_cached_calls(self, store: Store, table: Table, index: Index) -> Sample:
        """Makes a sample, answering some of its calls from memory."""
        assert self.split is not None
        assert self.split.memo is not None
        if self._memo is None:
            filler = self._filler
            self._memo = Memo(
                self.dataset,
                store,
                table,
                filler.random_states,
                self._disable,
                filler.vetting.run,
                self.split.kinds,
            )
        return self.split.memo.root.run(self._memo, call_of(self.dataset.__getitem__, (index,), {}))

    def _without_cache(self, indices: Sequence[Index]) -> list[Sample]:
        get_many = getattr(self.dataset, "__getitems__", None) if self.split is not None else None
        if callable(get_many):
            return list(get_many(indices))
        made = self._filler.by_threads(indices) if self.split is None else {}
        return [self._whole(index, made.get(k)) for k, index in enumerate(indices)]

    def _whole(self, index: Index, made: MadePart | None = None) -> Sample:
        """Makes a sample without the cache. ``made``: its deterministic part, if already made."""
        if self.split is not None:
            return self.dataset[index]
        part = self._prepare(index) if made is None else made[0]
        return part if self._augment is None else self._augment(part)

    def _stoker_batches(self, collate: Callable[[list[Sample]], Batch], select: Select, plain: bool) -> Batches:
        """Returns the batch maker that stoker's loader uses."""
        return Batches(self, collate, select, plain)


def _save_at_exit(ref: weakref.ref[Staged]) -> None:
    staged = ref()
    if staged is not None and staged.usable and not staged._watch.changes():
        staged._save()
