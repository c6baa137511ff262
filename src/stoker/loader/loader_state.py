"""What is kept for a loader between its iterators."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from ..core.metrics import LoaderMetrics
from ..core.options import Measured
from ..sampling.cursor import Cursor
from .pin_setup import Pinning

if TYPE_CHECKING:
    from ..sampling.rng import SavedGlobalRng
    from ..sampling.state import State
    from .auto.in_process import Place
    from .auto.profile import Tuned


class LoaderState:
    """What stoker keeps for one loader between its iterators; beside the loader, so it is neither copied nor pickled.

    Attributes:
        arenas, heaps: memory of the last worker processes, and threads, warm.
        metrics: the loader's numbers.
        measured: what ``num_workers="auto"`` began with, once it has (``options.Measured``).
        method: what ``worker_method="auto"`` came to, and why, once it has.
        profile: what ``stoker tune`` kept of it, and words, once that was looked for.
        noticed: draws from process-wide random generators in worker threads.
        iterators: those that are alive.
        controller: what changes the count of ``num_workers="auto"`` while an epoch runs.
        place: what decides whether there are any; None where that is settled.
        advised: its dataset has been looked through for lists that fork copies.
        ignored: why settings have no effect, as it was said.
        pinning: what is kept of ``pin_memory`` between iterators.
        hold: the count was set by ``resize`` and is not to be tuned.
        rebuild: ``resize`` wants other workers in the next epoch.
        ledger: the account of samples that failed (``faults.ledger``).
        known: samples that kill workers, by index.
        cursor: where the newest iterator is; it outlives that.
        pending: a state that was loaded, and ``given`` the dict that it came in; the next iterator goes on there.
        first: the iterator that ``state_dict()`` made because there was none, for whoever asks for one next.
        shadow: torch's global generator as a resumed run had it.
        shards: parts of an iterable dataset, where a resumed run has another number than workers.
        task_seeds: the resumed run has random state by task.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self.arenas: list[Any] = []
        self.heaps: list[Any] = []
        self.metrics = LoaderMetrics()
        self.measured: Measured | None = None
        self.method: tuple[str, str] | None = None
        self.profile: tuple[Tuned | None, str] | None = None
        self.noticed: Any = None
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self.controller: Any = None
        self.place: Place | None = None
        self.advised = False
        self.ignored: set[str] = set()
        self.pinning = Pinning()
        self.hold = self.rebuild = False
        self.ledger: Any = None
        self.known: dict[Any, Any] = {}
        self.cursor: Cursor | None = None
        self.pending: State | None = None
        self.given: dict[str, Any] | None = None
        self.first: Any = None
        self.begin_run()

    def here(self) -> bool:
        """In a process that the user forked nothing of its parent's is used again: both would write there. Returns
        False where this is one, and it is looked at for the first time."""
        same, self._process = self._process == os.getpid(), os.getpid()
        if not same:
            self.arenas, self.heaps = [], []
        return same

    @property
    def foreign(self) -> bool:
        """It was made by another process, of which this is a fork."""
        return self._process != os.getpid()

    def begin_run(self) -> None:
        """Nothing is gone on with any more."""
        self.cursor = self.pending = self.given = self.first = None
        self.shadow: SavedGlobalRng | None = None
        self.shards, self.task_seeds = 0, False


_states: dict[int, tuple[weakref.ref[Any], LoaderState]] = {}  # by identity: a subclass may compare by value


def state_of(loader: Any) -> LoaderState:
    """The state of any loader, torch's own included."""
    key = id(loader)
    found = _states.get(key)
    if found is None or found[0]() is not loader:
        pop = _states.pop  # a name of this module may be gone when the interpreter ends
        found = _states[key] = weakref.ref(loader, lambda _: pop(key, None)), LoaderState()
    return found[1]
