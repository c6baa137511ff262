"""stoker's engine behind loaders of torch's own class: after ``install``, and where a framework has built one from a
``stoker.DataLoader``."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data import dataloader as torch_loader
from torch.utils.data.dataloader import _DatasetKind

from ..core.errors import StokerError, StokerWarning, UsageError
from ..core.options import AutoWorkers, Workers
from ..device.prefetch import ahead, checked
from ..workers.faults import validate
from ..workers.fetcher import staged_in
from . import engine
from .dataloader import AHEAD, OWN, DataLoader

SHARED = (
    "num_workers",
    "pin_memory",
    "prefetch_factor",
    "persistent_workers",
)  # torch's arguments that change no batch
CACHES = 8  # datasets whose caches are kept while no loader has them
_lock = threading.Lock()
_defaults: list[dict[str, Any]] = []  # of each install that has not been taken back, with those of the ones before it
_top: Any = None  # what stands in DataLoader's place for them
_caches: dict[int, tuple[Any, Any]] = {}  # by a dataset's id: the dataset, and the same one with a cache


def install(**defaults: Any) -> None:
    """Puts stoker's engine behind ``torch.utils.data.DataLoader`` itself, for code that makes its own loaders.

    Loaders that exist already are included from their next iterator on. Without arguments their settings are left as
    they are. Calls nest: each wants its ``uninstall``, and has the defaults of those around it, too.

    Args:
        **defaults: what those loaders are to have. Any argument that only ``stoker.DataLoader`` has (``on_error``,
            ``worker_method``, ``task_seeds``, ...), and of torch's ``num_workers`` (``"auto"`` or a number),
            ``prefetch_factor``, ``persistent_workers`` and ``pin_memory``. A loader keeps its own way where a default
            cannot be: an iterable dataset its number of workers, and it has no ``on_error``. ``cache``: map-style
            datasets are put into a ``stoker.Staged`` with that cache.

    Raises:
        TypeError: another argument.
        UsageError, ValueError: a value that ``stoker.DataLoader`` refuses.
    """
    global _top
    _check(defaults)
    with _lock:
        _defaults.append({**(_defaults[-1] if _defaults else {}), **defaults})
        if _top is None:
            _top = _behind(torch_loader.DataLoader._get_iterator, lambda loader: _given(loader, _defaults[-1]))
            torch_loader.DataLoader._get_iterator = _top  # type: ignore[method-assign]


def uninstall() -> None:
    """Takes one ``install`` back. Iterators that exist go on with the engine they have. Without an install: nothing."""
    global _top
    with _lock:
        if _defaults:
            _defaults.pop()
        if _defaults or _top is None:
            return
        _top.wanted = lambda loader: None  # somebody may have wrapped it meanwhile, and still call it
        base: Any = torch_loader.DataLoader
        if base._get_iterator is _top:
            base._get_iterator = _top.before
        _top = None
        _caches.clear()


def active() -> bool:
    """Whether there is an install that was not taken back."""
    return bool(_defaults)


@contextlib.contextmanager
def installed(**defaults: Any) -> Iterator[None]:
    """``install`` for the length of a ``with`` block.

    Example:
        >>> with installed():
        ...     batches = list(torch.utils.data.DataLoader(range(4), num_workers=1))
    """
    install(**defaults)
    try:
        yield
    finally:
        uninstall()


def _check(defaults: dict[str, Any]) -> None:
    of_torch = inspect.signature(torch_loader.DataLoader).parameters
    for name in defaults:
        if name in (*OWN, *SHARED, "cache"):
            continue
        why = "each loader has its own" if name in of_torch else "stoker.DataLoader has no such argument"
        raise TypeError(f"install() takes no argument {name!r}: {why}")
    if "cache" in defaults:
        from ..staging.dataset import TIERS

        if defaults["cache"] not in TIERS:
            raise UsageError(f"cache={defaults['cache']!r}: one of {', '.join(map(repr, TIERS))}")
    DataLoader([0], **{"num_workers": 1, **{k: v for k, v in defaults.items() if k != "cache"}})  # type: ignore[arg-type]


def _behind(before: Any, wanted: Callable[[Any], dict[str, Any] | None]) -> Any:
    """What stands in the place of ``_get_iterator``.

    Args:
        before: what stood there.
        wanted: of a loader, the settings it is to have; None: it is none of stoker's business.
    """

    def _get_iterator(loader: Any) -> Any:
        settings = this.wanted(loader)
        return this.before(loader) if settings is None else _made(loader, settings, this.before)

    this: Any = _get_iterator
    this.before, this.wanted = before, wanted
    return this


def _made(loader: Any, given: dict[str, Any], before: Any) -> Any:
    while hasattr(before, "wanted"):
        before = before.before
    # What ``stoker run`` has put there knows the engine itself.
    make = before if getattr(before, "__module__", "").startswith("stoker.") else engine.get_iterator
    if given:
        _adopt(loader, given)
    cache = given.get("cache")
    with engine.with_dataset(loader, None if cache is None else _staged(loader, loader.dataset, cache)):
        it = make(loader)
    if given.get("device") is None:
        return it
    return ahead(it, loader.device, transform=loader.transform_on_device)


def _given(loader: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    carried = carried_by(loader)
    return defaults if carried is None else carried


# ------------------------------------------------------------------------------- loaders built from a stoker.DataLoader


def follow() -> None:
    """Stands behind loaders that frameworks build of torch's class from a ``stoker.DataLoader``'s attributes.

    Accelerate, Ray and others copy arguments by torch's names. So ``num_workers`` carries stoker's. Loaders without it
    are left to whatever stood here.
    """
    global _following
    with _lock:
        if _following:
            return
        _following = True
        base: Any = torch_loader.DataLoader
        base._get_iterator = _behind(base._get_iterator, carried_by)
        base.check_worker_number_rationality = _looking(base.check_worker_number_rationality)


_following = False


def carried_by(loader: Any) -> dict[str, Any] | None:
    """The settings of the ``stoker.DataLoader`` from which this loader was built; None: there is none."""
    workers = loader.num_workers
    if not isinstance(workers, Workers) or isinstance(loader, DataLoader):
        return None
    dataset = loader.dataset  # Accelerate puts an iterable dataset into another one
    same = workers.dataset is dataset or workers.dataset is getattr(dataset, "dataset", None)
    return workers.settings if same else None


def _looking(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Every class of loaders calls this when a loader is made, also those that make iterators of their own."""

    def check_worker_number_rationality(self: Any) -> None:
        check(self)
        own = type(self)._get_iterator
        if getattr(own, "__module__", "").startswith("torchdata.") and carried_by(self) is not None:
            self.num_workers = int(self.num_workers)  # it is asked again
            warnings.warn(
                f"A stoker.DataLoader was made into a {type(self).__module__.partition('.')[0]} {type(self).__name__}, "
                "which has iterators of its own: stoker's engine and settings are lost. stoker.DataLoader has a "
                "state_dict() itself: leave use_stateful_dataloader out, or do not prepare the loader",
                StokerWarning,
                stacklevel=2,
            )

    return check_worker_number_rationality


