"""How the engine wants the workers of one iterator, and how a run is divided among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..core.options import Budget
from ..core.types import Index
from ..device.pinned_slots import Locker
from ..sampling.shard import ShardStart
from ..workers.faults.policy import Failure, OnError
from .scheduler import MakeBatch, Retreat

if TYPE_CHECKING:
    from ..transport.slots import SlotReader
    from ..transport.thread_slots import HeapWriter
    from ..workers.elsewhere import OtherMachines
    from ..workers.faults.error_log import ErrorLog
    from ..workers.protocol import LateDataset
    from ..workers.rng_watch import GlobalRngUse


class Partition(NamedTuple):
    """How a run is divided among workers."""

    # of an iterable dataset, each with its own state, those of the saved run if it is resumed; of a map-style one as
    # many as workers
    parts: int
    workers: int  # that have something to do
    places: tuple[ShardStart, ...] = ()  # where each part was begun, if parts were dealt anew among the ranks

    @property
    def shards(self) -> int:
        """The parts, where they are not one a worker, or not its own; else 0."""
        return 0 if self.parts == self.workers and not self.places else self.parts


@dataclass(frozen=True)
class PoolPlan:
    """What the engine decided about an iterator's workers."""

    budget: Budget  # how much the consumer may keep in slots
    # the loader's shared memory between two iterators; taken from here and given back
    slots: list[SlotReader] | list[HeapWriter]
    saved_parts: int = 0  # of the resumed run of an iterable dataset; else 0
    # None for worker processes; for threads what is known of the loader's use of random generators
    thread_rng: GlobalRngUse | None = None
    locker: Locker | None = None  # page-locks slots; None: where batches are to be pinned a thread copies them
    # what to do about samples that fail, and the log of them; None: torch's way
    faults: tuple[OnError, ErrorLog] | None = None
    # those that kill workers, by index, where a dead worker is replaced; None: a death is an error
    fatal_samples: dict[Index, Failure] | None = None
    make_batch: MakeBatch | None = None  # makes the batch of a task in this process; None: workers make all
    retreat: Retreat | None = None  # None: what fails in workers is an error
    nodes: OtherMachines | None = None  # of a cluster that make batches, too; None: this machine makes all
    # workers, and batches in flight for each, should any be wanted: the epoch begins without
    standby: tuple[int, int] | None = None
    late: LateDataset | None = None  # gives workers a cache in the middle of their epoch; None: nothing does
