"""What is kept for a loader between its iterators."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from ..core.metrics import LoaderMetrics
from ..core.types import Index, JsonObject
from ..device.pin_policy import Pinning
from ..sampling.cursor import Cursor

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from ..sampling.state import State
    from ..transport.slots import SlotReader
    from ..transport.thread_slots import HeapWriter
    from ..workers.faults.error_log import ErrorLog
    from ..workers.faults.policy import Failure
    from ..workers.rng_watch import GlobalRngUse
    from .auto.controller import Controller
    from .auto.in_process import Place
    from .pool_iterator import PoolIter


class LoaderState:
    """What stoker keeps for one loader between its iterators; beside the loader, so it is neither copied nor pickled.

    Attributes:
        arenas, heaps: shared memory of the last worker processes, and memory of the last threads, warm.
        metrics: the loader's numbers.
        first_count_reason: why ``num_workers="auto"`` began with its count; "" before it has.
        rng_watch: draws from process-wide random generators in worker threads.
        iterators: those that are alive.
        controller: changes the count of ``num_workers="auto"`` while an epoch runs.
        place: decides whether workers pay; None where that is settled.
        advised: the dataset has been searched for lists that each forked worker copies.
        warned: why some settings have no effect, as far as the user was told.
        pinning: what is kept of ``pin_memory``.
        manual_workers: the count was set by ``resize``, and is not tuned.
        restart_workers: ``resize`` wants other workers in the next epoch.
        ledger: the log of samples that failed.
        fatal_samples: samples that kill workers, by index.
        cursor: where the newest iterator is; it outlives that iterator.
        pending_state, pending_dict: a state that was loaded, and the dict it came in; the next iterator resumes there.
        unclaimed_iterator: made by ``state_dict()`` because there was none; the next ``iter`` returns it.
        saved_parts: parts of the resumed run of an iterable dataset; else 0.
        task_seeds: the resumed run sets random state by task.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self.arenas: list[SlotReader] = []
        self.heaps: list[HeapWriter] = []
        self.metrics = LoaderMetrics()
        self.first_count_reason = ""
        self.rng_watch: GlobalRngUse | None = None
        self.iterators: weakref.WeakSet[PoolIter] = weakref.WeakSet()
        self.controller: Controller | None = None
        self.place: Place | None = None
        self.advised = False
        self.warned: set[str] = set()
        self.pinning = Pinning()
        self.manual_workers = False
        self.restart_workers = False
        self.ledger: ErrorLog | None = None
        self.fatal_samples: dict[Index, Failure] = {}
        self.begin_run()

    def begin_run(self) -> None:
        """Nothing is resumed any more."""
        self.cursor: Cursor | None = None
        self.pending_state: State | None = None
        self.pending_dict: JsonObject | None = None
        self.unclaimed_iterator: _BaseDataLoaderIter | None = None
        self.saved_parts = 0
        self.task_seeds = False

    def leave_parent(self) -> bool:
        """After a fork by the user, drops the parent's shared memory, so that both never write there. Returns whether
        this process is such a fork, and was not known as one."""
        forked = self._process != os.getpid()
        if forked:
            self._process = os.getpid()
            self.arenas = []
            self.heaps = []
        return forked


_states: dict[int, tuple[weakref.ref[Any], LoaderState]] = {}  # by identity: a subclass may compare by value


def state_of(loader: object) -> LoaderState:
    """The state of any loader, torch's own included."""
    key = id(loader)
    found = _states.get(key)
    if found is None or found[0]() is not loader:
        pop = _states.pop  # a name of this module may be gone when the interpreter ends
        found = _states[key] = weakref.ref(loader, lambda _: pop(key, None)), LoaderState()
    return found[1]
