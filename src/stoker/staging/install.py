"""``stoker.install``: applies stoker's engine, settings and cache to loaders of torch's own class."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator

from torch.utils.data import dataloader as torch_loader
from torch.utils.data.dataloader import _DatasetKind

from ..core.errors import StokerError
from ..core.types import Attributes, LoaderLike
from ..core.warn import warn_user
from ..loader import engine, takeover
from ..loader.adopt import carried_by
from ..loader.dataloader import OWN, DataLoader
from ..workers.fetcher import staged_in
from .dataset import Staged
from .open_store import check_tier

SHARED = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")  # of torch; they change no batch
MAX_CACHES = 8  # datasets whose caches are kept while no loader uses them
_lock = threading.Lock()
_defaults: list[Attributes] = []  # of each active install, merged with those of earlier ones
_claim: takeover.Settings | None = None
_caches: dict[int, tuple[object, Staged | None]] = {}  # by dataset id: the dataset, and its version with a cache


def install(**defaults: object) -> None:
    """Puts stoker's engine behind ``torch.utils.data.DataLoader`` itself, for code that creates its own loaders.

    Existing loaders are included from their next iterator on. Without arguments, their settings remain unchanged. Calls
    nest: each needs its ``uninstall``, and inherits the defaults of the enclosing ones.

    Args:
        **defaults: settings for these loaders. Any argument that only ``stoker.DataLoader`` has (``on_error``,
            ``worker_method``, ``task_seeds``, ...), and of torch's ``num_workers`` (``"auto"`` or a number),
            ``prefetch_factor``, ``persistent_workers`` and ``pin_memory``. A loader ignores a default that it cannot
            have: an iterable dataset keeps its number of workers and has no ``on_error``. ``cache``: wraps map-style
            datasets in a ``stoker.Staged`` with that cache.

    Raises:
        TypeError: any other argument.
        UsageError, ValueError: a value that ``stoker.DataLoader`` rejects.
    """
    global _claim
    _check(defaults)
    with _lock:
        _defaults.append({**(_defaults[-1] if _defaults else {}), **defaults})
        if _claim is None:
            _claim = takeover.Settings(_wanted, OWN, _staged)
            takeover.give(_claim)


def _wanted(loader: LoaderLike) -> Attributes:
    carried = carried_by(loader)
    return _defaults[-1] if carried is None else carried


def uninstall() -> None:
    """Undoes one ``install``. Existing iterators keep their engine. Does nothing without an install."""
    global _claim
    with _lock:
        if _defaults:
            _defaults.pop()
        if _defaults or _claim is None:
            return
        takeover.withdraw(_claim)
        _claim = None
        _caches.clear()


def active() -> bool:
    """Whether an install is in effect."""
    return bool(_defaults)


@contextlib.contextmanager
def installed(**defaults: object) -> Iterator[None]:
    """``install`` for the duration of a ``with`` block.

    Example:
        >>> with installed():
        ...     batches = list(torch.utils.data.DataLoader(range(4), num_workers=1))
    """
    install(**defaults)
    try:
        yield
    finally:
        uninstall()


def _check(defaults: Attributes) -> None:
    of_torch = inspect.signature(torch_loader.DataLoader).parameters
    for name in defaults:
        if name in (*OWN, *SHARED, "cache"):
            continue
        why = "each loader has its own" if name in of_torch else "stoker.DataLoader has no such argument"
        raise TypeError(f"install() does not accept {name!r}: {why}")
    check_tier(defaults.get("cache"))
    DataLoader([0], **{"num_workers": 1, **{k: v for k, v in defaults.items() if k != "cache"}})  # type: ignore[arg-type]


def _staged(loader: LoaderLike, cache: str) -> Staged | None:
    dataset = loader.dataset
    if loader._dataset_kind != _DatasetKind.Map or staged_in(dataset) is not None:
        return None
    if engine.init_sees_dataset(loader):
        return None
    known, cached = _caches.get(id(dataset), (None, None))
    if known is dataset:
        return cached
    staged = None
    try:
        staged = Staged(dataset, cache=cache)
    except StokerError as e:
        warn_user(f"{type(dataset).__name__}: nothing is cached: {e}")
    while len(_caches) >= MAX_CACHES:
        del _caches[next(iter(_caches))]
    _caches[id(dataset)] = dataset, staged
    return staged
