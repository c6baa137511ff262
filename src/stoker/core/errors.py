"""The exception tree: everything stoker raises on its own account descends from ``StokerError``.

Errors that torch's loader raises keep torch's type and text. Classes here that replace one of those also inherit from
torch's type, so ``except RuntimeError`` still works.
"""

from __future__ import annotations

from collections.abc import Sequence


def one_line(e: BaseException) -> str:
    """Formats an exception as class and text: ``ValueError: no such file``; the class alone if it has no text."""
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


class StokerError(Exception):
    """Base of every error that stoker raises on its own account."""


class UsageError(StokerError, ValueError):
    """A wrong argument or an unusable file; the command line exits with code 2."""


class BudgetError(StokerError, MemoryError):
    """The request does not fit the budget; nothing was started."""


class StaleCacheError(StokerError, RuntimeError):
    """A sample served from a cache differs from what the script would make now, and the user asked for the run to end
    then: ``stoker run --apply --on-mismatch stop``."""


class StateError(StokerError, ValueError):
    """Not a stoker state dict, or one written by a newer version, or one that does not match this loader."""


class TransportError(StokerError, RuntimeError):
    """A message that cannot come from a stoker worker."""


class WorkerDiedError(StokerError, RuntimeError):
    """A worker process ended on its own (torch: ``exited unexpectedly``).

    Attributes:
        workers: ids of the workers that died.
        tasks: numbers of their current tasks, if workers share one task queue; None if unknown.
        places: slot indices in their messages.
    """

    def __init__(
        self, message: str, workers: Sequence[int] = (), tasks: Sequence[int] | None = None, places: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.workers = tuple(workers)
        self.tasks = tasks
        self.places = tuple(places)


class WorkerTimeoutError(StokerError, RuntimeError):
    """No batch arrived within ``timeout`` seconds (torch: ``timed out``)."""


class SampleError(StokerError, RuntimeError):
    """More samples failed than ``max_errors`` allows, or no replacement for one could be found.

    Attributes:
        failures: one ``workers.faults.policy.Failure`` per failed sample.
    """

    def __init__(self, message: str, failures: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class SampleTimeoutError(WorkerTimeoutError):
    """A sample took longer than ``sample_timeout`` seconds."""


class StokerWarning(UserWarning):
    """Something works, but probably not as the user intended."""
