"""Makes and stores the deterministic parts of samples that are not in the cache yet.

Each sample is observed while it is made. One that draws random numbers in its deterministic part has none to cache: the
dataset makes it as a whole in every epoch, from the random states that it would have found without a cache.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.compare import equal_bits
from ..core.random_state import Generator, RandomState, owns_global_generators
from ..core.types import Attributes, Index, MapDataset, Sample
from ..sampling.generators import find_generators
from ..workers.read_threads import ReadThreads
from . import branches
from .aliases import refuse_aliases
from .change_watch import STALE, CheckSchedule
from .library_objects import Held
from .plan import Unplanned
from .split import Split
from .store.decode import layout, stored_copy
from .store.encode import CacheError, take_known
from .store.store import Store
from .store.tables import Samples
from .verify import own_attributes
from .vetting import Vetting

STORED_AT_ONCE = 1 << 20  # bytes: copies of more would be fresh memory, with a page fault per page
# caching ends if more than one in eight samples, plus four by chance, have no deterministic part
ONE_IN, BY_CHANCE = 8, 4
MOST_RESTORED = 100_000  # items of a container that a library's object holds
MADE_AGAIN = 16  # samples that are made again by a process with another number of native threads
RUNS_OF_RARE = 8  # more runs of a sample that differs from what was served


class Failed(NamedTuple):
    """Stands for a sample that could not be made."""

    error: Exception


MadePart = tuple[Sample, int]  # the deterministic part of a sample, and the nanoseconds to make it


def _made_together(get_many: Callable[[Sequence[Index]], Sequence[Sample]], wanted: Sequence[Index]) -> list[Sample]:
    return list(get_many(wanted))


def _same_part(a: MadePart | None, b: MadePart | None) -> bool:
    return a is not None and b is not None and equal_bits(a[0], b[0])


class OtherCaches(Protocol):
    """Caches of the same dataset on other machines (``stoker_ray.cluster_cache``), or of earlier runs (``keep``)."""

    def look_again(self) -> None:
        """Call when an epoch begins: they may have samples that they lacked before."""

    def fetch(self, missing: Sequence[int], part_s: float) -> Samples:
        """Fetches the samples that they have, as a store accepts them. ``part_s``: time to make one; 0.0 if unknown."""


class Filler:
    """Fills a cache, in one process."""

    def __init__(
        self,
        dataset: MapDataset,
        split: Split | None,
        functions: Sequence[object],
        prepare: Callable[[Index], Sample],
        is_whole: bool,
        vetted: branches.Vetted,
        disable: Callable[..., None],
        unwatched_file: Callable[[Mapping[str, Collection[str]]], str],
    ) -> None:
        self._dataset = dataset
        self._split = split  # how the dataset is divided; None: by ``prepare`` and ``augment``
        self._functions = functions  # the user's; their generators are observed too
        self._prepare = prepare  # makes the deterministic part of a sample
        self._is_whole = is_whole  # the deterministic part is the whole sample
        self._disable = disable  # called with the reason when the cache becomes unusable
        self._vetted = vetted
        self._held: list[Attributes] | None = None
        self.vetting = Vetting(dataset, split, vetted, self.random_states, disable, unwatched_file)
        self._samples = len(dataset)
        self._asked = 0  # samples requested, including those in the cache
        self.leaves_begun = False  # does not make what another process has begun to make
        self._begin: Callable[[int], object] = lambda i: None  # see ``Store.begin``
        self.part_s = 0.0  # time per sample of the last batch; 0.0 until one was made
        self._without_part: set[int] = set()  # samples that draw random numbers, or take another path through the code
        self._unstored: set[int] = set()  # samples of this batch that are used, and not stored
        self.were_in_order = False  # the samples of this batch were made in their order, as a whole
        self._vetted_alone: set[frozenset[int]] = set()  # branches of batches that were then vetted sample by sample
        self._watch_each = split is not None and split.plan is not None and bool(split.plan.moves)
        self.comparison = CheckSchedule()
        self._generators: list[tuple[str, Generator]] | None = None
        self._generators_pid = 0
        self.read_threads: int | str = "auto"  # see ``DataLoader``
        self.reads: ReadThreads | None = None
        self.elsewhere: OtherCaches | None = None

    def replace_dataset(self, dataset: MapDataset) -> None:
        """Switches to another object with the same content."""
        self._dataset = self.vetting.dataset = dataset
        self._generators = self.reads = self._held = None

    def random_states(self) -> RandomState:
        """The states of all generators that samples may draw from."""
        if self._generators is None or self._generators_pid != os.getpid():
            self._generators = find_generators(self._dataset, *self._functions)
            self._generators_pid = os.getpid()
        return RandomState(self._generators)

    def fill(self, store: Store, indices: Sequence[Index], where: NDArray[np.int64]) -> dict[int, Sample] | None:
        """Makes and stores the samples of a batch that are not stored yet. Returns deterministic parts by position,
        without samples that have none. None: the script's dataset must make this batch. ``where``: locations of the
        stored ones; receives those that another process has stored meanwhile."""
        self._asked += len(indices)
        self._begin = store.begin
        self._unstored.clear()
        self.were_in_order = False
        misses = np.flatnonzero(where == 0).tolist()
        fetched = self._fetch(store, indices, misses)
        misses = [k for k in misses if k not in fetched]
        if not misses:
            return fetched
        began = time.thread_time_ns()
        states = self.random_states() if owns_global_generators() else None
        keep_ns = time.thread_time_ns() - began
        watch_each = self._watch_each or self._in_turn
        before = [] if self._in_turn else self._kept_by_libraries()
        parts = self._parts(store, indices, where, misses, states if watch_each else None)
        # What one part changed, the random parts of earlier samples may read. Whole samples were made in their order.
        if before and self._vetted.has_effects and not self._is_whole:
            for held, values in before:
                held.clear()
                (held.update if isinstance(held, (dict, set)) else held.extend)(values)
            return None
        if states is not None and not watch_each and states.moved():
            self._watch_each = True  # from now on, this process checks after each sample whether it drew random numbers
            if self._is_whole and self.were_in_order:
                return fetched | {k: value for k, (value, _) in parts.items()}  # one of them drew, as it should
            states.restore()
            parts = self._parts(store, indices, where, misses, states)
        if not self._too_many_draw():
            self._store(store, indices, parts, keep_ns)
        elif not self.were_in_order:
            return None
        return fetched | {k: value for k, (value, _) in parts.items()}

    def _fetch(self, store: Store, indices: Sequence[Index], misses: list[int]) -> dict[int, Sample]:
        """Deterministic parts by position, as far as they are elsewhere. They are stored here."""
        if self.elsewhere is None:
            return {}
        wanted = {k: int(indices[k]) % self._samples for k in misses}
        asked = sorted(set(wanted.values()) - self._without_part)
        samples = self.elsewhere.fetch(asked, self.part_s)
        try:
            found = {k: layout(samples[i][0], False).put(samples[i][1]) for k, i in wanted.items() if i in samples}
            if samples:
                store.admit(samples, fetched=True)
            return found
        except CacheError:  # from a class that this process has not defined
            return {}

    def _store(self, store: Store, indices: Sequence[Index], parts: dict[int, MadePart], keep_ns: int) -> None:
        try:
            self._admit(store, indices, parts, keep_ns)
        except CacheError as e:  # on a cluster node, whose main module is not the script
            self._disable(str(e))
        if parts:
            self.part_s = sum(nanoseconds for _, nanoseconds in parts.values()) / len(parts) / 1e9

    def _admit(self, store: Store, indices: Sequence[Index], parts: dict[int, MadePart], keep_ns: int) -> None:
        taken: Samples = {}
        size = 0
        began = time.thread_time_ns() - keep_ns
        for k, (part, _) in parts.items():
            if int(indices[k]) % self._samples in self._without_part | self._unstored or type(part) is Failed:
                continue
            size += self._take(taken, store, int(indices[k]) % self._samples, part)
            if size > STORED_AT_ONCE:
                store.admit(taken, time.thread_time_ns() - began)
                taken, size, began = {}, 0, time.thread_time_ns()
        if taken or parts:
            store.admit(taken, time.thread_time_ns() - began)

    def _take(self, taken: Samples, store: Store, i: int, part: Sample) -> int:
        """Takes a part apart for the store. Returns its bytes."""
        kinds = None if self._split is None else self._split.kinds
        try:
            if self._split is not None:
                refuse_aliases(part, self._dataset)
        except Exception:  # CacheError, or whatever the user's objects raise
            return 0
        try:
            found = take_known(part, kinds, self._is_whole, store.medium.pickles)
        except CacheError as e:
            self._disable(str(e))
            return 0
        if found is None:
            return 0
        taken[i] = found
        return sum(x.nbytes for x in found[1])

    def _parts(
        self,
        store: Store,
        indices: Sequence[Index],
        where: NDArray[np.int64],
        misses: list[int],
        states: RandomState | None,
    ) -> dict[int, MadePart]:
        """Makes deterministic parts by position. Omits samples that have none or fail, and those that another process
        has stored meanwhile. ``states``: compared after each sample; None: not compared."""
        self.were_in_order = False
        asked = len(misses)
        misses = [k for k in misses if int(indices[k]) % self._samples not in self._without_part]
        get_many = self._get_many() if states is None and len(misses) > 1 else None
        if get_many is not None:
            began = time.perf_counter_ns()
            with contextlib.suppress(Exception):  # the failing sample is found below
                branches.begin()
                wanted = [indices[k] for k in misses]
                make = functools.partial(_made_together, get_many, wanted)
                samples = make()
                took = (time.perf_counter_ns() - began) // len(misses)
                if len(samples) == len(misses) and self._may_keep_together(samples, make, took * len(misses) / 1e9):
                    return {k: (sample, took) for k, sample in zip(misses, samples, strict=True)}
        branches.begin()
        # Not for the first batch, which has new branches; these are vetted sample by sample.
        by_threads = states is None and self.part_s > 0
        made = self.by_threads([indices[k] for k in misses]) if by_threads else {}
        # Samples without a part are made after these.
        self.were_in_order = not made and get_many is None and len(misses) == asked
        if self.vetting.new():  # threads record branches in one place: which sample took a new one is unknown
            if self._is_whole:  # used, not stored: a second run would draw from a library's own generator again
                self._unstored |= {int(indices[misses[at]]) % self._samples for at in made}
            else:
                made = {}
        parts = {k: made[at] for at, k in enumerate(misses) if at in made}
        parts |= self._one_by_one(store, indices, where, [k for k in misses if k not in parts], states)
        return {k: part for k, part in parts.items() if part is not None}

    def _one_by_one(
        self,
        store: Store,
        indices: Sequence[Index],
        where: NDArray[np.int64],
        misses: list[int],
        states: RandomState | None,
    ) -> dict[int, MadePart | None]:
        """Makes what ``_parts`` returns, one after the other; last, what another process has begun to make."""
        parts: dict[int, MadePart | None] = {}
        postponed: list[int] = []
        # A whole sample may draw, and may fail, in its turn.
        begun = (store.is_begun(int(indices[k]) % self._samples) for k in misses)
        self.were_in_order &= self._is_whole and not any(begun)
        for group in (misses, [] if self.leaves_begun else postponed):
            for k in group:
                i = int(indices[k]) % self._samples
                where[k] = store.location(i)
                if where[k]:
                    continue
                if group is misses and not (self._in_turn or self.were_in_order) and store.is_begun(i):
                    postponed.append(k)
                    continue
                parts[k] = part = self._part(indices[k], states)
                if part is not None and type(part[0]) is Failed and not self.leaves_begun:
                    return parts  # the script gets the error, and no later sample of this batch
                if states is not None and self.were_in_order and states.moved():
                    states = self.random_states()
        return parts

    def _may_keep_together(self, samples: Sequence[Sample], make: Callable[[], object], took_s: float) -> bool:
        """Whether samples made by one call may be cached. New branches are vetted with single samples first: 64 texts
        took a second and a half together, where some of them have all the branches."""
        new = frozenset(self.vetting.new())
        if not new or new in self._vetted_alone:
            return self.vetting.may_keep(samples, make, took_s)
        self._vetted_alone.add(new)
        return False

    def by_threads(self, indices: Sequence[Index]) -> dict[int, MadePart | None]:
        """Makes deterministic parts with threads, by position: in worker processes, if making them mostly waits."""
        if torch.utils.data.get_worker_info() is None or not owns_global_generators():
            return {}
        if self.reads is None:
            asked = None if self.read_threads == "auto" else int(self.read_threads)
            objects = [self._dataset, *filter(None, self._functions)]
            self.reads = ReadThreads(lambda index: self._part(index, None, vets=False), objects, asked, _same_part)
        return {} if self.read_threads == 1 else self.reads(indices)

    def _get_many(self) -> Callable[[Sequence[Index]], Sequence[Sample]] | None:
        """The dataset's ``__getitems__``, if whole samples are cached."""
        found = getattr(self._dataset, "__getitems__", None) if self._split is not None and self._is_whole else None
        return found if callable(found) else None

    def _part(self, index: Index, before: RandomState | None, vets: bool = True) -> MadePart | None:
        """Makes the deterministic part of a sample; None if it has none. Restores the random states. ``vets``: vets new
        branches, which only one thread can; otherwise they stay marked."""
        began = time.perf_counter_ns()
        i = int(index) % self._samples
        self._begin(i)
        value, may_be_kept, unplanned = None, True, False
        is_in_order = vets and self.were_in_order
        try:
            value, may_be_kept = self._vetted_part(index, vets)
        except Unplanned:
            unplanned, is_in_order = True, False
        except Exception as e:
            return self._failed(e, before, is_in_order)
        took = time.perf_counter_ns() - began
        moved = set() if before is None else set(before.moved())
        # When made in turn it is used but not stored: what it changed must not change twice.
        in_turn = self._in_turn and not (unplanned or self._may_move)
        if before is not None and moved and not (in_turn or is_in_order):
            before.restore(moved)
        if not unplanned and may_be_kept and not moved - self._may_move:
            return value, took
        # A whole sample is used, too: whatever it did, a second run would do again.
        is_used = in_turn or is_in_order or (self._is_whole and not unplanned and not moved)
        self._leave_out(i, in_turn, is_used)
        return (value, took) if is_used else None

    @staticmethod
    def _failed(error: Exception, before: RandomState | None, is_in_order: bool) -> MadePart | None:
        """What stands for a sample that raised an error. None: the dataset's own code must raise it, from the same
        random states."""
        if is_in_order:
            return Failed(error), 0
        if before is not None:
            before.restore()
        return None

    def _leave_out(self, i: int, in_turn: bool, is_used: bool) -> None:
        if in_turn or not self.vetting.is_postponed:
            self._without_part.add(i)
        if is_used:
            self._unstored.add(i)

    def _vetted_part(self, index: Index, vets: bool) -> tuple[Sample, bool]:
        """Makes the deterministic part of a sample, and says whether it may be kept."""
        if vets and owns_global_generators() and self._split is not None:
            return self.vetting.run(lambda: self._prepare(index))
        return self._prepare(index), True

    @property
    def _may_move(self) -> set[str]:
        """Generators that the first part draws from and whose state is restored afterwards."""
        plan = None if self._split is None else self._split.plan
        return set() if plan is None else set(plan.moves)

    @property
    def _in_turn(self) -> bool:
        """Whether samples must be made one after the other, because one may read what another has changed."""
        return self._split is not None and (self._split.in_turn or self._vetted.has_effects)

    def _kept_by_libraries(self) -> list[tuple[Held, Held]]:
        """Attributes of objects that the code of libraries may set, and the containers among them, each with a copy."""
        if self._held is None:
            objects = [] if self._split is None else self._split.inputs(of_all=True).of_libraries
            self._held = [attributes for attributes in map(own_attributes, objects) if attributes]
        inside = (x for attributes in self._held for x in attributes.values() if type(x) in (list, dict, set, deque))
        return [(held, held.copy()) for held in (*self._held, *(x for x in inside if len(x) <= MOST_RESTORED))]

    def _too_many_draw(self) -> bool:
        """Disables the cache if too many samples have no deterministic part for it to pay off. Returns whether."""
        if len(self._without_part) <= self._asked / ONE_IN + BY_CHANCE:
            return False
        share = f"{len(self._without_part)} of {self._asked} samples"
        self._disable(f"{share} draw random numbers or run different code before the cut")
        return True

    def to_compare(self, locations: Sequence[int]) -> int | None:
        """Position of a stored sample of a batch that must be recomputed; None for none."""
        if not owns_global_generators() or not self.comparison.is_due():
            return None
        stored = [k for k, location in enumerate(locations) if location]
        return stored[self.comparison.choose(len(stored))] if stored else None

    def are_same(self, store: Store) -> bool:
        """Makes the deterministic part of some stored samples again. Returns whether all are the same."""
        stored = np.flatnonzero(store.locations)
        chosen = stored[:: max(1, len(stored) // MADE_AGAIN)].tolist()
        makes = [
            (functools.partial(self._prepare, i), functools.partial(store.read, store.location(i))) for i in chosen
        ]
        differs = self.comparison.differs
        return not self._in_turn and not any(differs(self.random_states, make, read) for make, read in makes)

    def compare_part(self, index: Index, read: Callable[[], Sample]) -> bool:
        """Recomputes the deterministic part of a stored sample. Disables the cache and returns False if it differs."""
        is_same = not self.comparison.differs(self.random_states, lambda: self._prepare(index), read)
        if not is_same:
            self._differs(index)
        return is_same

    def compare_whole(
        self, index: Index, read: Callable[[], Sample], augment: Callable[[Sample], Sample] | None
    ) -> bool:
        """Compares what a stored sample becomes with what the script's dataset makes, which must have no side effects.
        ``read`` reads the stored part, ``augment`` is the random part. A difference disables the cache. Restores the
        random states."""
        serve = read if augment is None else (lambda: augment(read()))
        began = time.monotonic()
        before = self.random_states()
        is_same = True
        is_shown = False
        with contextlib.suppress(Exception, Unplanned):  # an error shows nothing: it worked when it was stored
            served = stored_copy(serve())
            after = self.random_states().in_order()
            before.restore()
            own = stored_copy(self._dataset[index])
            is_same = is_shown = equal_bits(served, own) and self.random_states().in_order() == after
            if not is_same:
                may_vary = augment is not None and self._is_made_again(index, read)
                is_same = may_vary and self._varies(index, serve, before, served, own)
        before.restore()
        self.comparison.spent(time.monotonic() - began, is_shown)
        if not is_same:
            self._differs(index)
        return is_same

    def _is_made_again(self, index: Index, read: Callable[[], Sample]) -> bool:
        """Whether the cached part is the same again each time, so that only the random part can differ."""
        return all(equal_bits(stored_copy(self._prepare(index)), read()) for _ in range(RUNS_OF_RARE))

    def _varies(
        self, index: Index, serve: Callable[[], Sample], before: RandomState, served: Sample, own: Sample
    ) -> bool:
        """Whether the random part draws from system entropy, perhaps for few samples only: one of several more runs
        gives what the other way gave, or what the script's dataset makes differs from run to run."""
        all_served, all_own = [served], [own]
        for _ in range(RUNS_OF_RARE):
            before.restore()
            all_served.append(stored_copy(serve()))
            before.restore()
            all_own.append(stored_copy(self._dataset[index]))
        if any(not equal_bits(made, own) for made in all_own):
            return True
        return any(equal_bits(a, b) for a in all_served for b in all_own)

    def _differs(self, index: Index) -> None:
        self._disable(f"sample {index} {STALE}: a change to its code or data was not detected", stale=True)
