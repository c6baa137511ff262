"""What is known of the loaders of one process, and how it gets to ``stoker run``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...core import resources
from ...core.metrics import LoaderMetrics
from ...loader.describe import called, count, settings_of
from ...loader.loader_state import state_of
from .ceilings import Ceilings
from .clock import Clock
from .device import DeviceWatch
from .shared_counters import Live, Stages

FILLS = 0.05  # of its samples; a cache that grew by less in an epoch is full
POINTS = 64  # of memory over time
NOTES = 240  # of a loader over time; after that every other one is dropped
BEAT_S = 1.0  # between two reports of a process


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
        self.refresh: Callable[[], None] | None = None  # brings ``applied`` up to date
        self.around: Callable[[Any], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
        self.reached: dict[str, tuple[str, str]] = {}  # by loader, its class, and why stoker's engine does not reach it
        self._alive: dict[str, weakref.WeakValueDictionary[int, Any]] = {}  # loaders, by their id
        self._stages: dict[str, Stages] = {}
        self._devices: dict[str, DeviceWatch] = {}
        self._clocks: weakref.WeakSet[Clock] = weakref.WeakSet()
        self.on = True
        self.listened = "STOKER_RUN" in os.environ
        self._steps = 0
        self._beat = 0.0
        self._born = time.perf_counter()
        self._socket: socket.socket | None = None
        self._live = Live()
        self._left: dict[str, int] = {}
        self._noted: dict[str, tuple[float, float, float, int]] = {}
        self._filled: dict[str, int] = {}  # samples that were in a loader's cache at its last restart

    def rest(self) -> None:
        """Nobody looks any more at what this process does itself."""
        for stages in self._stages.values():
            stages.end()

    def forget(self) -> None:
        """Nothing was seen."""
        self.loaders, self._stages, self._devices, self._live = {}, {}, {}, Live()
        self._noted, self._alive, self.reached = {}, {}, {}

    def metrics_of(self, loader: Any) -> LoaderMetrics:
        """The numbers of the line that made this loader; loaders made by one line share them."""
        name = loader.__dict__.setdefault("_stoker_name", called(loader))
        new = name not in self.loaders
        metrics = self.loaders.setdefault(name, LoaderMetrics(name))
        if new:
            self.send()  # before its first batch: from here on the live rows say how far it came
        alive = self._alive.setdefault(name, weakref.WeakValueDictionary())
        if alive.get(id(loader)) is not loader:
            alive[id(loader)] = loader
            metrics.made, metrics.at_once = metrics.made + 1, max(metrics.at_once, len(alive))
        state = state_of(loader)
        state.metrics = metrics
        metrics.settings.update(settings_of(loader))
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

    def clock(self, metrics: LoaderMetrics, fetcher: Any) -> Clock:
        """For a new iterator of this loader; with its fetcher, where it has no workers."""
        self._restart(metrics)
        bounds = self.max_steps is not None or self.ceilings is not None
        made = Clock(metrics, self.row(metrics), bounds, self.moved, self.device_of, fetcher)
        self._clocks.add(made)
        return made

    def _restart(self, metrics: LoaderMetrics) -> None:
        """After an epoch in which a cache was filled: the workers' tasks will be others from now on."""
        if self.refresh is not None:
            self.refresh()
        cache = (self.applied.get(metrics.name) or {}).get("cache") or {}
        filled, before = int(cache.get("filled") or 0), self._filled.get(metrics.name, 0)
        if metrics.epochs and filled - before > FILLS * int(cache.get("samples") or 0):
            self._filled[metrics.name] = filled
            for clock in list(self._clocks):
                clock.settle()
            self.stages_of(metrics.name, metrics).restart()
            metrics.filled_epochs = metrics.epochs

    def moved(self, batches: int, now: float) -> None:
        """So many batches were delivered."""
        self._steps += batches
        if now - self._beat < BEAT_S:
            return
        self._beat = now
        self.send()

    def row(self, metrics: LoaderMetrics) -> Any:
        """The live row of a loader."""
        return self._live.row(list(self.loaders).index(metrics.name))

    def enough(self) -> bool:
        return self.max_steps is not None and self._steps >= self.max_steps

    def snapshot(self, final: bool) -> dict[str, Any]:
        """What was seen so far, for ``report.schema``."""
        if self.refresh is not None:
            self.refresh()
        for clock in list(self._clocks):
            clock.settle()
        for name, stages in self._stages.items():
            stages.collect()
            self._weigh(self.loaders[name])
        for metrics in self.loaders.values():
            self._note(metrics)
        for device in self._devices.values():
            device.collect(final)
        return {
            "pid": os.getpid(),
            "argv": sys.argv,
            "rank": int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else 0,
            "world": int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("WORLD_SIZE", "1").isdigit() else 1,
            "final": final,
            "cores": resources.cores_granted(),
            **self._least_left(),
            "cuda": bool(torch.cuda.is_available() and torch.cuda.is_initialized()),
            "cuda_visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": torch.get_num_threads(),
            "loaders": [vars(m) for m in self.loaders.values()],
            "applied": self.applied,
            "bypassing": [{"name": n, "class": c, "reason": why} for n, (c, why) in self.reached.items() if why],
            "ceilings": None if self.ceilings is None else {"name": self.ceilings.name, **self.ceilings.found},
        }

    def _least_left(self) -> dict[str, int]:
        """The least that this process was granted and had left; its container may be another than that of who started
        it."""
        now = {
            "shm_free_min": resources.shm_free(),
            "memory": resources.memory_granted(),
            "memory_available_min": resources.memory_available(),
        }
        self._left = {key: min(n, self._left.get(key, n)) for key, n in now.items() if n is not None}
        return self._left

    def _note(self, metrics: LoaderMetrics) -> None:
        """Notes how the last second was."""
        now = time.perf_counter()
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
        series.append([round(time.perf_counter() - self._born, 1), weight])
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
        for clock in list(self._clocks):
            clock.forked(self.row(clock.metrics))
        self._stages, self._devices, self._noted, self._alive = {}, {}, {}, {}
