"""Watches a script's loaders from inside its process: wait, step and, in forked workers, the stages.

Two clock readings and a few additions a batch; never a device sync. What is seen goes to ``stoker run`` over a socket
once a second and at the end, and into memory shared with it, so that a killed script leaves all it did until then.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data.dataloader as torch_loader

from . import engine, machine, watch_fetch
from .ceilings import Ceilings
from .errors import UsageError
from .inside import add
from .live import Live, Stages
from .metrics import EPOCHS, LoaderMetrics
from .watch_device import DeviceWatch
from .watched import count, made_at, settings_of

POINTS = 64  # of memory over time
NOTES = 240  # of a loader over time; after that every other one is dropped
LONG_S = 2e-3  # a step, of which the CPU's time is always read
ONE_IN = 16  # of the shorter ones
BEAT_S = 1.0  # between two reports of a process

_now = time.perf_counter
_cpu = time.process_time


class Enough(SystemExit):
    """``--max-steps`` is reached: the script ends here, and well."""

    def __init__(self) -> None:
        super().__init__(0)


class _Clock:
    """One iterator's place in its loader's numbers."""

    __slots__ = ("cpu", "device", "epoch", "first", "inside", "left", "metrics", "row", "steps", "waits")

    def __init__(self, metrics: LoaderMetrics, row: Any, durations: tuple[list[float], list[float]]) -> None:
        self.steps, self.waits = durations
        self.metrics = metrics
        self.row = row
        self.epoch = [0.0, 0.0, 0.0, 0.0]
        if len(metrics.by_epoch) < EPOCHS:
            metrics.by_epoch.append(self.epoch)
        self.device: DeviceWatch | None = None
        self.left = 0.0
        self.cpu = 0.0
        self.inside = False
        self.first = True


class Watch:
    """The watch on one process.

    Args:
        max_steps: end the script after so many batches, or None.
        apply: put stoker's engine and measured settings behind the script's loaders.
        ceilings: measure what loop, steps and loader could do, and end the script.
    """

    def __init__(self, max_steps: int | None = None, apply: bool = False, ceilings: bool = False) -> None:
        self.max_steps, self.apply = max_steps, apply
        self.ceilings = Ceilings(lambda batch: count(batch, 1)) if ceilings else None
        self.loaders: dict[str, LoaderMetrics] = {}
        self.applied: dict[str, Any] = {}
        self._stages: dict[str, Stages] = {}
        self._devices: dict[str, DeviceWatch] = {}
        self._durations: dict[str, tuple[list[float], list[float]]] = {}
        self.on = True
        self.listened = "STOKER_RUN" in os.environ
        self._steps = 0
        self._beat = 0.0
        self._born = _now()
        self._socket: socket.socket | None = None
        self._live = Live()
        self._shm: int | None = None
        self._noted: dict[str, tuple[float, float, float, int]] = {}

    def forget(self) -> None:
        """Nothing was seen."""
        self.loaders, self._stages, self._devices, self._durations, self._live = {}, {}, {}, {}, Live()
        self._noted = {}

    def metrics_of(self, loader: Any) -> LoaderMetrics:
        """The numbers of the line that made this loader; loaders made by one line share them."""
        # One that was made before there was a watch is called by its dataset.
        name = loader.__dict__.setdefault("_stoker_name", f"DataLoader of {type(loader.dataset).__name__}")
        new = name not in self.loaders
        metrics = self.loaders.setdefault(name, LoaderMetrics(name))
        if new:
            self.send()  # before its first batch: from here on the live rows say how far it came
        state = engine.state_of(loader)
        state.metrics = metrics
        metrics.settings = settings_of(loader)
        return metrics

    def stages_of(self, name: str, metrics: LoaderMetrics) -> Stages:
        if name not in self._stages:
            self._stages[name] = Stages(metrics)
        return self._stages[name]

    def device_of(self, metrics: LoaderMetrics) -> DeviceWatch | None:
        """The watch on the device for this loader's consumer; None while the script does not use one."""
        if metrics.name not in self._devices:
            if not torch.cuda.is_initialized():
                return None
            self._devices[metrics.name] = DeviceWatch(metrics)
        return self._devices[metrics.name]

    def durations_of(self, metrics: LoaderMetrics) -> tuple[list[float], list[float]]:
        """Where single steps and waits are kept until they are counted, once a second."""
        return self._durations.setdefault(metrics.name, ([], []))

    def row(self, metrics: LoaderMetrics) -> Any:
        """The live row of a loader."""
        return self._live.row(list(self.loaders).index(metrics.name))

    def step(self, now: float) -> None:
        """A batch was delivered."""
        self._steps += 1
        if now - self._beat >= BEAT_S:
            self._beat = now
            if self.listened:
                self.send()
            else:
                self.snapshot(False)  # what is kept one by one is counted

    def enough(self) -> bool:
        return self.max_steps is not None and self._steps >= self.max_steps

    def snapshot(self, final: bool) -> dict[str, Any]:
        """What was seen so far, for ``report.schema``."""
        for name, stages in self._stages.items():
            stages.collect()
            self._weigh(self.loaders[name])
        for metrics in self.loaders.values():
            self._note(metrics)
        for name, (steps, waits) in self._durations.items():
            add(self.loaders[name].step_bins, steps)
            add(self.loaders[name].wait_bins, waits)
        for device in self._devices.values():
            device.collect(final)
        return {
            "pid": os.getpid(),
            "argv": sys.argv,
            "rank": int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else 0,
            "world": int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("WORLD_SIZE", "1").isdigit() else 1,
            "final": final,
            "shm_free_min": self._shm_free(),
            "cuda": bool(torch.cuda.is_available() and torch.cuda.is_initialized()),
            "threads": torch.get_num_threads(),
            "loaders": [vars(m) for m in self.loaders.values()],
            "applied": self.applied,
            "ceilings": None if self.ceilings is None else {"name": self.ceilings.name, **self.ceilings.found},
        }

    def _shm_free(self) -> int | None:
        """The least that was left in this process' own /dev/shm; a container has another one than who started it."""
        free = machine.shm_free()
        self._shm = free if self._shm is None or free is None else min(self._shm, free)
        return self._shm

    def _note(self, metrics: LoaderMetrics) -> None:
        """Notes how the last second was."""
        now = _now()
        before, wait, step, samples = self._noted.get(metrics.name, (self._born, 0.0, 0.0, 0))
        took = metrics.wait_s - wait + metrics.step_s - step
        if now - before < BEAT_S / 2 or took <= 0:
            return
        self._noted[metrics.name] = (now, metrics.wait_s, metrics.step_s, metrics.samples)
        look = [now - self._born, (metrics.wait_s - wait) / took, (metrics.samples - samples) / took]
        metrics.over_time.append([round(x, 3) for x in look])
        if len(metrics.over_time) > NOTES:
            del metrics.over_time[1:-1:2]

    def _weigh(self, metrics: LoaderMetrics) -> None:
        """Notes what the workers weigh together, now and then."""
        weight = sum(metrics.worker_pss.values())
        series = metrics.memory
        if not weight or (series and series[-1][1] == weight):
            return
        series.append([round(_now() - self._born, 1), weight])
        if len(series) > POINTS:
            del series[1:-1:2]

    def send(self, final: bool = False) -> None:
        """Tells ``stoker run``; when nobody listens, nothing happens."""
        if not self.loaders or not self.listened:
            return
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(1.0)
                self._socket.connect("\0" + os.environ["STOKER_RUN"])
                socket.send_fds(self._socket, [b"\n"], [self._live.fd])
            self._socket.sendall(json.dumps(self.snapshot(final), default=str).encode() + b"\n")
        except (OSError, KeyError):
            pass

    def end(self) -> None:
        self.send(final=True)

    def forked(self) -> None:
        """In a child: it is a process of its own, with nothing seen yet."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket, self._steps, self._beat = None, 0, 0.0
        self._live = Live()
        for metrics in self.loaders.values():
            metrics.__init__(metrics.name, settings=metrics.settings)  # type: ignore[misc]
        self._stages, self._devices, self._durations, self._noted = {}, {}, {}, {}


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
        stages = watch.stages_of(metrics.name, metrics)
        before, Stages.current = Stages.current, stages
        try:
            it = start(self)
        finally:
            Stages.current = before
        metrics.settings = settings_of(self)
        metrics.settings["engine"] = "stoker" if type(it).__module__.startswith("stoker.") else "torch"
        _watch_batches(type(it), watch)
        if hasattr(it, "_dataset_fetcher"):  # inline: fetched in this process
            it._dataset_fetcher._stoker_stages = stages
            if hasattr(vars(it._dataset_fetcher).get("fetch"), "gathered"):
                it._dataset_fetcher.fetch = watch_fetch.gathered(it._dataset_fetcher.fetch, stages)
        clock = it.__dict__["_stoker_clock"] = _Clock(metrics, watch.row(metrics), watch.durations_of(metrics))
        metrics.epochs += 1
        spent = _now() - began
        measured = engine.state_of(self).measured
        if measured is not None and measured is not known:
            spent -= measured.seconds  # measuring is not waiting; it happens once
        metrics.wait_s += spent
        metrics.first_wait_s += spent
        clock.epoch[1] += spent
        clock.epoch[3] += spent
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
        metrics = clock.metrics
        began = _now()
        epoch = clock.epoch
        if clock.left:
            stepped = began - clock.left
            metrics.step_s += stepped
            if stepped > LONG_S:
                metrics.step_cpu_s += _cpu() - clock.cpu
            elif not metrics.batches % ONE_IN:  # the clock of all threads' CPU is a system call
                metrics.step_cpu_s += (_cpu() - clock.cpu) * ONE_IN
            clock.left = 0.0
            epoch[2] += stepped
            clock.steps.append(stepped)
            if clock.device is not None:
                clock.device.enter(began, stepped)
        if watch.max_steps is not None and watch.enough():
            raise Enough
        clock.inside = True
        try:
            batch = original(self) if watch.ceilings is None else _ceiling(watch.ceilings, metrics, original, self)
        except StopIteration:
            metrics.wait_s += _now() - began
            raise
        finally:
            clock.inside = False
        now = _now()
        waited = now - began
        metrics.wait_s += waited
        epoch[0] += 1
        epoch[1] += waited
        if clock.first:
            clock.first = False
            metrics.first_wait_s += waited
            epoch[3] += waited
        else:
            clock.waits.append(waited)
        if clock.device is not None:
            clock.device.leave(waited)
        elif metrics.batches & 15 == 0:
            clock.device = watch.device_of(metrics)
        metrics.batches += 1
        metrics.samples += count(batch, metrics.settings.get("batch_size") or 1)
        row = clock.row
        row[0], row[1], row[2] = metrics.wait_s, metrics.first_wait_s, metrics.step_s
        row[3], row[4], row[5] = metrics.batches, metrics.samples, metrics.epochs
        watch.step(now)
        clock.cpu = _cpu()
        clock.left = _now()
        return batch

    __next__._stoker_watched = True  # type: ignore[attr-defined]
    cls.__next__ = __next__


def _ceiling(ceilings: Ceilings, metrics: LoaderMetrics, original: Callable[[Any], Any], it: Any) -> Any:
    """The first loader's batches, by the spells of ``Ceilings``; the script ends with the last of them."""
    ceilings.name = ceilings.name or metrics.name
    if ceilings.name != metrics.name:
        return original(it)
    settings = metrics.settings
    ahead = int(settings.get("num_workers") or 0) * int(settings.get("prefetch_factor") or 1)
    batch = ceilings.next(lambda: original(it), ahead)
    if "loader" in ceilings.found or batch is None:
        raise Enough
    return batch
