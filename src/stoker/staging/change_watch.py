"""Notices that a dataset has changed since its samples were cached, at little cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ..core.compare import equal_bits
from ..core.fingerprint import Fingerprint, Parts
from ..core.random_state import RandomState
from ..core.types import Index, Sample
from ..core.warn import warn_user
from .plan import Unplanned
from .store.decode import stored_copy
from .verify import changed_name

FILE = "file"
CHECK_S = 1.0  # between two checks, at least
CHECK_SHARE = 500  # of this many parts of the time, one is spent on checking
FIRST_COMPARE_S = 1.0  # nothing is made again in a worker's first second
MAX_DISCARDS = 3  # caches in a row that served no epoch: each costs a trial
COMPARE_SHARE = 200  # of this many parts of the time, one is spent on making again what is served


class Discards:
    """Caches that a changed dataset has ended.

    Attributes:
        too_many: the dataset changes before each epoch, so that nothing is to be cached any more.
        changing: names of what changed before two epochs, one after the other. What is kept must not depend on them.
    """

    def __init__(self) -> None:
        self.changing: set[str] = set()
        self._last: set[str] = set()
        self._in_a_row = 0

    @property
    def too_many(self) -> bool:
        return self._in_a_row > MAX_DISCARDS

    def add(self, changes: Sequence[str]) -> None:
        """One more, for these changes."""
        changed = {changed_name(change) for change in changes if not change.startswith(FILE)}
        self.changing |= changed & self._last
        self._last = changed
        self._in_a_row += 1

    def end_row(self) -> None:
        """A cache has served an epoch."""
        self._in_a_row = 0
        self._last.clear()


class ChangeWatch:
    """Whether what a cache was made from is still the same, in one process."""

    def __init__(self, take: Callable[[], Fingerprint], opened: Parts, files: Sequence[str]) -> None:
        self.is_current = True
        self._take = take
        self._opened = opened  # what loading samples makes in it. See ``Fingerprint.opened``.
        self._before = take()
        # Some of those that samples are read from; a script may write them anew, with other labels.
        self._files = {path: _state_of(path) for path in files}
        self._next_check = 0.0  # a worker checks when it begins
        self._asked: set[Index] = set()

    def is_repeated(self, indices: Sequence[Index]) -> bool:
        """Whether a sample is asked for again since that was last so."""
        try:
            repeated = not self._asked.isdisjoint(indices)
        except TypeError:  # indices that are no numbers
            return False
        if repeated:
            self._asked.clear()
        self._asked.update(indices)
        return repeated

    def changes(self) -> list[str]:
        """What has changed since the cache was begun, for people."""
        changes = self._before.added_or_changed_since(self._take(), self._opened)
        return changes + [f"{FILE} {path} was written" for path, was in self._files.items() if _state_of(path) != was]

    def check_soon(self) -> None:
        """The next ``check`` is not left out."""
        self._next_check = 0.0

    def check(self, now: bool) -> None:
        """Sets ``is_current``, and warns once if it is not. ``now``: this check may not be left out to save time."""
        began = time.monotonic()
        if not now and began <= self._next_check:
            return
        changes = self.changes()
        if changes and self.is_current:
            message = "The dataset changed since it was cached, so nothing is served from the cache"
            warn_user(f"{message}: {shortly(changes)}.")
        self.is_current = not changes
        ended = time.monotonic()
        self._next_check = ended + max(CHECK_S, CHECK_SHARE * (ended - began))


def _state_of(path: str) -> tuple[int, int] | None:
    """When it was written, in nanoseconds, and how many bytes it has; None: it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def shortly(changes: list[str]) -> str:
    """The first changes, for people."""
    return "; ".join(c.removeprefix("dataset[0]").removeprefix(".") for c in changes[:3])


class Comparison:
    """Now and then makes again what is served, in one process."""

    def __init__(self) -> None:
        self._process, self._next = 0, 0.0

    def differs(
        self, random_states: Callable[[], RandomState], make: Callable[[], Sample], read: Callable[[], Sample]
    ) -> bool:
        """Whether ``make`` makes something else than ``read`` reads; False where it is not time to look."""
        began = time.monotonic()
        if self._process != os.getpid():
            self._process, self._next = os.getpid(), began + FIRST_COMPARE_S
        if began < self._next:
            return False
        states = random_states()
        try:
            same = equal_bits(stored_copy(make()), stored_copy(read()))
        except (Exception, Unplanned):
            same = True  # what fails now was right when it was stored
        states.restore()
        now = time.monotonic()
        self._next = now + COMPARE_SHARE * (now - began)
        return not same
