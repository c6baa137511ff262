"""The exception tree: everything stoker raises on its own account descends from ``StokerError``.

Errors that torch's loader raises keep torch's type and words; the classes here that stand for one of
those inherit from torch's type as well, so ``except RuntimeError`` goes on working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StokerError(Exception):
    """Base of every error that stoker raises on its own account."""


class UsageError(StokerError, ValueError):
    """A wrong argument or a file that cannot be used; the command line ends with exit code 2."""


class BudgetError(StokerError, MemoryError):
    """What is asked for does not fit the budget; nothing was begun."""


class ImageError(StokerError, OSError):
    """A file that is no picture, or a broken one; whatever its decoder said. Pillow's own are ``OSError``s as well."""


class StateError(StokerError, ValueError):
    """A state dict that is none, is of a newer stoker, or does not fit the loader that it was given to."""


class TransportError(StokerError, RuntimeError):
    """A record or a payload that cannot have come from a stoker worker."""


class WorkerDiedError(StokerError, RuntimeError):
    """A worker process ended without being asked to (torch: ``exited unexpectedly``).

    Attributes:
        workers: ids of the workers that died.
        tasks: numbers of the tasks they had in hand, where workers take tasks from one board; None where not known.
        places: what their records say of whom they come from.
    """

    def __init__(
        self,
        message: str,
        workers: Sequence[int] = (),
        tasks: Sequence[int] | None = None,
        places: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.workers = tuple(workers)
        self.tasks = tasks
        self.places = tuple(places)


class WorkerTimeoutError(StokerError, RuntimeError):
    """No batch arrived within ``timeout`` seconds (torch: ``timed out``)."""


class SampleError(StokerError, RuntimeError):
    """More samples failed than ``max_errors`` allows, or nothing good could be found in the place of one.

    Attributes:
        failures: what is known of each (``faults.policy.Failure``).
    """

    def __init__(self, message: str, failures: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class SampleTimeoutError(WorkerTimeoutError):
    """A sample took longer than ``sample_timeout`` seconds."""


class StokerWarning(UserWarning):
    """Something that works and is not what its user meant."""
