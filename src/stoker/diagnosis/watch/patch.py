"""Puts the watch on torch's loaders, and takes it off again.

- ``attach`` is for ``stoker run``: the hook in the script's process calls it once, and it stays.
- ``begin`` and ``end`` are for ``stoker.watch()`` in a notebook.

What is seen goes to ``stoker run`` over a socket once a second and at the end, and into memory shared with it, so that
a killed script leaves all it did until then.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.utils.data.dataloader as torch_loader

from ...core.errors import UsageError
from ...core.patches import Patches, subclasses
from ...core.types import Batch, LoaderLike
from ...loader import engine  # noqa: F401  defines stoker's iterators: classes that exist are watched
from ...loader.describe import named
from . import fetch
from .iterators import GeneratorIterator, Start, watch_iterators, watched_iter_method, watched_iterator
from .watch import Watch

_own: Watch | None = None  # the watch on this process, once there is one
_patches = Patches()


def begin() -> Watch:
    """A watch on this process from now on, for ``session``. Raises UsageError: there is one already."""
    global _own
    if _own is None:
        _own = _new()
        _own.on = False
    if _own.on and not _own.listened:
        raise UsageError("another stoker.watch() has not ended yet: call its stop()")
    if not _own.listened:
        _own.forget()
    _patch(torch_loader, _own)
    _own.on = True
    return _own


def end(watch: Watch) -> None:
    """From now on nothing is watched, unless ``stoker run`` started this process."""
    watch.on = watch.listened
    if not watch.on:
        watch.rest()
        _patches.undo()


def attach(module: ModuleType, late: dict[tuple[object, str], Callable[..., object]] | None = None) -> Watch:
    """Puts the watch on torch's loader module; ``STOKER_APPLY`` and ``STOKER_MAX_STEPS`` say what else to do.
    ``late``: methods that call what stands here, by class and name (``_hook``); others are replaced themselves."""
    global _own
    watch = _own = _new()
    _patches.late = late or {}
    _patch(module, watch)
    if os.environ.get("STOKER_DEBUG") == "1":
        from ...loader.inline_iterator import DebugIter

        module.DataLoader._get_iterator = lambda loader: DebugIter(loader)  # stoker's own class asks the engine
    if watch.apply:
        from ...tuning import apply

        apply.attach(module, watch.applied)
        watch.refresh = apply.refresh
        watch.around = functools.partial(apply.cache_alone, module, watch.applied)
    return watch


def _new() -> Watch:
    steps = os.environ.get("STOKER_MAX_STEPS", "")
    watch = Watch(int(steps) if steps.isdigit() else None, os.environ.get("STOKER_APPLY") == "1")
    atexit.register(watch.end)
    os.register_at_fork(after_in_child=watch.forked)
    return watch


def _patch(module: ModuleType, watch: Watch) -> None:
    """Replaces the methods that make loaders and iterators."""
    base, iterators = module.DataLoader, module._BaseDataLoaderIter
    _patches.put(base, "__init__", _naming)
    _patches.put(base, "__iter__", lambda start: _starting(start, watch))
    for cls in subclasses(base):
        _watch_class(cls, watch)
    _patches.put(base, "__init_subclass__", lambda original: _defining(base, original, watch))
    for cls in (iterators, *subclasses(iterators), GeneratorIterator):
        watch_iterators(cls, watch, _patches)
    fetch.attach(_patches)


def _naming(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: LoaderLike, *args: object, **kwargs: object) -> None:
        dataset = args[0] if args else kwargs.get("dataset")
        self.__dict__["_stoker_name"] = named.name(self, dataset, sys._getframe(1))
        init(self, *args, **kwargs)

    return __init__


def _starting(start: Start, watch: Watch) -> Start:
    @functools.wraps(start)
    def __iter__(self: LoaderLike) -> Iterator[Batch]:
        return watched_iterator(watch, _patches, self, lambda: start(self))

    return __iter__


def _defining(base: Any, original: object, watch: Watch) -> object:
    """Watches the classes of loaders that are defined from now on."""
    if (base, "__init_subclass__") in _patches.late:
        return lambda cls: _watch_class(cls, watch)

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _watch_class(cls, watch)

    return classmethod(__init_subclass__)  # type: ignore[arg-type]


def _watch_class(cls: type, watch: Watch) -> None:
    """Of a subclass, what it does in torch's place."""
    if cls.__module__.startswith("stoker."):
        return
    if cls.__module__.startswith("torchdata."):  # StatefulDataLoader does not call torch's
        _patches.put(cls, "__init__", _naming)
    if isinstance(vars(cls).get("__iter__"), types.FunctionType):
        _patches.put(cls, "__iter__", lambda start: watched_iter_method(watch, _patches, start))
