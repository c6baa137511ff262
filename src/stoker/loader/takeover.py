"""Replaces torch's ``DataLoader._get_iterator`` by one function that asks who wants to handle a loader.

- *Settings*: ``follow`` and ``stoker.install`` apply arguments of ``stoker.DataLoader`` to a loader. The newest
  one that wants the loader wins.
- *Maker*: ``--apply`` and ``STOKER_DEBUG=1`` make the iterator of any loader. Otherwise stoker's engine makes it if
  settings were given, and torch's method if not.

Another library may have wrapped this function, and may still call it when nobody here wants to handle a loader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeAlias, cast

from torch.utils.data import dataloader as torch_loader

from ..core.types import Attributes, Batch, LoaderLike
from ..device.prefetch import ahead
from ..workers.faults.validate import ConfiguredLoader
from . import engine
from .adopt import adopt, carried_by, warns_of_lost_engine

Maker: TypeAlias = Callable[[LoaderLike], Iterator[Batch]]


class Settings(NamedTuple):
    """Applies settings to loaders. ``wanted``: returns a loader's settings, or None to leave it alone. ``own``: the
    arguments that torch's class does not have, with their defaults. ``staged``: returns a loader's dataset with the
    cache that ``cache=`` names, or None for its own dataset."""

    wanted: Callable[[LoaderLike], Attributes | None]
    own: Attributes
    staged: Callable[[LoaderLike, str], object] = lambda loader, cache: None


class _Replacement(NamedTuple):
    """A function installed in torch's class. A second one exists only if somebody else has wrapped the first."""

    function: Maker
    before: Maker
    wanted_by: list[Settings | Maker]


class _LoaderClass(Protocol):
    """The methods that are replaced in torch's class."""

    _get_iterator: Maker
    check_worker_number_rationality: Callable[[LoaderLike], None]


def _torchs() -> _LoaderClass:
    return cast(_LoaderClass, torch_loader.DataLoader)


_lock = threading.Lock()
_settings: list[Settings] = []  # newest first
_makers: list[Maker] = []
_replaced: list[_Replacement] = []  # innermost first


def give(settings: Settings) -> None:
    """Applies these settings to loaders, from their next iterator on."""
    with _lock:
        _settings.insert(0, settings)
        _replace_for(settings)


_following = False


def follow(own: Attributes) -> None:
    """Handles torch loaders that frameworks build from the attributes of a ``stoker.DataLoader``. Accelerate, Ray and
    others copy arguments by torch's names, so ``num_workers`` carries stoker's. Other loaders are left alone."""
    global _following
    if _following:
        return
    _following = True
    give(Settings(carried_by, own))
    base = _torchs()
    base.check_worker_number_rationality = warns_of_lost_engine(base.check_worker_number_rationality)


def make_with(maker: Maker) -> None:
    """From now on, ``maker`` makes all iterators of torch's class."""
    with _lock:
        _makers.insert(0, maker)
        _replace_for(maker)


def withdraw(claim: Settings | Maker) -> None:
    """Undoes ``give`` or ``make_with``; does nothing if there was neither."""
    base = _torchs()
    with _lock:
        _settings[:] = [settings for settings in _settings if settings is not claim]
        _makers[:] = [maker for maker in _makers if maker is not claim]
        for replacement in _replaced:
            replacement.wanted_by[:] = [c for c in replacement.wanted_by if c is not claim]
        while _replaced and not _replaced[-1].wanted_by and base._get_iterator is _replaced[-1].function:
            base._get_iterator = _replaced.pop().before


def _replace_for(claim: Settings | Maker) -> None:
    base = _torchs()
    before = base._get_iterator
    if not _replaced or before is not _replaced[-1].function:

        def _get_iterator(loader: LoaderLike) -> Iterator[Batch]:
            return _iterator(loader, before)

        base._get_iterator = _get_iterator
        _replaced.append(_Replacement(_get_iterator, before, []))
    _replaced[-1].wanted_by.append(claim)


def _iterator(loader: LoaderLike, before: Maker) -> Iterator[Batch]:
    for settings in _settings:
        given = settings.wanted(loader)
        if given is not None:
            return _with_settings(loader, given, settings, _makers[0] if _makers else engine.get_iterator)
    return (_makers[0] if _makers else before)(loader)


def _with_settings(loader: LoaderLike, given: Attributes, settings: Settings, make: Maker) -> Iterator[Batch]:
    if given:
        adopt(loader, given, settings.own)
    cache = given.get("cache")
    with engine.with_dataset(loader, None if cache is None else settings.staged(loader, cache)):
        it = make(loader)
    adopted = cast(ConfiguredLoader, loader)
    if given.get("device") is None or adopted.device is None:
        return it
    return ahead(it, adopted.device, transform=adopted.transform_on_device)
