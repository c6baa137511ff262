"""Watches a script's loaders from inside its process: wait, step and, in forked workers, the stages.

Two clock readings and a few additions a batch; never a device sync. What is seen goes to ``stoker run`` over a socket
once a second and at the end, and into memory shared with it, so that a killed script leaves all it did until then.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data.dataloader as torch_loader

from . import engine, watch_fetch
from .ceilings import Ceilings
from .clock import MANY, OFTEN_S
from .errors import UsageError
from .live import Stages
from .metrics import LoaderMetrics
from .observer import Watch
from .watched import count, made_at, settings_of

_now = time.perf_counter
_Tensor = torch.Tensor


class Enough(SystemExit):
    """``--max-steps`` is reached: the script ends here, and well."""

    def __init__(self) -> None:
        super().__init__(0)


_own: Watch | None = None  # the watch on this process, once there is one


def begin() -> Watch:
    """A watch on this process from now on, for ``session``.

    Raises:
        UsageError: there is one already.
    """
    global _own
    if _own is None:
        attach(torch_loader).on = False
    watch = _own
    assert watch is not None
    if watch.on and not watch.listened:
        raise UsageError("another stoker.watch() has not ended yet: call its stop()")
    if not watch.listened:
        watch.forget()
    watch.on = True
    return watch


def end(watch: Watch) -> None:
    """What is iterated from now on is not seen, unless ``stoker run`` listens."""
    watch.on = watch.listened
    if not watch.on:
        watch.rest()


def attach(module: Any) -> Watch:
    """Puts the watch on torch's loader module; ``STOKER_APPLY`` and ``STOKER_MAX_STEPS`` say what else to do."""
    steps = os.environ.get("STOKER_MAX_STEPS", "")
    watch = Watch(
        int(steps) if steps.isdigit() else None,
        os.environ.get("STOKER_APPLY") == "1",
        os.environ.get("STOKER_CEILINGS") == "1",
    )
    _watch_loaders(module, watch)
    _watch_batches(module._BaseDataLoaderIter, watch)
    watch_fetch.attach()
    if os.environ.get("STOKER_DEBUG") == "1":
        from .debug import DebugIter

        module.DataLoader._get_iterator = lambda loader: DebugIter(loader)  # stoker's own class asks the engine
    if watch.apply:
        from .tuning import apply

        apply.attach(module, watch.applied, _found())
    global _own
    _own = watch
    atexit.register(watch.end)
    os.register_at_fork(after_in_child=watch.forked)
    return watch


def _found() -> dict[str, dict[str, Any]]:
    """The settings that an observed run asked for, by loader, as ``stoker run`` hands them on."""
    try:
        found = json.loads(os.environ.get("STOKER_FOUND", "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _watch_loaders(module: Any, watch: Watch) -> None:
    loader_class = module.DataLoader
    init, start = loader_class.__init__, loader_class.__iter__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_stoker_name"] = made_at(sys._getframe(1))
        init(self, *args, **kwargs)

    @functools.wraps(start)
    def __iter__(self: Any) -> Any:
        if not watch.on:
            return start(self)
        began = _now()
        metrics = watch.metrics_of(self)
        known = engine.state_of(self).measured
        if watch.listened and not watch.apply:
            watch.tries.begin(self, metrics)
        stages = watch.stages_of(metrics.name, metrics)
        before, Stages.current = Stages.current, stages
        try:
            it = start(self)
        finally:
            Stages.current = before
        metrics.settings = settings_of(self)
        metrics.settings["engine"] = "stoker" if type(it).__module__.startswith("stoker.") else "torch"
        _watch_batches(type(it), watch)
        fetcher = getattr(it, "_dataset_fetcher", None)
        if fetcher is not None:  # inline: fetched in this process
            fetcher._stoker_stages = stages
            if hasattr(vars(fetcher).get("fetch"), "gathered"):
                fetcher.fetch = watch_fetch.gathered(fetcher.fetch, stages)
                fetcher = None
        clock = it.__dict__["_stoker_clock"] = watch.clock(metrics, fetcher)
        spent = _now() - began
        measured = engine.state_of(self).measured
        if measured is not None and measured is not known:
            spent -= measured.seconds  # measuring is not waiting; it happens once
        clock.started(spent)
        return it

    loader_class.__init__, loader_class.__iter__ = __init__, __iter__


def _watch_batches(cls: Any, watch: Watch) -> None:
    """Wraps ``__next__`` where ``cls`` defines it, once."""
    original: Callable[[Any], Any] | None = vars(cls).get("__next__")
    if original is None or hasattr(original, "_stoker_watched"):
        return

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        clock = self.__dict__.get("_stoker_clock")
        if clock is None or clock.inside:
            return original(self)
        began = _now()
        plain = clock.plain  # this wait, and the step before it, stand with others like them
        if not plain:
            if watch.max_steps is not None and watch.enough():
                raise Enough
            clock.enter(began)
        clock.inside = True
        try:
            batch = original(self) if plain else _next(watch.ceilings, clock.metrics, original, self)
        except StopIteration:
            clock.ended(began, _now())
            raise
        except BaseException:
            clock.broken()
            raise
        finally:
            clock.inside = False
        clock.times += (began, _now())
        clock.samples += batch.size(0) if type(batch) is _Tensor and batch.ndim else count(batch, clock.size)
        if not plain:
            clock.leave()
        elif len(clock.times) >= MANY or began - clock.settled > OFTEN_S:
            clock.reckon()
        return batch

    __next__._stoker_watched = True  # type: ignore[attr-defined]
    cls.__next__ = __next__


def _next(ceilings: Ceilings | None, metrics: LoaderMetrics, original: Callable[[Any], Any], it: Any) -> Any:
    """A batch; of the first loader by the spells of ``Ceilings``, with the last of which the script ends."""
    if ceilings is None:
        return original(it)
    ceilings.name = ceilings.name or metrics.name
    if ceilings.name != metrics.name:
        return original(it)
    settings = metrics.settings
    ahead = int(settings.get("num_workers") or 0) * int(settings.get("prefetch_factor") or 1)
    batch = ceilings.next(lambda: original(it), ahead)
    if "loader" in ceilings.found or batch is None:
        raise Enough
    return batch
