"""Detects cheaply that a dataset has changed since its samples were cached."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import NamedTuple

import torch

from ..core.compare import equal_bits
from ..core.random_state import RandomState
from ..core.types import Index, Sample
from ..core.warn import warn_user
from .inputs import Inputs
from .plan import Unplanned
from .source_files import SourceFiles
from .store.decode import stored_copy
from .value_digests import Entry, readable
from .verify import changed_name

FILE = "file"
# of the time that the cache saves with a batch of a loader without workers: a check that takes less comes before each
SAVED_SHARE = 0.05
QUICK_S = 0.002  # a check this fast always does
CHECK_S = 1.0  # minimum time between two checks
CHECK_SHARE = 500  # checking takes at most one of this many parts of the time
FIRST_COMPARE_S = 1.0  # after this time more than ``COMPARED`` samples are compared
COMPARED = 8  # minimum number of samples compared in each epoch
MAX_DISCARDS = 3  # maximum of consecutive caches that served no epoch: each costs a trial
COMPARE_SHARE = 100  # comparing takes at most one of this many parts of the time


class Changing(NamedTuple):
    """Names of what the script has changed in a dataset."""

    often: Set[str] = frozenset()  # before two consecutive epochs: cached parts must not depend on it
    once: Set[str] = frozenset()  # before this epoch: cached parts should not depend on it, if that costs little


UNCHANGED = Changing()


class Discards:
    """Counts caches that ended because the dataset changed."""

    def __init__(self) -> None:
        self.changing = UNCHANGED  # what ended them
        self._in_a_row = 0

    @property
    def too_many(self) -> bool:
        """Whether the dataset changes before each epoch, so that nothing must be cached any more."""
        return self._in_a_row > MAX_DISCARDS

    def add(self, changes: Sequence[str]) -> None:
        """Records another discarded cache and the changes that ended it."""
        changed = {changed_name(change) for change in changes if not change.startswith(FILE)}
        often, last = self.changing
        self.changing = Changing(often | changed & last, changed)
        self._in_a_row += 1

    def end_row(self) -> None:
        """Records that a cache has served an epoch."""
        self._in_a_row = 0
        self.changing = Changing(self.changing.often)


STALE = "differs from when it was cached"
ON_MISMATCH = "STOKER_ON_MISMATCH"


class ChangeWatch:
    """Whether the inputs of a cache are unchanged, as seen by one process."""

    def __init__(
        self, take: Callable[[], Inputs], opened: dict[str, Entry], sources: Callable[[Inputs], SourceFiles]
    ) -> None:
        self.is_current = True
        self._process = os.getpid()
        self._looked_in, self._looks_at_files = 0, False  # process id; whether the next check includes files
        self._said_by_workers = mmap.mmap(-1, 1)  # whether one of the forked workers has warned
        self._written: list[str] = []  # files found written at the last look
        self._took_s = 0.0  # duration of the last check
        self._take = take
        self._opened = opened  # what loading samples creates in it. See ``Inputs.opened``.
        self._before = take()
        # The script's process watches the files; workers need not. File stamps are read once.
        self._files = sources(self._before) if torch.utils.data.get_worker_info() is None else None
        self.functions = tuple(self._before.functions.values())  # the user's functions that the cached part may run
        self._calls = [(fn, sum(fn.cache_info()[:2])) for fn in self._before.caches]  # of functions with lru_cache
        self._cleared: list[str] = []
        self._before.let_go()
        self._next_check = 0.0
        self.forks_are_same = False  # no code of the user runs in a worker between its fork and its first sample
        self._asked: set[Index] = set()

    def is_repeated(self, indices: Sequence[Index]) -> bool:
        """Whether a sample is requested again; then starts counting afresh."""
        try:
            repeated = not self._asked.isdisjoint(indices)
        except TypeError:  # indices that are not hashable
            return False
        if repeated:
            self._asked.clear()
        self._asked.update(indices)
        return repeated

    def unwatched_file(self, places: Mapping[str, Collection[str]]) -> str:
        """A path among those that a sample opened or asked for that is not watched; "" if all are."""
        return "" if self._files is None else self._files.unwatched(places)

    def changes(self) -> list[str]:
        """Describes what has changed since the cache was started."""
        self._written = [] if self._files is None else self._files.changes()
        return self._compare()

    def _compare(self) -> list[str]:
        """Describes what has changed, files as of the last look at them. Schedules the next check."""
        began = time.thread_time()  # other processes must not make it look slow
        changes = self._before.changes(self._take(), self._opened)
        for k, (fn, before) in enumerate(self._calls):
            calls = sum(fn.cache_info()[:2])
            if calls < before:  # what it returns from now on may be new
                self._cleared.append(f"{fn.__qualname__}.cache_info was filled and is cleared")
            self._calls[k] = fn, calls
        changes += self._cleared
        self._took_s = time.thread_time() - began
        self._next_check = time.monotonic() + max(CHECK_S, CHECK_SHARE * self._took_s)
        return changes + [f"{FILE} {path} was modified" for path in self._written]

    @property
    def why_unknown(self) -> str:
        """Why the digest is incomplete: something that the cached part may read; "" if it is complete."""
        return self._before.why_incomplete(self._opened)

    def check_soon(self) -> None:
        """Call when an epoch begins in this process. Makes the next ``check`` of a worker run without delay, unless it
        was just forked: the parent has checked then. In a persistent worker the check includes files."""
        if os.getpid() == self._process:
            return
        is_new, self._looked_in = self._looked_in != os.getpid(), os.getpid()
        self._looks_at_files = not is_new
        if not (is_new and self.forks_are_same):
            self._next_check = 0.0

    def forked_anew(self) -> None:
        """Call after ``check_soon`` in a worker that equals one forked now."""
        if self.forks_are_same:
            self._looks_at_files, self._next_check = False, time.monotonic() + CHECK_S

    def check_for(self, indices: Sequence[Index], announced: bool, part_s: float) -> None:
        """Call before serving samples. ``announced``: the loader announces each epoch. ``part_s``: seconds that serving
        a sample saves.

        Without workers, the loop may change the dataset after each batch, and the next batch must reflect that. Workers
        do not see such changes."""
        if torch.utils.data.get_worker_info() is None:
            is_repeated = not announced and self.is_repeated(indices)  # an epoch has begun
            self._looks_at_files |= is_repeated
            is_cheap = self._took_s <= max(QUICK_S, SAVED_SHARE * part_s * len(indices))
            self.check(now=is_repeated or is_cheap)
        elif os.getpid() != self._process:
            if not announced and self._looked_in != os.getpid():  # torch's own workers: nobody checked for them
                self._looked_in, self._looks_at_files, self._next_check = os.getpid(), True, 0.0
            self.check(now=False)

    def check(self, now: bool) -> None:
        """Sets ``is_current``, and warns once if it becomes False. ``now``: do not skip this check to save time."""
        if not now and time.monotonic() <= self._next_check:
            return
        if self._looks_at_files and self._files is not None:
            self._written = self._files.changes()
        self._looks_at_files = False
        changes = self._compare()
        is_worker = os.getpid() != self._process
        if changes and self.is_current and not (is_worker and self._said_by_workers[0]):
            self._said_by_workers[0] |= is_worker  # worker_init_fn may change each of them, in each epoch
            message = "The dataset changed after it was cached, so the cache is no longer used"
            warn_user(f"{message}{' in workers' * is_worker}: {shortly(changes)}.")
        self.is_current = not changes


def shortly(changes: list[str]) -> str:
    """The first changes, in readable form."""
    return "; ".join(readable(c).removeprefix("dataset.") for c in changes[:3])


class CheckSchedule:
    """Decides when a process recomputes a served sample: the first ones of each epoch, later by time."""

    def __init__(self) -> None:
        self._process, self._left, self._next, self._count = 0, 0, 0.0, 0
        self._same = 0  # samples found the same since ``take_same``

    def take_same(self) -> int:
        """Returns how many comparisons, since the last call, showed the same bits."""
        n, self._same = self._same, 0
        return n

    def begin_epoch(self) -> None:
        """Call when an epoch begins in this process."""
        info = torch.utils.data.get_worker_info()
        workers = getattr(info, "num_workers", None) or 1
        self._left = -(-COMPARED // workers) if isinstance(workers, int) else COMPARED

    def is_due(self) -> bool:
        """Whether to compare a sample of the current batch."""
        if self._process != os.getpid():
            self._process, self._next = os.getpid(), time.monotonic() + FIRST_COMPARE_S
            self.begin_epoch()
        if self._left > 0:
            self._left -= 1
            return True
        return time.monotonic() >= self._next

    def choose(self, n: int) -> int:
        """Picks one of ``n`` samples."""
        self._count += 1
        return self._count * 7919 % n

    def spent(self, seconds: float, same: bool) -> None:
        """Records a comparison: its duration, and whether it showed the same bits."""
        self._same += same
        self._next = time.monotonic() + COMPARE_SHARE * seconds

    def differs(
        self, random_states: Callable[[], RandomState], make: Callable[[], Sample], read: Callable[[], Sample]
    ) -> bool:
        """Whether ``make`` gives another sample than ``read``, which reads a stored one. Restores the random states."""
        began = time.monotonic()
        states = random_states()
        same = None  # an error now shows nothing: it worked when it was stored
        with contextlib.suppress(Exception, Unplanned):
            same = equal_bits(stored_copy(make()), read())
        states.restore()
        self.spent(time.monotonic() - began, same is True)
        return same is False