# -------------------------------------------------------------------------------------------- settings of such a loader


def _adopt(loader: Any, given: dict[str, Any]) -> None:
    """Gives a loader of torch's the settings of a ``stoker.DataLoader``, once."""
    held = loader.__dict__
    if held.get("_stoker_given") is given:
        return
    held["_stoker_given"] = given
    held.update({name: given.get(name, default) for name, default in OWN.items()})
    held["device"] = None if loader.device is None else checked(loader.device)
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    if "num_workers" in given and not (iterable and loader.num_workers):  # which divides its stream by their number
        _set_workers(loader, given["num_workers"], "prefetch_factor" in given)
    if loader.num_workers:
        held.update({name: given[name] for name in ("prefetch_factor", "persistent_workers") if given.get(name)})
    if "pin_memory" in given:
        engine.state_of(loader).pinning.auto = given["pin_memory"] == "auto"
        held["pin_memory"] = given["pin_memory"] is True
    if loader.worker_method == "thread" and loader.multiprocessing_context is not None:
        held["worker_method"] = "process"
    try:
        validate.check(loader)
    except UsageError as e:
        _say(f"{type(loader).__name__} of {type(loader.dataset).__name__}: {e}. Its errors stay torch's")
        held.update({name: OWN[name] for name in ("on_error", "refill", "sample_timeout", "on_worker_death")})


def _set_workers(loader: Any, n: Any, prefetch: bool) -> None:
    held = loader.__dict__
    if n == "auto":
        from .auto.limits import cores_here

        n = AutoWorkers(1 if isinstance(loader.dataset, IterableDataset) else cores_here())
        held["_ahead"] = 0 if prefetch else AHEAD
    loader.num_workers = n
    if n:
        held["prefetch_factor"] = held["prefetch_factor"] or 2
    else:
        held.update(prefetch_factor=None, persistent_workers=False, timeout=0)


def _staged(loader: Any, dataset: Any, cache: str) -> Any:
    if loader._dataset_kind != _DatasetKind.Map or staged_in(dataset) is not None:
        return None
    if engine.init_sees_dataset(loader):
        return None
    known, staged = _caches.get(id(dataset), (None, None))
    if known is dataset:
        return staged
    from ..staging.dataset import Staged

    try:
        staged = Staged(dataset, cache=cache)
    except StokerError as e:
        staged = None
        _say(f"{type(dataset).__name__}: nothing is kept: {e}")
    while len(_caches) >= CACHES:
        del _caches[next(iter(_caches))]
    _caches[id(dataset)] = dataset, staged
    return staged


def _say(words: str) -> None:
    warnings.warn(words, StokerWarning, stacklevel=2)
