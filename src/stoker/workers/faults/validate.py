"""Checks a loader's fault settings, and turns them into a policy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data.dataloader import _DatasetKind

from ...core.errors import UsageError
from ...core.options import AutoWorkers
from ...core.processes import starts_processes
from ...core.types import Batch, Index, LoaderLike, Sample
from ...sampling.stateful import is_stateful
from . import policy
from .policy import OnError

if TYPE_CHECKING:
    from ...core.metrics import LoaderMetrics
    from .error_log import ErrorLog

DEATH = (None, "restart", "raise")
LINUX = sys.platform == "linux"
STATE = (
    "the dataset's state (it has state_dict() and load_state_dict()) is lost with its worker. Remove the setting; "
    "the death of a worker then raises torch's error"
)
FOREIGN = (
    "multiprocessing_context={} does not start processes by fork, spawn or forkserver, so torch's own iterator serves "
    "this loader"
)


class ConfiguredLoader(LoaderLike, Protocol):
    """A loader with the settings that torch's class lacks: ``stoker.DataLoader``, or one that adopted them."""

    worker_method: str
    budget: int | float | str | None
    debug: bool
    device: torch.device | None
    transform_on_device: Callable[[Batch], Batch] | None
    on_error: str | Callable[[Index, Exception], Sample]
    refill: bool
    max_errors: int | float | None
    quarantine: str | os.PathLike[str] | None
    on_worker_death: str | None
    sample_timeout: float | None
    task_seeds: bool
    snapshot_every_n_steps: int | None


class KeepsErrors(Protocol):
    """What keeps a loader's error log across epochs: ``loader.loader_state``."""

    ledger: ErrorLog | None
    metrics: LoaderMetrics


def asked(loader: LoaderLike) -> bool:
    """Whether ``on_error=`` is set to something else than "raise"."""
    return getattr(loader, "on_error", "raise") != "raise"


def on_error(loader: LoaderLike) -> OnError | None:
    """Returns the policy for samples that fail; None for torch's behaviour."""
    return policy.on_error_of(loader) if asked(loader) else None


def restarts(loader: LoaderLike) -> bool:
    """Whether dead workers are replaced: for map-style datasets without ``state_dict()``, unless ``on_worker_death`` is
    "raise". Loaders of torch's own class lack this setting, and get torch's error."""
    how = getattr(loader, "on_worker_death", "raise")
    return how != "raise" and loader._dataset_kind == _DatasetKind.Map and not is_stateful(loader.dataset)


def check(loader: ConfiguredLoader) -> None:
    """Checks all fault settings. Raises UsageError, which says what is wrong and what to do instead."""
    policy.check(loader.on_error, loader.refill, loader.max_errors)
    _check_death(loader)
    check_timeout(loader)
    _check_context(loader)
    if not asked(loader):
        listed = loader.quarantine is not None and os.fspath(loader.quarantine) != policy.QUARANTINE
        if listed or loader.max_errors is not None:
            name = "quarantine" if listed else "max_errors"
            raise UsageError(
                f'{name}= applies to skipped or replaced samples, so it has no effect with on_error="raise"'
            )
        return
    setting = "a function" if callable(loader.on_error) else repr(loader.on_error)
    if loader._dataset_kind != _DatasetKind.Map:
        raise UsageError(
            f"on_error={setting} needs a map-style dataset, because an iterator ends when it raises. Catch the error "
            "inside __iter__ and yield the next sample"
        )
    if not loader._auto_collation and loader.refill:
        raise UsageError("refill=True repeats samples of the same batch, but batch_size=None makes no batches")
    if loader.on_error == "replace" and not loader._auto_collation and policy.on_error_of(loader).among is None:
        raise UsageError(
            'on_error="replace" needs one of torch\'s own samplers, because it cannot know which samples a '
            f'{type(loader.sampler).__name__} may draw. Use on_error="skip", or a function that returns another '
            "sample"
        )


def check_timeout(loader: Any) -> None:
    """Checks ``sample_timeout=``. Raises UsageError, which says what is wrong and what to do instead."""
    seconds = getattr(loader, "sample_timeout", None)
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e6:
        raise UsageError(f"sample_timeout must be a positive number of seconds, not {seconds!r}")
    if loader.num_workers == 0 and not loader.debug:
        raise UsageError(
            "sample_timeout needs a worker process, which is timed from outside. Set num_workers to 1 or more"
        )
    if loader._dataset_kind != _DatasetKind.Map:
        raise UsageError(
            "sample_timeout needs a map-style dataset, because the current sample of an iterator is unknown. Use "
            "timeout=, which limits the wait for a batch"
        )
    if loader.worker_method == "thread" and loader.num_workers > 0:
        raise UsageError(
            "sample_timeout kills the worker that hangs, and threads cannot be killed. Use "
            'worker_method="process", or timeout=, which limits the wait for a batch'
        )
    if loader.on_worker_death == "raise":
        raise UsageError('sample_timeout replaces the worker that hangs, which on_worker_death="raise" does not allow')
    if is_stateful(loader.dataset) and loader.num_workers > 0:
        raise UsageError(f"sample_timeout replaces the worker that hangs, but {STATE}")


def _check_death(loader: ConfiguredLoader) -> None:
    how = loader.on_worker_death
    if how not in DEATH:
        raise UsageError(f'on_worker_death must be "restart", "raise" or None ("restart" where possible), not {how!r}')
    if how != "restart":
        return
    if loader.worker_method == "thread":
        raise UsageError(
            'on_worker_death="restart" needs worker processes, because a crash in a thread ends the whole process. '
            'Use worker_method="process", or remove on_worker_death'
        )
    if loader._dataset_kind != _DatasetKind.Map:
        raise UsageError(
            'on_worker_death="restart" needs a map-style dataset, because an iterator\'s position is lost with its '
            "worker. Remove on_worker_death; the death of a worker then raises torch's error"
        )
    if is_stateful(loader.dataset):
        raise UsageError(f'on_worker_death="restart" replaces a worker that dies, but {STATE}')


def _check_context(loader: ConfiguredLoader) -> None:
    """Raises UsageError if torch's own iterator serves the loader and does not support its settings."""
    context = loader.multiprocessing_context
    if loader.num_workers == 0 or loader.debug or (LINUX and starts_processes(context)):
        return
    wants = {
        "on_error": asked(loader),
        "sample_timeout": loader.sample_timeout,
        "on_worker_death": loader.on_worker_death == "restart",
    }
    if LINUX:
        wants["task_seeds"] = loader.task_seeds
        wants["budget"] = loader.budget is not None
        wants['num_workers="auto"'] = isinstance(loader.num_workers, AutoWorkers)
    named = ", ".join(name for name, wanted in wants.items() if wanted)
    if named and LINUX:
        raise UsageError(
            f"{FOREIGN.format(type(context).__name__)}, and it does not support {named}. Remove one of them, or use "
            'worker_method="thread" for threads'
        )
    if named:
        raise UsageError(f"{named}: supported on Linux only, or with num_workers=0; this is {sys.platform}")


def ignored(loader: object, *names: str) -> str:
    """Lists as text which of these settings were given; "" if none."""
    return ", ".join(name for name in names if getattr(loader, name, None) not in (None, 0, "raise"))


def faults_of(loader: Any, state: KeepsErrors) -> tuple[OnError, ErrorLog]:
    """Returns the loader's policy and its error log, which ``state`` keeps across epochs."""
    from .error_log import ErrorLog

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
