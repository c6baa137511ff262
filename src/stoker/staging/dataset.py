"""``Staged``: a dataset whose deterministic part is done once and kept, and whose random part is done every time."""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..core.errors import StokerWarning, UsageError
from ..core.fingerprint import Fingerprint
from ..core.types import JsonObject
from ..sampling.generators import find_generators
from ..workers.gather import Select
from . import device_tier
from .cache_key import name_of
from .callee import Call
from .compare import equal_bits
from .memoize import Memo, Table, table_for
from .open_store import CachePlan, budgets, new_store
from .plan import Unplanned
from .random_state import RandomStates
from .split import REMEDY, Split, map_style
from .store.decode import stored_copy
from .store.encode import CacheError, foreign, take
from .store.folder import SourceFile, root
from .store.memory import Memory
from .store.store import StoreStats
from .store.tiers import TieredStore
from .verify import changed_name

TIERS = ("auto", "ram", "compressed", "disk", "device", None)
CHECK_S = 1.0  # between two looks, at least, at whether the dataset or prepare were changed
CHECK_SHARE = 500  # and so seldom that they take 0.2 % of the time
COMPARE_SHARE = 200  # of the time, one part is spent on making again what is served, to compare
AT_ONCE = 1 << 20  # bytes that are let in at once: more memory would be new, and new memory costs a fault a page
DISCARDS = 3  # caches begun anew, at most, that served no epoch: each costs a trial
SEEN, DRAWN = 16, 8  # after so many samples made, caching ends if more than one in eight draws before the cut


