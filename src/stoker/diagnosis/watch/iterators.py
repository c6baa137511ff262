"""Watches iterators, wherever they are made: how long making one takes, and each of its batches.

::

    1. loader.__iter__()           ``watched_iterator``: this loader is being opened (``_opening.stack``)
    2.   torch's iterator is made    ``_making``: notes it for the loader that is being opened. Without one, a framework
                                     has called torch's class itself: then ``_making`` opens the loader
    3. ``_put_clock``              puts a ``Clock`` into the iterator that the consumer reads
    4. next(it)                    ``_timed``: reads the clock before and after

A subclass may have an ``__iter__`` of its own (``watched_iter_method``). If that is a generator, the consumer reads the
generator, so that one gets the clock (``GeneratorIterator``).
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.utils.data.dataloader as torch_loader

from ...core.metrics import LoaderMetrics
from ...core.patches import Patches
from ...core.ranks import rank_and_ranks
from ...core.types import Batch, LoaderLike
from ...loader.describe import bypass, count, settings_of
from ...loader.loader_state import state_of
from ...loader.rank_batches import batches_of, compare
from . import fetch
from .clock import Clock
from .shared_counters import WorkerTimes
from .watch import ProcessWatch

_now = time.perf_counter
_Tensor = torch.Tensor
Start = Callable[[LoaderLike], Iterator[Batch]]
Next = Callable[[Iterator[Batch]], Batch]


class _Opening(threading.local):
    """The loaders whose iterators this thread is making, the innermost last, each with torch's iterators made for it so
    far; ``count``: how many were ever opened."""

    def __init__(self) -> None:
        self.stack: list[tuple[LoaderLike, list[Iterator[Batch]]]] = []
        self.count = 0


_opening = _Opening()


class GeneratorIterator:
    """The batches of a loader whose own ``__iter__`` is a generator; unlike a generator it can hold a clock."""

    def __init__(self, it: Iterator[Batch]) -> None:
        self._it = it

    def __iter__(self) -> GeneratorIterator:
        return self

    def __next__(self) -> Batch:
        return next(self._it)


def watched_iterator(
    watch: ProcessWatch, patches: Patches, loader: LoaderLike, make: Callable[[], Iterator[Batch]]
) -> Iterator[Batch]:
    """The iterator of a loader that ``make`` makes, with a clock in it."""
    if not watch.on or any(of is loader for of, _ in _opening.stack):
        return make()
    began = _now()
    metrics = watch.metrics_of(loader)
    times = watch.times_of(metrics)
    before, WorkerTimes.current = WorkerTimes.current, times
    made: list[Iterator[Batch]] = []
    _opening.stack.append((loader, made))
    _opening.count += 1
    # Where the consumer reads a generator, that has the clock: what is behind it may be read by another thread.
    own = getattr(type(loader), "__iter__", None)
    clocked = not hasattr(own, "_stoker_generator") and not state_of(loader).iterates_generator
    try:
        with watch.around(loader):
            it = make()
    finally:
        WorkerTimes.current = before
        _opening.stack.pop()
    inner = made[-1] if made and not isinstance(it, torch_loader._BaseDataLoaderIter) else it
    _note_engine(watch, loader, metrics, inner)
    _time_fetcher(getattr(inner, "_dataset_fetcher", None), times)
    if clocked:
        # The loader may be its own iterator, and is copied and pickled.
        on = it if id(it) != id(loader) and _can_hold_clock(it) else inner
        _put_clock(watch, patches, metrics, on, _now() - began, began)
    return it


def _put_clock(
    watch: ProcessWatch, patches: Patches, metrics: LoaderMetrics, it: Iterator[Batch], spent: float, began: float
) -> None:
    if not _can_hold_clock(it):
        return
    for cls in type(it).__mro__:
        if "__next__" in vars(cls):
            watch_iterators(cls, watch, patches)
            break
    it.__dict__["_stoker_clock"] = watch.clock(metrics, spent, began)


def _can_hold_clock(it: object) -> bool:
    return hasattr(it, "__dict__") and isinstance(getattr(type(it), "__next__", None), types.FunctionType)


def _note_engine(watch: ProcessWatch, loader: LoaderLike, metrics: LoaderMetrics, inner: object) -> None:
    """The loader's settings, whose engine its iterator is, and why that is not stoker's."""
    metrics.settings.update(settings_of(loader))
    ours = type(inner).__module__.startswith("stoker.")
    if rank_and_ranks()[1] > 1:
        metrics.settings["length"] = batches_of(loader) if ours else compare(loader, metrics.name)
    # An iterator of a user's class may wrap one of torch's that was made for an earlier epoch.
    if ours or isinstance(inner, torch_loader._BaseDataLoaderIter) or metrics.name not in watch.bypassed:
        metrics.settings["engine"] = "stoker" if ours else "torch"
        watch.bypassed[metrics.name] = type(loader).__qualname__, bypass(loader, inner)


def _time_fetcher(fetcher: Any, times: WorkerTimes) -> None:
    """Times what an iterator fetches in this process."""
    if fetcher is None:
        return
    fetcher._stoker_times = times
    if hasattr(vars(fetcher).get("fetch"), "gathered"):
        fetcher.fetch = fetch.timed_gather(fetcher.fetch, times)


def watched_iter_method(watch: ProcessWatch, patches: Patches, start: Start) -> Start:
    """For the ``__iter__`` of a subclass: what it returns is watched, unless the iterators that it uses are."""

    @functools.wraps(start)
    def __iter__(self: LoaderLike) -> Iterator[Batch]:
        if not watch.on or any(of is self for of, _ in _opening.stack):
            return start(self)
        before = _opening.count
        it = start(self)
        if _opening.count > before:
            return it
        if isinstance(it, types.GeneratorType):
            state_of(self).iterates_generator = True
            return _read_generator(watch, patches, self, it)
        return watched_iterator(watch, patches, self, lambda: it)

    if inspect.isgeneratorfunction(start):
        __iter__._stoker_generator = True  # type: ignore[attr-defined]
    return __iter__


def _read_generator(
    watch: ProcessWatch, patches: Patches, loader: LoaderLike, it: Generator[Batch, None, None]
) -> Generator[Batch, None, None]:
    """The same batches, in a generator that knows when they were asked for."""
    try:
        outer = GeneratorIterator(it)
        if watch.on:
            metrics = watch.metrics_of(loader)
            _note_engine(watch, loader, metrics, it)
            _put_clock(watch, patches, metrics, outer, 0.0, _now())
        yield from outer
    finally:
        it.close()


def watch_iterators(cls: type, watch: ProcessWatch, patches: Patches) -> None:
    """Wraps what a class of iterators defines itself of ``__init__``, ``_reset`` and ``__next__``."""
    own = vars(cls)
    if isinstance(own.get("__next__"), types.FunctionType):
        patches.put(cls, "__next__", lambda original: _timed(watch, original))
    if not issubclass(cls, torch_loader._BaseDataLoaderIter):
        return
    for name in ("__init__", "_reset"):
        if name in own:
            patches.put(cls, name, lambda original: _making(watch, patches, original))


def _making(watch: ProcessWatch, patches: Patches, original: Callable[..., None]) -> Callable[..., None]:
    """For a method that makes an iterator, or makes it begin again: of a loader, the first argument."""

    @functools.wraps(original)
    def method(self: Iterator[Batch], loader: LoaderLike, *args: object, **kwargs: object) -> None:
        if not watch.on or not hasattr(loader, "__dict__"):
            return original(self, loader, *args, **kwargs)
        if _opening.stack:
            made = _opening.stack[-1][1]
            if not any(it is self for it in made):
                made.append(self)
            return original(self, loader, *args, **kwargs)

        def make() -> Iterator[Batch]:
            original(self, loader, *args, **kwargs)
            return self

        watched_iterator(watch, patches, loader, make)
        return None

    return method


def _timed(watch: ProcessWatch, original: Next) -> Next:
    """For the ``__next__`` of a class of iterators."""

    @functools.wraps(original)
    def __next__(self: Iterator[Batch]) -> Batch:
        clock: Clock | None = self.__dict__.get("_stoker_clock")
        if clock is None or clock.inside:
            return original(self)
        if watch.max_steps is not None and watch.enough():
            raise SystemExit(0)  # the script ends here, and well
        began = _now()
        clock.before(began)
        clock.inside = True
        try:
            batch = original(self)
        except StopIteration:
            clock.ended(began, _now())
            raise
        except BaseException:
            clock.failed()
            raise
        finally:
            clock.inside = False
        came = _now()
        is_plain = type(batch) is _Tensor and batch.ndim
        clock.after(began, came, batch.size(0) if is_plain else count(batch, clock.size))
        return batch

    return __next__
