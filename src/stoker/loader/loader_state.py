"""State kept for a loader between its iterators."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.metrics import LoaderMetrics
from ..core.types import Attributes, Batch, Index, JsonObject
from ..device.pin_policy import Pinning
from ..sampling.cursor import Cursor

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from ..sampling.state import State
    from ..transport.slots import SlotReader
    from ..transport.thread_slots import HeapWriter
    from ..workers.elsewhere import OtherMachines
    from ..workers.faults.error_log import ErrorLog
    from ..workers.faults.policy import Failure
    from ..workers.protocol import Helpers, LateDataset, SharedFlag
    from ..workers.rng_watch import GlobalRngUse
    from .auto.controller import Controller
    from .auto.in_process import InProcessTrial
    from .kept_workers import KeptWorkers
    from .pool_iterator import PoolIter


class LoaderState:
    """State that stoker keeps for one loader between its iterators, outside the loader: neither copied nor pickled."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # arenas, heaps: shared memory of the last worker processes and memory of the last threads, kept for reuse
        self.arenas: list[SlotReader] = []
        self.heaps: list[HeapWriter] = []
        self.metrics = LoaderMetrics()  # the loader's numbers
        self.name = ""  # in reports; "" until somebody needs it
        self.first_count_reason = ""  # why ``num_workers="auto"`` began with its count; "" before that
        self.rng_watch: GlobalRngUse | None = None  # draws from process-wide random generators in worker threads
        self.iterators: weakref.WeakSet[PoolIter] = weakref.WeakSet()  # those alive
        self.controller: Controller | None = None  # changes the count of ``num_workers="auto"`` while an epoch runs
        self.place: InProcessTrial | None = None  # decides whether workers pay off; None once that is settled
        self.no_workers = ""  # why stoker starts none of its own accord; "" if it may
        self.own_workers: int | None = None  # the script's count, if ``--apply`` has changed it
        # describes what the script changed since the epoch began, which workers would miss; "" for nothing. Only for
        # workers that ``--apply`` gave to a loader without any
        self.changed: Callable[[], str] | None = None
        self.drew: SharedFlag | None = None  # for these workers: see ``WorkerSpec``
        # the script's dataset and collate function, while an iterator is created with others (``engine.with_dataset``)
        self.own: tuple[object, Callable[..., Batch]] | None = None
        self.applied: object = None  # what ``--apply`` decided: ``tuning.applied_loader``
        self.late: LateDataset | None = None  # may exchange the dataset in the middle of the coming epoch
        self.helpers: Helpers | None = None  # make parts of the coming epoch's batches
        # time until which workers of the coming epoch, or those of the last one, may serve the next; 0.0: they may not
        self.keeps_workers = 0.0
        self.kept: KeptWorkers | None = None  # workers that wait for the next epoch
        self.kept_since = object()  # another one each time that what they are made from was looked at
        self.adopted: Attributes | None = None  # settings of a ``stoker.DataLoader`` that were applied
        self.iterates_generator = False  # the class' ``__iter__`` returned a generator
        self.advised = False  # the dataset has been searched for lists that each forked worker copies
        self.warned: set[str] = set()  # reasons, already reported, why some settings have no effect
        self.pinning = Pinning()  # decision and state of ``pin_memory``
        self.manual_workers = False  # ``resize`` set the count, so it is not tuned
        self.restart_workers = False  # ``resize`` wants a different number in the next epoch
        self.ledger: ErrorLog | None = None  # the log of samples that failed
        self.fatal_samples: dict[Index, Failure] = {}  # samples that kill workers, by index
        self.nodes: OtherMachines | None = None  # of a cluster
        self.begin_run()

    def begin_run(self) -> None:
        """Forgets any run to be resumed."""
        self.cursor: Cursor | None = None  # position of the newest iterator; outlives it
        # a loaded state, and the dict it came in; the next iterator resumes from it
        self.pending_state: State | None = None
        self.pending_dict: JsonObject | None = None
        # created by ``state_dict()`` because there was none; the next ``iter`` returns it
        self.unclaimed_iterator: _BaseDataLoaderIter | None = None
        self.saved_parts = 0  # parts of the resumed run of an iterable dataset; else 0
        self.task_seeds = False  # the resumed run sets random state by task

    @property
    def standby(self) -> tuple[int, int] | None:
        """Workers, and batches in flight for each, for an epoch that begins in this process; None for any other."""
        place = self.place
        return None if place is None or not place.here else (place.workers, place.prefetch or 2)

    def keep(self, since: object, kept: KeptWorkers) -> None:
        """Keeps workers for the next epoch. ``since``: ``kept_since`` when they were started."""
        if since is self.kept_since:
            self.kept = kept
        else:  # another iterator has begun meanwhile
            kept.close()

    def take_kept(self, may_serve: bool) -> KeptWorkers | None:
        """Returns the workers that wait for this epoch; ends them unless they may serve it."""
        kept, self.kept = self.kept, None
        if kept is not None and not may_serve:
            kept.close()
            return None
        return kept

    def leave_parent(self) -> bool:
        """After a fork by the user, drops the parent's shared memory: two processes must not write to it. Returns
        whether this process is a fork that was not detected before."""
        forked = self._process != os.getpid()
        if forked:
            self._process = os.getpid()
            self.arenas = []
            self.heaps = []
            self.nodes = self.kept = None
        return forked


_states: dict[int, tuple[weakref.ref[object], LoaderState]] = {}  # by identity: subclasses may compare by value


def state_of(loader: object) -> LoaderState:
    """Returns the state of any loader, including torch's own."""
    key = id(loader)
    found = _states.get(key)
    if found is None or found[0]() is not loader:
        pop = _states.pop  # this module's globals may be gone at interpreter exit
        found = _states[key] = weakref.ref(loader, lambda _: pop(key, None)), LoaderState()
    return found[1]
