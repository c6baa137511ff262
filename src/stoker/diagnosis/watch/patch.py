"""Attaches the watch to torch's loaders, and detaches it again.

- ``attach`` is for ``stoker run``: the hook in the script's process calls it once, and the watch stays.
- ``share`` and ``end`` are for ``stoker.watch()`` in a notebook, and for any number of callbacks.
- ``apply_on`` and ``apply_off`` are for ``%stoker_apply``: ``--apply`` in a process that is already running.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.utils.data.dataloader as torch_loader

from ...core.patches import subclasses
from ...core.types import Batch, LoaderLike
from ...loader import takeover  # imports the engine, so that stoker's iterator classes exist and get watched
from ...loader.describe import new_name
from ...loader.loader_state import state_of
from ...workers import hangs
from . import fetch
from .iterators import GeneratorIterator, Start, patches, watch_iterators, watched_iter_method, watched_iterator
from .watch import ProcessWatch

_own: ProcessWatch | None = None  # the watch on this process, once there is one
_users = 0  # callers of ``share`` that have not called ``end``
_maker: takeover.Maker | None = None  # makes iterators between ``apply_on`` and ``apply_off``


def share() -> ProcessWatch:
    """Returns the watch on this process with its counts so far, or starts a new one. Callbacks look at what is added
    from now on; a session that begins later clears the counters."""
    global _users
    watch = _known()
    if not watch.on:
        watch.forget()
        watch.on = True
    _patch(torch_loader, watch)
    _users += 1
    return watch


def end(watch: ProcessWatch) -> None:
    """Removes one user of the watch. The last one stops it, unless ``stoker run`` started this process."""
    global _users
    _users -= 1
    watch.on = watch.listened or _users > 0
    if not watch.on:
        watch.rest()
        if not watch.apply:  # --apply needs the loaders' names
            patches.undo()


def apply_on() -> None:
    """From now on treats this process's loaders as ``--apply`` does. Calling it again does nothing."""
    global _maker
    watch = _known()
    if not watch.apply:
        _patch(torch_loader, watch)
        _maker = _apply(watch)


def apply_off() -> None:
    """Undoes ``apply_on``: iterators created from now on are torch's. Does nothing without ``apply_on``."""
    global _maker
    watch = _known()
    if _maker is None:
        return
    watch.apply_nothing()
    takeover.withdraw(_maker)
    _maker = None
    if not watch.on:
        patches.undo()


def _known() -> ProcessWatch:
    global _own
    waiting = getattr(sys.modules.get("_stoker_hook"), "waiting", None)
    if _own is None and waiting is not None:
        waiting.begin()  # under ``stoker run``, before the first loader: a process has only one watch
    if _own is None:
        _own = _new()
        _own.on = False
    return _own


def attach(module: ModuleType, late: dict[tuple[object, str], Callable[..., object]] | None = None) -> ProcessWatch:
    """Attaches the watch to torch's loader module, as ``STOKER_APPLY`` and ``STOKER_MAX_STEPS`` request.

    ``late`` holds, by class and name, functions that already installed methods call (see ``_hook``): the watch replaces
    the entries. It replaces all other methods on their classes."""
    global _own
    watch = _own = _new()
    if signal.getsignal(hangs.DUMP_SIGNAL) is signal.SIG_DFL:
        hangs.dump_on_request(all_threads=False)  # for `stoker why`
    patches.late = late or {}
    _patch(module, watch)
    if os.environ.get("STOKER_DEBUG") == "1":
        from ...loader.inline_iterator import DebugIter

        takeover.make_with(DebugIter)  # for torch's loaders; stoker's own class asks the engine
    if os.environ.get("STOKER_APPLY") == "1":
        _apply(watch)
    return watch


def _apply(watch: ProcessWatch) -> takeover.Maker:
    from ...tuning import apply

    maker = apply.begin(watch.applied)
    takeover.make_with(maker)
    watch.apply, watch.refresh, watch.made = True, apply.refresh, apply.loader_made
    watch.around = functools.partial(apply.cache_alone, watch.applied)
    return maker


def _new() -> ProcessWatch:
    steps = os.environ.get("STOKER_MAX_STEPS", "")
    watch = ProcessWatch(int(steps) if steps.isdigit() else None)
    atexit.register(watch.send, final=True)
    os.register_at_fork(after_in_child=watch.forked)
    return watch


def _patch(module: ModuleType, watch: ProcessWatch) -> None:
    """Replaces the methods that create loaders and iterators."""
    base, iterators = module.DataLoader, module._BaseDataLoaderIter
    patches.put(base, "__init__", functools.partial(_making_loader, watch))
    patches.put(base, "__iter__", functools.partial(_starting, watch))
    for cls in subclasses(base):
        _watch_class(cls, watch)
    patches.put(base, "__init_subclass__", lambda original: _defining(base, original, watch))
    for cls in (iterators, *subclasses(iterators), GeneratorIterator):
        watch_iterators(cls, watch)
    fetch.attach(patches)


def _making_loader(watch: ProcessWatch, init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: LoaderLike, *args: object, **kwargs: object) -> None:
        dataset = args[0] if args else kwargs.get("dataset")
        state_of(self).name = new_name(self, dataset, sys._getframe(1))
        init(self, *args, **kwargs)
        watch.made(self)

    return __init__


def _starting(watch: ProcessWatch, start: Start) -> Start:
    @functools.wraps(start)
    def __iter__(self: LoaderLike) -> Iterator[Batch]:
        return watched_iterator(watch, self, lambda: start(self))

    return __iter__


def _defining(base: Any, original: object, watch: ProcessWatch) -> object:
    """Watches loader classes that are defined from now on."""
    if (base, "__init_subclass__") in patches.late:
        return lambda cls: _watch_class(cls, watch)

    def __init_subclass__(cls: Any, **kwargs: object) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _watch_class(cls, watch)

    return classmethod(__init_subclass__)  # type: ignore[arg-type]


def _watch_class(cls: type, watch: ProcessWatch) -> None:
    """Watches the methods of a subclass that replace torch's."""
    if cls.__module__.startswith("stoker."):
        return
    if cls.__module__.startswith("torchdata."):  # StatefulDataLoader does not call torch's ``__init__``
        patches.put(cls, "__init__", functools.partial(_making_loader, watch))
    if isinstance(vars(cls).get("__iter__"), types.FunctionType):
        patches.put(cls, "__iter__", lambda start: watched_iter_method(watch, start))
