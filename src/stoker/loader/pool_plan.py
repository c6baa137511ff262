"""What the engine requires of an iterator's workers, and how a run is divided among them."""

from __future__ import annotations

from collections.abc import Callable
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
    from ..workers.protocol import Helpers, LateDataset, SharedFlag
    from ..workers.rng_watch import GlobalRngUse
    from .kept_workers import KeptWorkers


class Partition(NamedTuple):
    """How a run is divided among workers."""

    # parts of an iterable dataset, each with its own state (those of the saved run if resumed); for a map-style
    # dataset, the number of workers
    parts: int
    workers: int  # workers with something to do
    places: tuple[ShardStart, ...] = ()  # where each part began, if parts were redistributed among the ranks

    @property
    def shards(self) -> int:
        """The number of parts, if they do not map one to one to workers, or were redistributed; else 0."""
        return 0 if self.parts == self.workers and not self.places else self.parts


@dataclass(frozen=True)
class PoolPlan:
    """What the engine decided about an iterator's workers."""

    budget: Budget  # limits of what the consumer may keep in slots, and of the batches in flight
    # the loader's shared memory between two iterators; taken from here and returned here
    slots: list[SlotReader] | list[HeapWriter]
    saved_parts: int = 0  # parts of the resumed run of an iterable dataset; else 0
    # None for worker processes; for threads, the watch on the loader's use of global random generators
    thread_rng: GlobalRngUse | None = None
    locker: Locker | None = None  # page-locks slots; None: a thread copies batches that must be pinned
    # how to handle failing samples, and their log; None: as torch
    faults: tuple[OnError, ErrorLog] | None = None
    # samples that kill workers, by index, if dead workers are replaced; None: a death is an error
    fatal_samples: dict[Index, Failure] | None = None
    make_batch: MakeBatch | None = None  # makes a task's batch in this process; None: workers make all
    retreat: Retreat | None = None  # None: a failure in workers is an error
    draws_late: bool = False  # the sampler is first asked with the first batch, as without workers
    nodes: OtherMachines | None = None  # cluster nodes that help; None: this machine makes all batches
    # number of workers, and batches in flight for each, if they are needed later: the epoch begins without
    standby: tuple[int, int] | None = None
    # called with the workers at the end of the epoch; None: they end then
    keep: Callable[[KeptWorkers], None] | None = None
    keep_until: float = 0.0  # they end then also if it is later than this, by ``time.monotonic``
    kept: KeptWorkers | None = None  # workers of the last epoch
    drew: SharedFlag | None = None  # raised by workers whose batches draw; None: they may
    helpers: Helpers | None = None  # are told which batches come; None: there are none
    late: LateDataset | None = None  # gives workers a cache in the middle of their epoch; None: nothing does
