"""Watches iterators, wherever they are created: times their creation and each of their batches.

::

    1. loader.__iter__()           ``watched_iterator``: this loader is being opened (``_opening.stack``)
    2.   torch's iterator is made    ``_making``: notes it for the loader being opened. If none is, a framework called
                                     torch's class directly: then ``_making`` opens the loader
    3. ``_put_clock``              puts a ``Clock`` into the iterator that the consumer reads
    4. next(it)                    ``_timed``: reads the clock before and after

A subclass may define its own ``__iter__`` (``watched_iter_method``). If that is a generator function, the consumer
reads the generator, so the clock belongs there (``GeneratorIterator``).
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import types
from collections.abc import Callable, Generator, Iterator

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
Start = Callable[[LoaderLike], Iterator[Batch]]
Next = Callable[[Iterator[Batch]], Batch]


class _Opening(threading.local):
    """The loaders whose iterators this thread is creating, innermost last, each with the torch iterators created for it
    so far. ``count`` is how many loaders this thread ever opened."""

    def __init__(self) -> None:
        self.stack: list[tuple[LoaderLike, list[Iterator[Batch]]]] = []
        self.count = 0


_opening = _Opening()
patches = Patches()  # the methods that this process's watch replaces


class GeneratorIterator(Iterator[Batch]):
    """Wraps the generator that a loader's own ``__iter__`` returns: unlike a generator, it can hold a clock."""

    def __init__(self, it: Iterator[Batch]) -> None:
        self._it = it

    def __next__(self) -> Batch:
        return next(self._it)


def watched_iterator(watch: ProcessWatch, loader: LoaderLike, make: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    """Calls ``make`` to create the loader's iterator, and puts a clock into it."""
    if not watch.on or any(of is loader for of, _ in _opening.stack):
        return make()
    began = _now()
    metrics = watch.metrics_of(loader)
    times = watch.times_of(metrics)
    before, WorkerTimes.current = WorkerTimes.current, times
    made: list[Iterator[Batch]] = []
    _opening.stack.append((loader, made))
    _opening.count += 1
    # If the consumer reads a generator, that gets the clock: another thread may read the iterator behind it.
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
    fetcher = getattr(inner, "_dataset_fetcher", None)  # of an iterator that makes batches in this process
    if fetcher is not None:
        fetcher._stoker_times = times
        if hasattr(vars(fetcher).get("fetch"), "gathered"):
            fetcher.fetch = fetch.timed_gather(fetcher.fetch, times)
    if clocked:
        # A loader that is its own iterator gets no clock, because it may be copied and pickled.
        on = it if id(it) != id(loader) and _can_hold_clock(it) else inner
        _put_clock(watch, metrics, on, _now() - began, began)
    return it


def _put_clock(watch: ProcessWatch, metrics: LoaderMetrics, it: Iterator[Batch], spent: float, began: float) -> None:
    if not _can_hold_clock(it):
        return
    watch_iterators(next(cls for cls in type(it).__mro__ if "__next__" in vars(cls)), watch)
    it.__dict__["_stoker_clock"] = watch.clock(metrics, spent, began)


def _can_hold_clock(it: object) -> bool:
    return hasattr(it, "__dict__") and isinstance(getattr(type(it), "__next__", None), types.FunctionType)


def _note_engine(watch: ProcessWatch, loader: LoaderLike, metrics: LoaderMetrics, inner: object) -> None:
    """Notes the loader's settings, whose engine its iterator uses and, if that is torch's, why."""
    metrics.settings.update(settings_of(loader))
    ours = type(inner).__module__.startswith("stoker.")
    if rank_and_ranks()[1] > 1:
        metrics.settings["length"] = batches_of(loader) if ours else compare(loader, metrics.name)
    # A user's iterator may wrap a torch iterator created in an earlier epoch, so it says nothing about the engine.
    if ours or isinstance(inner, torch_loader._BaseDataLoaderIter) or metrics.name not in watch.bypassed:
        metrics.settings["engine"] = "stoker" if ours else "torch"
        watch.bypassed[metrics.name] = type(loader).__qualname__, bypass(loader, inner)


def watched_iter_method(watch: ProcessWatch, start: Start) -> Start:
    """Wraps a subclass's ``__iter__``: watches the iterator it returns, unless those it uses are already watched."""

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
            return _read_generator(watch, self, it)
        return watched_iterator(watch, self, lambda: it)

    if inspect.isgeneratorfunction(start):
        __iter__._stoker_generator = True  # type: ignore[attr-defined]
    return __iter__


def _read_generator(
    watch: ProcessWatch, loader: LoaderLike, it: Generator[Batch, None, None]
) -> Generator[Batch, None, None]:
    """Yields the generator's batches, through an iterator with a clock."""
    try:
        outer = GeneratorIterator(it)
        if watch.on:
            metrics = watch.metrics_of(loader)
            _note_engine(watch, loader, metrics, it)
            _put_clock(watch, metrics, outer, 0.0, _now())
        yield from outer
    finally:
        it.close()


def watch_iterators(cls: type, watch: ProcessWatch) -> None:
    """Wraps those of ``__init__``, ``_reset`` and ``__next__`` that an iterator class defines itself."""
    own = vars(cls)
    if isinstance(own.get("__next__"), types.FunctionType):
        patches.put(cls, "__next__", lambda original: _timed(watch, original))
    for name in ("__init__", "_reset"):
        if name in own and issubclass(cls, torch_loader._BaseDataLoaderIter):
            patches.put(cls, name, lambda original: _making(watch, original))


def _making(watch: ProcessWatch, original: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method that creates or restarts a loader's iterator; its first argument is the loader."""

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

        watched_iterator(watch, loader, make)
        return None

    return method


def _timed(watch: ProcessWatch, original: Next) -> Next:
    """Wraps the ``__next__`` of an iterator class."""

    @functools.wraps(original)
    def __next__(self: Iterator[Batch]) -> Batch:
        clock: Clock | None = self.__dict__.get("_stoker_clock")
        if clock is None or clock.inside:
            return original(self)
        if watch.max_steps is not None and watch.enough():
            raise SystemExit(0)  # ends the script successfully
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
        is_plain = type(batch) is torch.Tensor and batch.ndim
        clock.after(began, came, batch.size(0) if is_plain else count(batch, clock.size))
        return batch

    return __next__
