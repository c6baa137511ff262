"""stoker's engine and settings behind loaders of torch's own class.

``follow`` serves loaders that a framework has built from a ``stoker.DataLoader``; ``stoker.install`` serves all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch.utils.data import dataloader as torch_loader
from torch.utils.data.dataloader import _DatasetKind

from ..core.errors import UsageError
from ..core.options import Workers, worker_word
from ..core.types import Attributes, Batch, LoaderLike
from ..core.warn import warn_user
from ..device.prefetch import ahead, checked
from ..workers.faults import validate
from . import engine
from .auto.limits import first_count
from .loader_state import state_of

AHEAD = 8  # tasks in flight per worker with "auto" for both; docs/notes/stragglers.md
_lock = threading.Lock()
GetIterator: TypeAlias = Callable[..., Iterator[Batch]]  # of a loader
StagedDataset: TypeAlias = Callable[[LoaderLike, str], object]  # of a loader and a value of ``cache=``


def behind(
    before: GetIterator,
    wanted: Callable[[LoaderLike], Attributes | None],
    own: Attributes,
    staged: StagedDataset | None = None,
) -> GetIterator:
    """What stands in the place of ``_get_iterator``, which was ``before``. ``wanted`` returns the settings that a
    loader is to have, None: it is left to ``before``. ``own``: the arguments that torch's class does not have, with
    their defaults. ``staged`` returns a loader's dataset with the cache that ``cache=`` names; None: datasets stay as
    they are."""

    def _get_iterator(loader: LoaderLike) -> Iterator[Batch]:
        settings = this.wanted(loader)
        return this.before(loader) if settings is None else _made(loader, settings, this.before, own, staged)

    this: Any = _get_iterator
    this.before, this.wanted = before, wanted
    return _get_iterator


def _made(
    loader: LoaderLike,
    given: Attributes,
    before: Any,
    own: Attributes,
    staged: StagedDataset | None,
) -> Iterator[Batch]:
    while hasattr(before, "wanted"):
        before = before.before
    # What ``stoker run`` has put there knows the engine itself.
    make = before if getattr(before, "__module__", "").startswith("stoker.") else engine.get_iterator
    if given:
        _adopt(loader, given, own)
    cache = given.get("cache")
    with engine.with_dataset(loader, None if cache is None or staged is None else staged(loader, cache)):
        it = make(loader)
    if given.get("device") is None:
        return it
    settings: Any = loader  # _adopt has given it stoker's
    return ahead(it, settings.device, transform=settings.transform_on_device)


# ------------------------------------------------------------------------------- loaders built from a stoker.DataLoader


def follow(own: Attributes) -> None:
    """Stands behind loaders that frameworks build of torch's class from a ``stoker.DataLoader``'s attributes.
    Accelerate, Ray and others copy arguments by torch's names. So ``num_workers`` carries stoker's. Loaders without it
    are left to whatever stood here."""
    global _following
    with _lock:
        if _following:
            return
        _following = True
        base: Any = torch_loader.DataLoader
        base._get_iterator = behind(base._get_iterator, carried_by, own)
        base.check_worker_number_rationality = _looking(base.check_worker_number_rationality)


_following = False


def carried_by(loader: LoaderLike) -> Attributes | None:
    """The settings of the ``stoker.DataLoader`` from which this loader was built; None: there is none."""
    workers = loader.num_workers
    if not isinstance(workers, Workers) or hasattr(type(loader), "_stoker_own"):
        return None
    dataset = loader.dataset  # Accelerate puts an iterable dataset into another one
    same = workers.dataset is dataset or workers.dataset is getattr(dataset, "dataset", None)
    return workers.settings if same else None


def _looking(check: Callable[[LoaderLike], None]) -> Callable[[LoaderLike], None]:
    """Every class of loaders calls this when a loader is made, also those that make iterators of their own."""

    def check_worker_number_rationality(self: LoaderLike) -> None:
        check(self)
        own = getattr(type(self), "_get_iterator", None)
        if getattr(own, "__module__", "").startswith("torchdata.") and carried_by(self) is not None:
            self.num_workers = int(self.num_workers)  # it is asked again
            warn_user(
                f"A stoker.DataLoader was made into a {type(self).__module__.partition('.')[0]} {type(self).__name__}, "
                "which has iterators of its own: stoker's engine and settings are lost. stoker.DataLoader has a "
                "state_dict() itself: leave use_stateful_dataloader out, or do not prepare the loader"
            )

    return check_worker_number_rationality


# -------------------------------------------------------------------------------------------- settings of such a loader


def _adopt(loader: Any, given: Attributes, own: Attributes) -> None:
    """Gives a loader of torch's the settings of a ``stoker.DataLoader``, once."""
    held = loader.__dict__
    if held.get("_stoker_given") is given:
        return
    held["_stoker_given"] = given
    held.update({name: given.get(name, default) for name, default in own.items()})
    held["worker_method"] = worker_word(loader.worker_method)
    held["device"] = None if loader.device is None else checked(loader.device)
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    if "num_workers" in given and not (iterable and loader.num_workers):  # which divides its stream by their number
        _set_workers(loader, given["num_workers"], "prefetch_factor" in given)
    if loader.num_workers:
        held.update({name: given[name] for name in ("prefetch_factor", "persistent_workers") if given.get(name)})
    if "pin_memory" in given:
        state_of(loader).pinning.auto = given["pin_memory"] == "auto"
        held["pin_memory"] = given["pin_memory"] is True
    if loader.worker_method == "thread" and loader.multiprocessing_context is not None:
        held["worker_method"] = "process"
    try:
        validate.check(loader)
    except UsageError as e:
        warn_user(f"{type(loader).__name__} of {type(loader.dataset).__name__}: {e}. Its errors stay torch's")
        held.update({name: own[name] for name in ("on_error", "refill", "sample_timeout", "on_worker_death")})


def _set_workers(loader: LoaderLike, n: Any, prefetch: bool) -> None:
    held = loader.__dict__
    if n == "auto":
        n = first_count(loader.dataset)
        held["_ahead"] = 0 if prefetch else AHEAD
    loader.num_workers = n
    if n:
        held["prefetch_factor"] = held["prefetch_factor"] or 2
    else:
        held.update(prefetch_factor=None, persistent_workers=False, timeout=0)
