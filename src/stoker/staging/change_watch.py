"""Notices that a dataset has changed since its samples were cached, at little cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

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
QUICK_S = 0.002  # a check that takes no longer is made for each batch of a loader without workers
CHECK_S = 1.0  # between two checks, at least
CHECK_SHARE = 500  # of this many parts of the time, one is spent on checking
FIRST_COMPARE_S = 1.0  # after which more than ``COMPARED`` samples are made again
COMPARED = 8  # samples of each epoch that are made again, at least
MAX_DISCARDS = 3  # caches in a row that served no epoch: each costs a trial
COMPARE_SHARE = 100  # of this many parts of the time, one is spent on making again what is served


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


STALE = "is another than when it was cached"
ON_MISMATCH = "STOKER_ON_MISMATCH"


class ChangeWatch:
    """Whether what a cache was made from is still the same, in one process."""

    def __init__(
        self, take: Callable[[], Inputs], opened: dict[str, Entry], sources: Callable[[Inputs], SourceFiles]
    ) -> None:
        self.is_current = True
        self._process = os.getpid()
        self._looked_in, self._looks_at_files = 0, False  # process; whether the next check looks at files
        self._written: list[str] = []  # files, when they were last looked at
        self._took_s = 0.0  # the last check
        self._take = take
        self._opened = opened  # what loading samples makes in it. See ``Inputs.opened``.
        self._before = take()
        # The script's process looks at files, and workers need not: their stamps are read once for all.
        self._files = sources(self._before) if torch.utils.data.get_worker_info() is None else None
        self.functions = tuple(self._before.functions.values())  # the user's, that the cached part may run
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
        self._written = [] if self._files is None else self._files.changes()
        return self._before.changes(self._take(), self._opened) + self._of_files()

    def _of_files(self) -> list[str]:
        return [f"{FILE} {path} was written" for path in self._written]

    @property
    def why_unknown(self) -> str:
        """What the cached part may read and has no complete digest; "" where there is none."""
        return self._before.why_incomplete(self._opened)

    def check_soon(self) -> None:
        """The next ``check`` is not left out. In a worker that stays it looks at files, too: its parent did for the
        first epoch."""
        self._next_check = 0.0
        self._looks_at_files = self._looked_in == os.getpid() != self._process
        self._looked_in = os.getpid()

    def check_for(self, indices: Sequence[Index], announced: bool) -> None:
        """Samples are about to be served. ``announced``: the loader says when an epoch begins.

        Without workers, the loop may change the dataset after each batch, and sees the change in the next one. Workers
        do not see it: where the script's process plays their part, the dataset was looked at when the epoch began."""
        if torch.utils.data.get_worker_info() is None:
            is_repeated = not announced and self.is_repeated(indices)  # an epoch has begun
            self._looks_at_files |= is_repeated
            self.check(now=is_repeated or self._took_s <= QUICK_S)
        elif os.getpid() != self._process:
            if not announced and self._looked_in != os.getpid():  # torch's own workers: nobody looked for them
                self._looked_in, self._looks_at_files = os.getpid(), True
            self.check(now=False)

    def check(self, now: bool) -> None:
        """Sets ``is_current``, and warns once if it is not. ``now``: this check may not be left out to save time."""
        began = time.monotonic()
        if not now and began <= self._next_check:
            return
        if self._looks_at_files and self._files is not None:
            self._written = self._files.changes()
        self._looks_at_files = False
        changes = self._before.changes(self._take(), self._opened) + self._of_files()
        if changes and self.is_current:
            message = "The dataset changed since it was cached, so nothing is served from the cache"
            warn_user(f"{message}: {shortly(changes)}.")
        self.is_current = not changes
        ended = time.monotonic()
        self._took_s = ended - began
        self._next_check = ended + max(CHECK_S, CHECK_SHARE * self._took_s)


def shortly(changes: list[str]) -> str:
    """The first changes, for people."""
    return "; ".join(readable(c).removeprefix("dataset.") for c in changes[:3])


class CheckSchedule:
    """When a sample that was served is made again, in one process: the first ones of each epoch, then by time."""

    def __init__(self) -> None:
        self._process, self._left, self._next, self._count = 0, 0, 0.0, 0

    def begin_epoch(self) -> None:
        """An epoch begins in this process."""
        info = torch.utils.data.get_worker_info()
        workers = getattr(info, "num_workers", None) or 1
        self._left = -(-COMPARED // workers) if isinstance(workers, int) else COMPARED

    def is_due(self) -> bool:
        """Whether a sample of the batch that is made now is to be compared."""
        if self._process != os.getpid():
            self._process, self._next = os.getpid(), time.monotonic() + FIRST_COMPARE_S
            self.begin_epoch()
        if self._left > 0:
            self._left -= 1
            return True
        return time.monotonic() >= self._next

    def choose(self, n: int) -> int:
        """Which of ``n`` samples."""
        self._count += 1
        return self._count * 7919 % n

    def spent(self, seconds: float) -> None:
        """It took so long."""
        self._next = time.monotonic() + COMPARE_SHARE * seconds

    def differs(
        self, random_states: Callable[[], RandomState], make: Callable[[], Sample], read: Callable[[], Sample]
    ) -> bool:
        """Whether ``make`` makes something else than ``read`` reads; False where it is not time to look."""
        return self.is_due() and self.compare(random_states, make, read)

    def compare(
        self, random_states: Callable[[], RandomState], make: Callable[[], Sample], read: Callable[[], Sample]
    ) -> bool:
        """Whether ``make`` makes something else than ``read`` reads. Random states are left as they were."""
        began = time.monotonic()
        states = random_states()
        try:
            same = equal_bits(stored_copy(make()), stored_copy(read()))
        except (Exception, Unplanned):
            same = True  # what fails now was right when it was stored
        states.restore()
        self.spent(time.monotonic() - began)
        return not same