class Staged(Dataset[Any]):
    """A map-style dataset whose deterministic part is kept in memory that all workers share.

    The first epoch runs at the speed it would have had and fills the cache, from all workers of any kind; later ones
    take what is there. What is in stays in. With ``stoker.DataLoader`` a batch whose samples are all there, of one
    shape and without ``augment``, is one gather.

    Args:
        dataset: map-style; or a list of paths.
        prepare: deterministic, ``prepare(dataset[i])`` or ``prepare(path)``: what it returns is kept. Tensors, arrays,
            PIL images, numbers and strings in tuples, lists and dicts; anything else is kept pickled.
        augment: random, ``augment(prepared)``, run every time. Neither given: ``split`` finds both.
        augment_batch: random, ``augment_batch(batch)``, run once on each batch after it was collated; wants
            ``stoker.DataLoader``.
        cache: "ram": shared memory of this run. "compressed": the same, samples compressed without loss. "disk": mapped
            files, which the next run finds again. "auto": memory, compressed where the set does not fit otherwise and
            that is measured to pay; behind it, where ``cache_dir`` or ``$STOKER_CACHE`` is given, the disk. "device":
            "ram" until all samples are in; from the next epoch on ``stoker.DataLoader`` makes batches on the
            accelerator, if they are of one shape, nothing is augmented sample by sample, and half of its free memory is
            enough. None: no cache.
        cache_budget: bytes, ``"4GB"``, or a share of the memory granted, for the memory, or for the disk with
            ``cache="disk"``; None: half of what is free.
        cache_dir: where caches on disk lie; None: ``$STOKER_CACHE``, else ``stoker/staged`` among the user's caches.
        cache_key: whatever else the samples depend on, in words; another word begins another cache on disk.
        cache_content: source files are known by their content, not by size and time.

    Raises:
        UsageError: a dataset without a length or without a deterministic part, another word for ``cache``, a wrong
            budget.

    Example:
        >>> squares = Staged(list(range(8)), prepare=lambda i: torch.tensor(i * i))
        >>> [int(squares[i]) for i in range(4)], squares.account.filled
        ([0, 1, 4, 9], 4)
    """

    def __init__(
        self,
        dataset: Any,
        prepare: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
        *,
        augment_batch: Callable[[Any], Any] | None = None,
        cache: str | None = "auto",
        cache_budget: int | float | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_key: str = "",
        cache_content: bool = False,
        _split: Split | None = None,
        _memories: Sequence[Memory] = (),
    ) -> None:
        if cache not in TIERS:
            raise UsageError(f"cache={cache!r}: one of {', '.join(map(repr, TIERS))}")
        paths = isinstance(dataset, (list, tuple)) and bool(dataset) and isinstance(dataset[0], (str, os.PathLike))
        if paths and prepare is None:
            raise UsageError("Staged of paths wants prepare=: what to make of a path")
        map_style(dataset)
        self.dataset = dataset
        self.split: Split | None = _split
        self._memories = tuple(_memories)  # of the node, for the first store and its table
        self._said = (prepare, augment)
        self.augment_batch = augment_batch
        self.cache = cache
        self._disk = None if cache_dir is None and "STOKER_CACHE" not in os.environ else Path(cache_dir or root())
        if cache == "disk":
            self._disk = self._disk or root()
        elif cache != "auto":
            self._disk = None
        self._budgets = budgets(cache_budget, cache, self._disk)
        self._table: Table | None = None
        self._owned: tuple[int, list[Any]] = (0, [])
        self._discarded = 0
        self._changed: set[str] = set()  # names of what changed before the last epoch
        self._changing: set[str] = set()  # of what changed before two epochs, one after the other
        self._is_told = False  # by stoker's loader, when an epoch begins
        self.stands_for: Any = None  # the dataset that a script's workers are told they have
        self._keyed = cache_key, cache_content
        self._store: TieredStore | None = None
        self._there: device_tier.DeviceTier | None = None
        if cache == "device" and device_tier.accelerator() is None:
            warnings.warn('cache="device": there is no accelerator, so it is "ram".', StokerWarning, stacklevel=2)
        self._ready()

    def _ready(self) -> None:
        """Looks at the dataset as it is now; nothing is kept yet."""
        prepare, augment = self._said
        if prepare is None and augment is None and (self.split is None or self.split.dataset is not self.dataset):
            self.split = Split(self.dataset, changing=self._changing)
        self.samples = len(self.dataset)
        memo = None if self.split is None else self.split.memo
        if memo is not None and self.cache == "disk":
            raise UsageError(f"only calls can be kept, and these in memory only: {'; '.join(memo.root.all_shown())}")
        self._table = None if memo is None else table_for(self.samples, memo.sites, *self._memories[1:])
        self._bind()
        self._store, self._there = self._open_store(), None

    def _open_store(self) -> TieredStore | None:
        memories, self._memories = self._memories[:1], ()  # a dataset that was changed has its own
        return new_store(
            CachePlan(
                cache=self.cache,
                samples=self.samples,
                slots=self.slots,
                budgets=self._budgets,
                folder=self._disk,
                memories=memories,
                name=name_of(self.dataset),
                key=self._key,
                prepare=lambda i: self._prepare(i),
                dense=self._augment is None,
            )
        )

    def _bind(self) -> None:
        """The two parts, and what a process keeps for itself."""
        prepare, augment = self._said
        split = self.split
        self._memo: Memo | None = None
        if split is not None:
            self._prepare: Callable[[Any], Any] = split.prepare
            self._augment: Callable[[Any], Any] | None = None if split.plan is None or split.exact else split.augment
        else:
            made = prepare or _as_it_is
            self._prepare, self._augment = lambda i: made(self.dataset[i]), augment
        self._look = self._look_now()
        self._next_look, self._fits = 0.0, True  # whoever is forked looks when it begins
        self._next_compare = 0.0
        self._asked: set[Any] = set()
        self._made, self._drawing = 0, set[int]()
        self._draws = split is not None and split.plan is not None and bool(split.plan.moves)

    def _look_now(self) -> Fingerprint:
        """What the first part depends on."""
        split = self.split
        if split is None:
            # Not augment: it is run each time. Nor shared memory: loading may write there, and who reads is unknown.
            return Fingerprint((self.dataset, self._said[0]), shared=False)
        skip = () if split.plan is None else split.plan.scratch
        return Fingerprint((self.dataset, split.globals_now()), names=split.reads, skip=skip)

    @property
    def slots(self) -> int:
        """Places of the store: one a sample, or one a call that is kept."""
        return self.samples if self._table is None else self._table.slots

    @property
    def is_exact(self) -> bool:
        """What is kept of a sample is the sample."""
        return self._augment is None and self._table is None

    def _key(self) -> tuple[JsonObject, list[SourceFile]]:
        """What the samples depend on, and the files they are made from."""
        from .cache_key import key_of

        extra, content = self._keyed
        cut = "" if self.split is None or self.split.plan is None else str(self.split.plan.root)
        return key_of(self._walked[0], self._walked, self.samples, extra, content, cut)

    @property
    def _walked(self) -> list[Any]:
        """What is done for a sample before anything random: the dataset, and ``prepare`` where there is one."""
        return [self.dataset] if self._said[0] is None else [self.dataset, self._said[0]]

    # -- a dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if self.augment_batch is not None and torch.utils.data.get_worker_info() is not None:
            self._no_batch()
        return self.make([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        if self.augment_batch is not None:
            self._no_batch()
        return self.make(indices)

    def _no_batch(self) -> None:
        raise UsageError(
            "augment_batch is run once on each batch, and nobody does that here: it wants stoker.DataLoader (or "
            "stoker.install()) with a batch size, over this dataset or Subsets of it"
        )

    def __getattr__(self, name: str) -> Any:
        # .classes, .targets and whatever else scripts ask of their dataset
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __repr__(self) -> str:
        return f"<Staged {type(self.dataset).__name__}: {self.report}>"

    def _stoker_children(self) -> Iterator[tuple[str, Any]]:
        """What a look at it takes in. See ``objects``."""
        yield from zip((".dataset", ".prepare", ".augment"), (self.dataset, *self._said), strict=True)
        yield ".augment_batch", self.augment_batch

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if get_spawning_popen() is None:
            state["_store"] = state["_table"] = None  # their memory belongs to this run and its workers
        for made in ("_prepare", "_augment", "_look", "_memo"):
            state.pop(made)
        state["_made"], state["_drawing"] = 0, set()
        state["_owned"], state["_there"] = (0, []), None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        store = self._store
        if self.split is not None and self.split.memo is not None and self._table is None:
            self._table = table_for(self.samples, self.split.memo.sites)
        self._bind()
        self._store = store if store is not None else self._open_store()

    # -- what people ask it

    @property
    def account(self) -> StoreStats:
        """What is kept, in numbers."""
        if self._store is None:
            return StoreStats(self.samples, 0, 0, 0, 0, 0.0, 0.0, "no cache")
        return self._store.account._replace(samples=self.samples)

    @property
    def report(self) -> str:
        """What is kept, in words."""
        words = "no cache" if self._store is None else self._store.describe()
        there = self._there
        return words if there is None else f"{words}; {there.describe()}"

    @property
    def usable(self) -> bool:
        """Whether samples may be served from the cache, or let in."""
        return self._store is not None and self._store.usable

    def replace_dataset(self, dataset: Any) -> None:
        """Takes another object with the same content: its random part is run from now on, what is kept stays."""
        self.dataset = self.stands_for = dataset
        if self.split is not None:
            self.split.dataset = dataset
        self._owned, self._memo = (0, []), None

    def for_worker(self, dataset: Any) -> Staged:
        """Another object over the same cache, whose random part is that of a copy of the dataset."""
        other = object.__new__(Staged)
        other.__dict__.update(self.__dict__)
        other.split = copy.copy(self.split)
        other.replace_dataset(dataset)
        other._bind()
        return other

    # -- serving

    def _begin(self) -> None:
        """An epoch begins, in the parent: a dataset or transform that was changed since begins a new cache."""
        self._is_told = True
        if self._discarded > DISCARDS:
            return
        changes = self._changes()
        if not changes and len(self.dataset) == self.samples:
            self._discarded = 0
            self._changed.clear()
            return
        changed = set(map(changed_name, changes))
        self._changing |= changed & self._changed
        self._changed = changed
        words = _plainly(changes) or "its length changed"
        self.split, nothing = None, ""
        self._discarded += 1
        try:
            if self._discarded > DISCARDS:
                raise UsageError("it changes before each epoch")
            self._ready()
        except UsageError as e:  # this is no time to end a script
            nothing = f" From now on nothing is kept: {str(e).removesuffix('. ' + REMEDY)}."
            self.samples, self._table, self.split = len(self.dataset), None, None
            self._bind()
            self._store = self._there = None
        warnings.warn(f"Cache discarded, the dataset changed: {words}.{nothing}", StokerWarning, stacklevel=4)

    def look_again(self) -> None:
        """Before anything else is served: workers that stay see what was changed in memory that they share."""
        self._next_look = 0.0

    def _changes(self) -> list[str]:
        return self._look.changed_since(self._look_now(), added=True)

    def _again(self, indices: Sequence[Any]) -> bool:
        """Whether a sample is asked for again since the last look, by a loader that does not say when its epochs begin:
        torch's own, in this process."""
        if self._is_told or torch.utils.data.get_worker_info() is not None:
            return False
        with contextlib.suppress(TypeError):  # indices that are no numbers
            again = not self._asked.isdisjoint(indices)
            if again:
                self._asked.clear()
            self._asked.update(indices)
            return again
        return False

    def current(self, indices: Sequence[Any] = ()) -> TieredStore | None:
        """The store, if it may be used here and now."""
        store = self._store
        if store is None or not store.usable:
            return None
        if self._again(indices) or time.monotonic() > self._next_look:
            began = time.monotonic()
            changes = self._changes()
            if changes and self._fits:
                words = "The dataset changed since it was cached, so nothing is served from the cache"
                warnings.warn(f"{words}: {_plainly(changes)}.", StokerWarning, stacklevel=6)
            self._fits = not changes
            now = time.monotonic()
            self._next_look = now + max(CHECK_S, CHECK_SHARE * (now - began))
        return store if self._fits else None  # else not what it was filled with; the next epoch begins a new one

    def make(self, indices: Sequence[Any]) -> list[Any]:
        """Samples, the random part included."""
        store = self.current(indices)
        if store is not None and self._table is not None:
            return [self._with_kept_calls(store, i) for i in indices]
        where = self.where(store, indices) if store is not None else None
        fresh = self._fresh(store, indices, where) if store is not None and where is not None else None
        if store is None or where is None or fresh is None:
            return self._wholes(indices)
        at = where.tolist()
        if len(fresh) < len(at):
            self._compare_one(store, indices, at)
        augment = self._augment
        out = []
        for k in range(len(at)):
            if k in fresh:
                whole, prepared = fresh[k]
                if prepared is _Later:
                    prepared = self._whole(indices[k])
                out.append(prepared if whole or augment is None else augment(prepared))
            else:
                prepared = store.read(at[k])
                out.append(prepared if augment is None else augment(prepared))
        return out

    def _with_kept_calls(self, store: TieredStore, index: Any) -> Any:
        """A sample, some calls of which are answered from memory."""
        assert self.split is not None
        assert self.split.memo is not None
        if self._memo is None:
            assert self._table is not None
            self._memo = Memo(
                self.dataset,
                store,
                self._table,
                lambda: RandomStates(self._generators()),
                lambda reason: self._tell(store, reason),
            )
        return self.split.memo.root.run(self._memo, Call(self.dataset.__getitem__, (index,), {}))

    def where(self, store: TieredStore, indices: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """Where the samples of a batch lie in the store; None for indices that are no numbers."""
        try:
            numbers = np.array(indices)
        except ValueError:
            return None
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            return None
        numbers = np.where(numbers < 0, numbers + self.samples, numbers)
        if (numbers < 0).any() or (numbers >= self.samples).any():
            return None  # the dataset knows what it says to that
        return store.where(numbers)

    def _wholes(self, indices: Sequence[Any]) -> list[Any]:
        """Samples without the cache."""
        many = getattr(self.dataset, "__getitems__", None) if self.split is not None else None
        return list(many(indices)) if callable(many) else [self._whole(i) for i in indices]

    def _whole(self, index: Any) -> Any:
        """A sample without the cache."""
        if self.split is not None:
            return self.dataset[index]
        prepared = self._prepare(index)
        return prepared if self._augment is None else self._augment(prepared)

    def _fresh(
        self, store: TieredStore, indices: Sequence[Any], where: np.ndarray[Any, Any]
    ) -> dict[int, tuple[bool, Any]] | None:
        """Makes what is not in the cache, and lets it in. By position: whether it is the whole sample, and the sample
        or its first part. None when the cache was given up: the batch is made without it."""
        misses = np.flatnonzero(where == 0).tolist()
        if not misses:
            return {}
        began = time.thread_time_ns()
        states = RandomStates(self._generators()) if _watched() else None
        keep_ns = time.thread_time_ns() - began
        before = self._made
        made = self._first_parts(indices, misses, states if self._draws else None)
        if states is not None and not self._draws and states.moved():
            self._draws = True  # from now on, in this process, it is asked after each sample which one it was
            states.restore()
            self._made = before
            made = self._first_parts(indices, misses, states)
        if self._gives_up(store):
            return None
        out: dict[int, tuple[bool, Any]] = {}
        kept: dict[int, Any] = {}
        spent = size = 0
        began = time.thread_time_ns()
        for k in misses:
            if k not in made:
                out[k] = True, _Later  # in its turn: it draws
                continue
            prepared, nanoseconds = made[k]
            spent += nanoseconds
            out[k] = self.split is None and self._augment is None, prepared
            size += self._keep(store, kept, int(indices[k]) % self.samples, prepared)
            if size > AT_ONCE:
                store.admit(kept, spent, keep_ns + time.thread_time_ns() - began)
                kept, spent, size, keep_ns, began = {}, 0, 0, 0, time.thread_time_ns()
        if kept or spent:
            store.admit(kept, spent, keep_ns + time.thread_time_ns() - began)
        return out

    def _first_parts(
        self, indices: Sequence[Any], misses: list[int], states: RandomStates | None
    ) -> dict[int, tuple[Any, int]]:
        """The deterministic parts of samples, each with the nanoseconds it took, by position. Those that have none, or
        fail, are left out. With ``states``, it is looked after each at what it drew."""
        misses = [k for k in misses if int(indices[k]) % self.samples not in self._drawing]
        many = self._many if states is None and len(misses) > 1 else None
        if many is not None:
            began = time.perf_counter_ns()
            with contextlib.suppress(Exception):  # the one that fails is found below
                samples = list(many([indices[k] for k in misses]))
                took = (time.perf_counter_ns() - began) // len(misses)
                if len(samples) == len(misses):
                    self._made += len(misses)
                    return {k: (sample, took) for k, sample in zip(misses, samples, strict=True)}
        out = {}
        for k in misses:
            began = time.perf_counter_ns()
            made = self._first_part(indices[k], int(indices[k]) % self.samples, states)
            if made is not None:
                out[k] = made[0], time.perf_counter_ns() - began
        return out

    @property
    def _many(self) -> Callable[[Any], Any] | None:
        """What makes several samples at once, where samples are kept as they are."""
        many = getattr(self.dataset, "__getitems__", None) if self.split is not None and self._augment is None else None
        return many if callable(many) else None

    def fill(self, store: TieredStore, indices: Sequence[int], where: np.ndarray[Any, Any]) -> None:
        """Lets samples in. One that fails raises what the dataset raises."""
        fresh = self._fresh(store, indices, where) or {}
        for k, (_, prepared) in fresh.items():
            if prepared is _Later and indices[k] % self.samples not in self._drawing:
                self.dataset[indices[k]]

    def _first_part(self, index: Any, i: int, before: RandomStates | None) -> tuple[Any] | None:
        """The deterministic part of a sample; None where this sample has none. Random states are left as they were."""
        self._made += 1
        failed = False
        try:
            prepared = self._prepare(index)
        except Unplanned:
            prepared = _Later
        except Exception:  # the dataset's own code is to say so, from the random states in which it would have
            failed = True
        moved = set(before.moved()) if before is not None else set()
        if moved:
            assert before is not None
            before.restore()
        if failed:
            return None
        plan = None if self.split is None else self.split.plan
        if prepared is _Later or moved - set(() if plan is None else plan.moves):
            self._drawing.add(i)
            return None
        return (prepared,)

    def _keep(self, store: TieredStore, kept: dict[int, Any], i: int, prepared: Any) -> int:
        """Takes a first part to pieces, for the store. Returns their bytes."""
        try:
            words, leaves = take(prepared, dense=self._augment is None)
            what = foreign(words) if self.cache == "disk" else None
            if what is not None:
                raise CacheError(
                    f"a sample has a {what}, which a file does not keep: tensors, arrays, pictures, numbers, text"
                )
            kept[i] = words, leaves
        except CacheError as e:
            self._tell(store, str(e))
            return 0
        return sum(x.nbytes for x in leaves)

    def _gives_up(self, store: TieredStore) -> bool:
        """Whether so many samples draw in their first part that caching only costs. Says so, once."""
        if self._made < SEEN or len(self._drawing) * DRAWN < self._made:
            return False
        share = f"{len(self._drawing)} of {self._made} samples"
        self._tell(store, f"{share} draw random numbers, or take another way, before the cut")
        return True

    def _compare_one(self, store: TieredStore, indices: Sequence[Any], at: list[int]) -> None:
        """Now and then: makes a sample again that is about to be served, and compares. What differs ends the cache."""
        began = time.monotonic()
        if began < self._next_compare or not _watched():
            return
        if not self._next_compare:  # not in a worker's first second
            self._next_compare = began + CHECK_S
            return
        k = next(k for k in range(len(at)) if at[k])
        states = RandomStates(self._generators())
        try:
            same = equal_bits(stored_copy(self._prepare(indices[k])), stored_copy(store.read(at[k])))
        except (Exception, Unplanned):
            same = True  # what fails now was right when it was kept
        states.restore()
        now = time.monotonic()
        self._next_compare = now + COMPARE_SHARE * (now - began)
        if not same:
            self._tell(store, f"sample {int(indices[k])} is another than when it was cached: files or code changed")

    def _tell(self, store: TieredStore, reason: str) -> None:
        if store.shut(reason):
            warnings.warn(f"Cache discarded: {reason}.", StokerWarning, stacklevel=6)

    def _generators(self) -> list[tuple[str, Any]]:
        if self._owned[0] != os.getpid():
            self._owned = os.getpid(), find_generators(self.dataset, *self._said)
        return self._owned[1]

    def _on_device(self, plain: bool) -> Select | None:
        """What makes batches on the accelerator, once everything is in; asked when an epoch begins, in the parent."""
        store, device = self._store, device_tier.accelerator() if self.cache == "device" else None
        if device is None or store is None or not store.usable or store.account.filled < self.samples:
            return None
        if self._there is None or self._there.device != device:
            why = "" if plain else "collate_fn is not torch's default_collate"
            if not self.is_exact:
                why = "augment= is called sample by sample; augment_batch= is not"
            self._there = device_tier.DeviceTier(store, device, why)
            if self._there.why:
                warnings.warn(f'cache="device" stays in RAM: {self._there.why}.', StokerWarning, stacklevel=5)
        return None if self._there.why else self._there.select

    def is_on_device(self, select: Select) -> bool:
        """Whether this is what makes batches on the accelerator."""
        return self._there is not None and select == self._there.select

    def _stoker_batches(self, collate: Callable[[Any], Any], select: Any, plain: bool) -> Callable[[Any], Any]:
        """What makes batches of indices for stoker's loader. See ``serve.Batches``."""
        from .batches import Batches

        return Batches(self, collate, select, plain)


def _plainly(changes: list[str]) -> str:
    return "; ".join(c.removeprefix("dataset[0]").removeprefix(".") for c in changes[:3])


class _Later:
    """Stands for a sample that is made as a whole, when its turn comes."""


def _as_it_is(sample: Any) -> Any:
    return sample


def _watched() -> bool:
    """Whether this thread is the only one that may draw from the process' generators meanwhile."""
    info = torch.utils.data.get_worker_info()
    return getattr(info, "worker_method", "process") != "thread"
