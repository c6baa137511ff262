"""A loader's settings about faults: which there are, whether they go together, and what becomes of them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _DatasetKind

from ...core.errors import UsageError
from ...core.options import AutoWorkers
from ...core.processes import starts_processes
from ...sampling.stateful import is_stateful
from . import policy
from .policy import OnError

if TYPE_CHECKING:
    from .error_log import ErrorLog

DEATH = (None, "restart", "raise")
LINUX = sys.platform == "linux"
STATE = (
    "what state the dataset (it has state_dict() and load_state_dict()) was in when a worker died, only that worker "
    "knew. Leave it out, and a death is torch's error"
)
FOREIGN = (
    "multiprocessing_context={} does not start processes by fork, spawn or forkserver, so torch's own iterator serves "
    "this loader"
)


def asked(loader: Any) -> bool:
    """Whether samples that fail are not simply raised."""
    return getattr(loader, "on_error", "raise") != "raise"


def on_error(loader: Any) -> OnError | None:
    """The policy for samples that fail; None: torch's way."""
    return policy.on_error_of(loader) if asked(loader) else None


def restarts(loader: Any) -> bool:
    """Whether another worker takes the place of one that dies. Of a map-style dataset without a state of its own,
    unless something else is said; loaders that are torch's own say nothing, and get torch's error."""
    how = getattr(loader, "on_worker_death", "raise")
    return how != "raise" and loader._dataset_kind == _DatasetKind.Map and not is_stateful(loader.dataset)


def check(loader: Any) -> None:
    """Raises for settings that are none or cannot be together.

    Raises:
        UsageError: what is wrong, and what to do instead.
    """
    policy.check(loader.on_error, loader.refill, loader.max_errors)
    _check_death(loader)
    check_timeout(loader)
    _check_context(loader)
    if not asked(loader):
        listed = loader.quarantine is not None and os.fspath(loader.quarantine) != policy.QUARANTINE
        if listed or loader.max_errors is not None:
            name = "quarantine" if listed else "max_errors"
            raise UsageError(
                f'{name}= is about samples that are left out or replaced, and on_error="raise" does neither'
            )
        return
    words = "a function" if callable(loader.on_error) else repr(loader.on_error)
    if loader._dataset_kind != _DatasetKind.Map:
        raise UsageError(
            f"on_error={words} wants a map-style dataset: a stream that has raised has ended, and nobody can ask it "
            "for the next sample. Catch the error inside __iter__, where the next one is known"
        )
    if not loader._auto_collation and loader.refill:
        raise UsageError("refill=True takes samples of the same batch, and with batch_size=None there is no batch")
    if loader.on_error == "replace" and not loader._auto_collation and policy.on_error_of(loader).among is None:
        raise UsageError(
            f'on_error="replace" wants to know which samples a {type(loader.sampler).__name__} might draw, and only '
            'torch\'s own samplers say so: on_error="skip", or a function that returns another sample'
        )
    if not LINUX:
        raise UsageError(f"on_error={words} is not there on {sys.platform} yet, only on Linux")


def only_processes(loader: Any) -> str:
    """Why ``worker_method="auto"`` takes processes; "" where nothing says so."""
    if getattr(loader, "sample_timeout", None):
        return "sample_timeout is set, and threads cannot be killed"
    return 'on_worker_death="restart" is for processes' if loader.on_worker_death == "restart" else ""


def check_timeout(loader: Any) -> None:
    """Raises for a ``sample_timeout`` that is none, or that nobody could keep.

    Raises:
        UsageError: what is wrong, and what to do instead.
    """
    seconds = getattr(loader, "sample_timeout", None)
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e6:
        raise UsageError(f"sample_timeout={seconds!r}: seconds, more than 0")
    if loader.num_workers == 0 and not loader.debug:
        raise UsageError("sample_timeout wants workers: without any, nobody looks at the clock (num_workers=1)")
    if loader._dataset_kind != _DatasetKind.Map:
        raise UsageError("sample_timeout wants a map-style dataset: what a stream does for one sample only it knows; "
                         "timeout= bounds the wait for a batch")  # fmt: skip
    if loader.on_worker_death == "raise" and loader.worker_method != "thread":
        raise UsageError('sample_timeout replaces the worker that hangs, and on_worker_death="raise" forbids that')
    if is_stateful(loader.dataset) and loader.worker_method != "thread" and loader.num_workers > 0:
        raise UsageError(f"sample_timeout replaces the worker that hangs, and {STATE}")
    if not LINUX:
        raise UsageError(f"sample_timeout is not there on {sys.platform} yet, only on Linux")


def _check_death(loader: Any) -> None:
    how = loader.on_worker_death
    if how not in DEATH:
        raise UsageError(f'on_worker_death={how!r}: "restart", "raise", or None: "restart" wherever that can be')
    if how != "restart":
        return
    if loader.worker_method == "thread":
        raise UsageError(
            'on_worker_death="restart" is for worker processes: what crashes in a thread ends the whole process. '
            'worker_method="process", or leave it out'
        )
    if loader._dataset_kind != _DatasetKind.Map:
        raise UsageError(
            'on_worker_death="restart" wants a map-style dataset: where in a stream a dead worker was, only its own '
            "memory knew. Leave it out, and a death is torch's error"
        )
    if is_stateful(loader.dataset):
        raise UsageError(f'on_worker_death="restart" starts another worker, and {STATE}')
    if not LINUX:
        raise UsageError(f'on_worker_death="restart" is not there on {sys.platform} yet, only on Linux')


def _check_context(loader: Any) -> None:
    """Raises where torch's own iterator serves the loader and cannot do what is asked for."""
    context = loader.multiprocessing_context
    if loader.num_workers == 0 or loader.debug or starts_processes(context):
        return
    wants = {
        "on_error": asked(loader),
        "sample_timeout": loader.sample_timeout,
        "on_worker_death": loader.on_worker_death == "restart",
        "task_seeds": loader.task_seeds,
        "budget": loader.budget is not None,
        'num_workers="auto"': isinstance(loader.num_workers, AutoWorkers),
    }
    named = [name for name, wanted in wants.items() if wanted]
    if named:
        raise UsageError(
            f"{FOREIGN.format(type(context).__name__)}, without {', '.join(named)}. Leave one or the other out; "
            'worker_method="thread" has workers that are threads, too'
        )


def ignored(loader: Any, *names: str) -> str:
    """Which of these settings of a loader were given, in words; "" for none."""
    return ", ".join(name for name in names if getattr(loader, name, None) not in (None, 0, "raise"))


def faults_of(loader: Any, state: Any) -> tuple[OnError, ErrorLog]:
    """The policy of a loader that has one, and its account, which is kept from epoch to epoch in ``state``."""
    from .error_log import ErrorLog  # and the list that it writes

    check(loader)
    on_error = policy.on_error_of(loader)
    if state.ledger is None:
        try:
            samples: int | None = len(loader.dataset)
        except TypeError:
            samples = None
        path = None if loader.quarantine is None else os.fspath(loader.quarantine)
        state.ledger = ErrorLog(samples, loader.max_errors, path, type(loader.dataset).__name__)
    state.ledger.metrics = state.metrics
    return on_error, state.ledger
