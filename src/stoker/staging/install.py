"""``stoker.install``: stoker's engine, settings and cache behind loaders of torch's own class."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader as torch_loader
from torch.utils.data.dataloader import _DatasetKind

from ..core.errors import StokerError, StokerWarning, UsageError
from ..loader import engine
from ..loader.adopt import behind, carried_by
from ..loader.dataloader import OWN, DataLoader
from ..workers.fetcher import staged_in
from .dataset import TIERS, Staged

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
            _top = behind(
                torch_loader.DataLoader._get_iterator, lambda loader: _given(loader, _defaults[-1]), OWN, _staged
            )
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
    if defaults.get("cache") not in TIERS:
        raise UsageError(f"cache={defaults['cache']!r}: one of {', '.join(map(repr, TIERS))}")
    DataLoader([0], **{"num_workers": 1, **{k: v for k, v in defaults.items() if k != "cache"}})  # type: ignore[arg-type]


def _given(loader: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    carried = carried_by(loader)
    return defaults if carried is None else carried


def _staged(loader: Any, cache: str) -> Any:
    dataset = loader.dataset
    if loader._dataset_kind != _DatasetKind.Map or staged_in(dataset) is not None:
        return None
    if engine.init_sees_dataset(loader):
        return None
    known, staged = _caches.get(id(dataset), (None, None))
    if known is dataset:
        return staged
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
