"""Applies the settings of a ``stoker.DataLoader`` to a loader of torch's own class.

Frameworks build such a loader from the attributes of a ``stoker.DataLoader``; ``stoker.install`` applies settings to
all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from torch.utils.data.dataloader import _DatasetKind

from ..core.errors import UsageError
from ..core.options import Workers, worker_word
from ..core.types import Attributes, LoaderLike
from ..core.warn import warn_user
from ..device.prefetch import checked
from ..workers.faults import validate
from ..workers.faults.validate import ConfiguredLoader
from .auto.limits import first_count
from .loader_state import state_of

AHEAD = 8  # tasks in flight per worker with "auto" for both; docs/notes/stragglers.md


def carried_by(loader: LoaderLike) -> Attributes | None:
    """Settings of the ``stoker.DataLoader`` from which this loader was built; None if there is none."""
    workers = loader.num_workers
    if not isinstance(workers, Workers) or hasattr(type(loader), "_stoker_own"):
        return None
    dataset = loader.dataset  # Accelerate wraps an iterable dataset in another one
    same = workers.dataset is dataset or workers.dataset is getattr(dataset, "dataset", None)
    return workers.settings if same else None


def warns_of_lost_engine(check: Callable[[LoaderLike], None]) -> Callable[[LoaderLike], None]:
    """Wraps the check that every loader class calls at construction, even one that makes its own iterators."""

    def check_worker_number_rationality(self: LoaderLike) -> None:
        check(self)
        own = getattr(type(self), "_get_iterator", None)
        if getattr(own, "__module__", "").startswith("torchdata.") and carried_by(self) is not None:
            self.num_workers = int(self.num_workers)  # drops the settings: this check runs again
            warn_user(
                f"A stoker.DataLoader was converted to a {type(self).__module__.partition('.')[0]} "
                f"{type(self).__name__}, which has its own iterators, so stoker's engine and settings no longer "
                "apply. stoker.DataLoader already has state_dict(): remove use_stateful_dataloader, or do not "
                "prepare this loader"
            )

    return check_worker_number_rationality


def adopt(loader: LoaderLike, given: Attributes, own: Attributes) -> None:
    """Applies the settings of a ``stoker.DataLoader`` to a torch loader, once."""
    held, state = loader.__dict__, state_of(loader)
    if state.adopted is given:
        return
    state.adopted = given
    held.update({name: given.get(name, default) for name, default in own.items()})
    adopted = cast(ConfiguredLoader, loader)  # it has the attributes now
    held["worker_method"] = worker_word(adopted.worker_method)
    held["device"] = None if adopted.device is None else checked(adopted.device)
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    if "num_workers" in given and not (iterable and loader.num_workers):  # it divides its stream by them
        _set_workers(loader, given["num_workers"], "prefetch_factor" in given)
    if loader.num_workers:
        held.update({name: given[name] for name in ("prefetch_factor", "persistent_workers") if given.get(name)})
    if "pin_memory" in given:
        state_of(loader).pinning.auto = given["pin_memory"] == "auto"
        held["pin_memory"] = given["pin_memory"] is True
    if adopted.worker_method == "thread" and loader.multiprocessing_context is not None:
        held["worker_method"] = "process"
    try:
        validate.check(adopted)
    except UsageError as e:
        warn_user(f"{type(loader).__name__} of {type(loader.dataset).__name__}: {e}. Its errors remain torch's")
        held.update({name: own[name] for name in ("on_error", "refill", "sample_timeout", "on_worker_death")})


def _set_workers(loader: LoaderLike, n: int | Literal["auto"], prefetch: bool) -> None:
    held = loader.__dict__
    if n == "auto":
        n = first_count(loader.dataset)
        held["_ahead"] = 0 if prefetch else AHEAD
    loader.num_workers = n
    if n:
        held["prefetch_factor"] = held["prefetch_factor"] or 2
    else:
        held.update(prefetch_factor=None, persistent_workers=False, timeout=0)
