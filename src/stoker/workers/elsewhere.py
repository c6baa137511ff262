"""Workers on other machines: the interface of a plug-in class, which a ``stoker.workers`` entry point names."""

from __future__ import annotations

from typing import Protocol, cast

from ..core.elsewhere import GROUP
from ..core.errors import UsageError
from .process_pool import ProcessPool
from .protocol import Pool, WorkerSpec


class OtherMachines(Protocol):
    """Remote workers that help one loader's local workers, shared by all its iterators. ``address`` comes from
    ``worker_method=``; ``slot_bytes`` limits the memory that their batches take on this machine."""

    def __init__(self, address: str, slot_bytes: int) -> None: ...

    @staticmethod
    def check(address: str) -> None:
        """Raises UsageError if the address cannot be used."""

    def around(self, workers: ProcessPool, spec: WorkerSpec) -> Pool:
        """Returns a pool of local and remote workers. Raises UsageError if remote ones cannot work on this dataset."""

    def close(self) -> None:
        """Ends the workers on other machines."""


def load(name: str) -> type[OtherMachines]:
    """Loads the class with this entry-point name. Raises UsageError if no installed package provides it."""
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        raise UsageError(f"no installed package provides {name!r} workers")
    return cast("type[OtherMachines]", found.load())
