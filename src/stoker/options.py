"""Knobs and Budget: the settings that travel, as frozen dataclasses that check themselves."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError


class AutoWorkers(int):
    """The worker count of a loader built with ``num_workers="auto"``: an int that remembers.

    Frameworks rebuild loaders from their attributes (Lightning: ``type(dl)(**attributes)``). They read
    ``num_workers`` as the plain number it is, and hand it back to a constructor that sees it is "auto".

    Example:
        >>> AutoWorkers(2) + 0, isinstance(AutoWorkers(2), int)
        (2, True)
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[AutoWorkers], tuple[int]]:
        return AutoWorkers, (int(self),)


@dataclass(frozen=True)
class Knobs:
    """What the engine is told about one loader; every stage reads its settings from here.

    Attributes:
        num_workers: worker processes, at least 1.
        prefetch_factor: tasks in flight per worker, at least 1.
        in_order: deliver in the sampler's order.
        persistent: keep workers between epochs.
        timeout: seconds to wait for one batch; 0 waits for ever.
        task_seeds: seed the random state of each task, not of each worker (``num_workers="auto"``).
    """

    num_workers: int
    prefetch_factor: int = 2
    in_order: bool = True
    persistent: bool = False
    timeout: float = 0.0
    task_seeds: bool = False

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"num_workers is {self.num_workers}; the process engine needs at least 1")
        if self.prefetch_factor < 1:
            raise UsageError(f"prefetch_factor is {self.prefetch_factor}; it has to be at least 1")

    @property
    def window(self) -> int:
        """Tasks in flight over all workers."""
        return self.num_workers * self.prefetch_factor


@dataclass(frozen=True)
class Budget:
    """How much memory the transport may hold.

    Attributes:
        lease_bytes: bytes of slots that the consumer may keep; past it a batch is copied out of its slot.
        lease_slots: the same bound as a count, because every slot is a mapping.
    """

    lease_bytes: int
    lease_slots: int = 512

    def __post_init__(self) -> None:
        if self.lease_bytes < 0 or self.lease_slots < 0:
            raise UsageError(
                f"a budget cannot be negative: lease_bytes={self.lease_bytes}, lease_slots={self.lease_slots}"
            )
