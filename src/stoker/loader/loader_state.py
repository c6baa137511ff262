"""What is kept for a loader between its iterators."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from ..core.metrics import LoaderMetrics
from ..core.types import Attributes, Index, JsonObject
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
    from ..workers.protocol import LateDataset
    from ..workers.rng_watch import GlobalRngUse
    from .auto.controller import Controller
    from .auto.in_process import InProcessTrial
    from .pool_iterator import PoolIter


class LoaderState:
    """What stoker keeps for one loader between its iterators; beside it, so it is neither copied nor pickled."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # arenas, heaps: shared memory of the last worker processes, and memory of the last threads, warm
        self.arenas: list[SlotReader] = []
        self.heaps: list[HeapWriter] = []
        self.metrics = LoaderMetrics()  # the loader's numbers
        self.name = ""  # in reports; "" where nobody watches or asked yet
        self.first_count_reason = ""  # why ``num_workers="auto"`` began with its count; "" before it has
        self.rng_watch: GlobalRngUse | None = None  # draws from process-wide random generators in worker threads
        self.iterators: weakref.WeakSet[PoolIter] = weakref.WeakSet()  # those that are alive
        self.controller: Controller | None = None  # changes the count of ``num_workers="auto"`` while an epoch runs
        self.place: InProcessTrial | None = None  # decides whether workers pay; None where that is settled
        self.no_workers = ""  # why stoker starts none of its own accord; "" where it may
        self.own_workers: int | None = None  # the script's count, where ``--apply`` has set another one
        self.applied: object = None  # what ``--apply`` has decided: ``tuning.applied_loader``
        self.late: LateDataset | None = None  # may exchange the dataset in the middle of the epoch that begins
        self.adopted: Attributes | None = None  # the settings of a ``stoker.DataLoader`` that were put in force
        self.iterates_generator = False  # its class' ``__iter__`` returned a generator
        self.advised = False  # the dataset has been searched for lists that each forked worker copies
        self.warned: set[str] = set()  # why some settings have no effect, as far as the user was told
        self.pinning = Pinning()  # what is kept of ``pin_memory``
        self.manual_workers = False  # the count was set by ``resize``, and is not tuned
        self.restart_workers = False  # ``resize`` wants other workers in the next epoch
        self.ledger: ErrorLog | None = None  # the log of samples that failed
        self.fatal_samples: dict[Index, Failure] = {}  # samples that kill workers, by index
        self.nodes: OtherMachines | None = None  # of a cluster
        self.begin_run()

    def begin_run(self) -> None:
        """Nothing is resumed any more."""
        self.cursor: Cursor | None = None  # where the newest iterator is; it outlives that iterator
        # a state that was loaded, and the dict it came in; the next iterator resumes there
        self.pending_state: State | None = None
        self.pending_dict: JsonObject | None = None
        # made by ``state_dict()`` because there was none; the next ``iter`` returns it
        self.unclaimed_iterator: _BaseDataLoaderIter | None = None
        self.saved_parts = 0  # parts of the resumed run of an iterable dataset; else 0
        self.task_seeds = False  # the resumed run sets random state by task

    def leave_parent(self) -> bool:
        """After a fork by the user, drops the parent's shared memory, so that both never write there. Returns whether
        this process is such a fork, and was not known as one."""
        forked = self._process != os.getpid()
        if forked:
            self._process = os.getpid()
            self.arenas = []
            self.heaps = []
            self.nodes = None
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
