"""Workers on other machines, which a package brings: a class that an entry point of ``stoker.workers`` names."""

from __future__ import annotations

from typing import Protocol, cast

from ..core.elsewhere import GROUP
from ..core.errors import UsageError
from .process_pool import ProcessPool
from .protocol import Pool, WorkerSpec


class OtherMachines(Protocol):
    """Those that help one loader's workers, the same for all its iterators. ``address``: of ``worker_method=``;
    ``slot_bytes``: memory that their batches may take here."""

    def __init__(self, address: str, slot_bytes: int) -> None: ...

    @staticmethod
    def check(address: str) -> None:
        """Raises UsageError: no such address can be used."""

    def around(self, workers: ProcessPool, spec: WorkerSpec) -> Pool:
        """A pool of these workers and of those on other machines, for an iterator that begins. Raises UsageError: other
        machines cannot work on this dataset."""

    def close(self) -> None:
        """Ends the workers on other machines."""


def load(name: str) -> type[OtherMachines]:
    """The class of this name. Raises UsageError: no package has one."""
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        raise UsageError(f"no installed package has workers of the kind {name!r}")
    return cast("type[OtherMachines]", found.load())
