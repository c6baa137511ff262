"""What the watch knows about the loaders of one process, and how it reports that to ``stoker run``."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable

import torch

from ...core import private_sockets, resources
from ...core.metrics import LoaderMetrics
from ...core.ranks import rank_and_ranks
from ...core.types import JsonObject, LoaderLike
from ...loader.describe import name_of, settings_of
from ...loader.loader_state import state_of
from ...workers.can_start import why_not
from .clock import Clock
from .device import DeviceWatch
from .shared_counters import LIVE, Live, WorkerTimes

FILLS = 0.05  # of its samples; a cache that grew by less in an epoch counts as full
NOTES = 240  # most points of a loader's ``over_time``; beyond that every other one is dropped
SEND_S = 1.0  # seconds between two snapshots of a process
END_S = 1.0  # seconds that the last snapshot may wait for ``stoker run``


class ProcessWatch:
    """Watches the loaders of one process."""

    def __init__(self, max_steps: int | None = None) -> None:
        self.max_steps = max_steps  # end the script after this many batches; None: never
        self.on = True
        self.listened = "STOKER_RUN" in os.environ
        self.applied: dict[str, JsonObject] = {}
        self._socket: socket.socket | None = None
        self._unsent = b""  # rest of the last snapshot
        self._sending = threading.Lock()
        self._steps = 0
        self._sent = 0.0
        self._born = time.perf_counter()
        self._least_left: dict[str, int] = {}
        self._place = 0, 1  # rank, world size
        self._clocks: weakref.WeakSet[Clock] = weakref.WeakSet()
        self._cached: dict[str, int] = {}  # samples in a loader's cache at its last restart
        self.apply_nothing()
        self.forget()

    def apply_nothing(self) -> None:
        """Leaves loaders as they are from now on; ``patch`` replaces these attributes for ``--apply``."""
        self.apply = False  # the script's loaders get stoker's engine and measured settings
        self.refresh: Callable[[], None] = lambda: None  # brings ``applied`` up to date
        self.made: Callable[[LoaderLike], None] = lambda loader: None  # called once a loader is created
        self.around: Callable[[LoaderLike], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def forget(self) -> None:
        self.loaders: dict[str, LoaderMetrics] = {}
        self.bypassed: dict[str, tuple[str, str]] = {}  # by loader: its class, and why it does not use stoker's engine
        self._live = Live()
        self._clear()

    def _clear(self) -> None:
        self._alive: dict[str, weakref.WeakValueDictionary[int, LoaderLike]] = {}  # by name: loaders, by ``id()``
        self._times: dict[str, WorkerTimes] = {}
        self._devices: dict[str, DeviceWatch] = {}
        self._noted: dict[str, tuple[float, float, float, int]] = {}

    def rest(self) -> None:
        """Stops sampling this process's own tasks."""
        for times in self._times.values():
            times.end()

    def metrics_of(self, loader: LoaderLike) -> LoaderMetrics:
        """Returns the metrics of the line that created this loader; loaders created by one line share them."""
        state = state_of(loader)
        name = state.name = name_of(loader)
        new = name not in self.loaders
        metrics = self.loaders.setdefault(name, LoaderMetrics(name))
        alive = self._alive.setdefault(name, weakref.WeakValueDictionary())
        if alive.get(id(loader)) is not loader:
            alive[id(loader)] = loader
            metrics.made, metrics.at_once = metrics.made + 1, max(metrics.at_once, len(alive))
        state.metrics = metrics
        metrics.settings.update(settings_of(loader))
        if not metrics.settings["num_workers"] and "no_workers" not in metrics.settings:
            metrics.settings["no_workers"] = why_not(loader, threads=True)
        if new:
            self.send()  # before its first batch: from then on the live rows show its progress
        return metrics

    def times_of(self, metrics: LoaderMetrics) -> WorkerTimes:
        """Returns the table to which this loader's fetching processes write."""
        if metrics.name not in self._times:
            self._times[metrics.name] = WorkerTimes(metrics)
        return self._times[metrics.name]

    def device_of(self, metrics: LoaderMetrics) -> DeviceWatch | None:
        """Returns the device watch for this loader's consumer; None until the script uses CUDA."""
        if metrics.name not in self._devices:
            if not torch.cuda.is_initialized():
                return None
            self._devices[metrics.name] = DeviceWatch(metrics)
        return self._devices[metrics.name]

    def clock(self, metrics: LoaderMetrics, waited_s: float, began: float) -> Clock:
        """Returns a clock for a new iterator of this loader."""
        self._restart(metrics)
        made = Clock(metrics, self.row(metrics), self.delivered, self.device_of, waited_s, began)
        self._clocks.add(made)
        return made

    def _restart(self, metrics: LoaderMetrics) -> None:
        """Restarts the task counters after an epoch that filled a cache, because later tasks differ."""
        self.refresh()
        cache = (self.applied.get(metrics.name) or {}).get("cache") or {}
        filled, before = int(cache.get("filled") or 0), self._cached.get(metrics.name, 0)
        if metrics.epochs and filled - before > FILLS * int(cache.get("samples") or 0):
            self._cached[metrics.name] = filled
            for clock in list(self._clocks):
                clock.settle()
            self.times_of(metrics).restart()
            metrics.filled_epochs = metrics.epochs

    def delivered(self, batches: int, now: float) -> None:
        """``batches`` more batches were delivered."""
        self._steps += batches
        if now - self._sent >= SEND_S:
            self._sent = now
            self.send()

    def row(self, metrics: LoaderMetrics) -> memoryview[float]:
        return self._live.row(list(self.loaders).index(metrics.name))

    def live(self) -> dict[str, dict[str, float]]:
        """Returns each loader's progress, keyed by ``LIVE``. May be called from a thread other than the loop's."""
        names = list(self.loaders)
        return {name: dict(zip(LIVE, self._live.row(i), strict=True)) for i, name in enumerate(names)}

    def enough(self) -> bool:
        """Returns whether ``max_steps`` batches were delivered."""
        delivered = self._steps + sum(len(clock.times) // 2 for clock in self._clocks)
        return self.max_steps is not None and delivered >= self.max_steps

    def snapshot(self, final: bool) -> JsonObject:
        """Returns all that was observed so far, with the fields of ``report.merge.Snapshot``."""
        self.refresh()
        for clock in list(self._clocks):
            clock.settle()
        for times in self._times.values():
            times.collect()
        for metrics in self.loaders.values():
            self._note_rate(metrics)
        for device in self._devices.values():
            device.collect(final)
        self._place = max(self._place, rank_and_ranks(), key=lambda place: place[1])  # its process group may be gone
        return {
            "pid": os.getpid(),
            "rank": self._place[0],
            "world": self._place[1],
            "final": final,
            "cores": resources.cores_granted(),
            **self._left(),
            "cuda": bool(torch.cuda.is_available() and torch.cuda.is_initialized()),
            "cuda_visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": torch.get_num_threads(),
            "loaders": [vars(m) for m in self.loaders.values()],
            "applied": self.applied,
            "bypassing": [{"name": n, "class": c, "reason": why} for n, (c, why) in self.bypassed.items() if why],
        }

    def _left(self) -> dict[str, int]:
        """Returns the lowest limits and free amounts seen. The container may differ from ``stoker run``'s."""
        now = {
            "shm_free_min": resources.shm_free(),
            "memory": resources.memory_granted(),
            "memory_available_min": resources.memory_available(),
        }
        self._least_left |= {key: min(n, self._least_left.get(key, n)) for key, n in now.items() if n is not None}
        return self._least_left

    def _note_rate(self, metrics: LoaderMetrics) -> None:
        """Records the share of waiting and the rate since the last record, at least half of ``SEND_S`` ago."""
        now = time.perf_counter()
        before, wait, step, samples = self._noted.get(metrics.name, (self._born, 0.0, 0.0, 0))
        took = metrics.wait_s - wait + metrics.step_s - step
        if now - before < SEND_S / 2 or took <= 0:
            return
        self._noted[metrics.name] = (now, metrics.wait_s, metrics.step_s, metrics.samples)
        point = [now - self._born, (metrics.wait_s - wait) / took, (metrics.samples - samples) / took]
        metrics.over_time.append([round(x, 3) for x in point])
        if len(metrics.over_time) > NOTES:
            del metrics.over_time[1:-1:2]

    def send(self, final: bool = False) -> None:
        """Sends a snapshot to ``stoker run``, if it started this process.

        Does not block, except if ``final``: bytes that the socket does not accept go out with the next call, which
        makes a new snapshot only once they are sent."""
        if not self.loaders or not self.listened or self._live.fd < 0 or not self._sending.acquire(blocking=False):
            return
        try:
            until = time.monotonic() + END_S * final
            if self._socket is None:
                self._socket, self._unsent = self._connected(until), b""
            if self._write(until):
                self._unsent = json.dumps(self.snapshot(final), default=str).encode() + b"\n"
                self._write(until)
        except (OSError, KeyError):  # the next call tries to connect again
            if self._socket is not None:
                self._socket.close()
            self._socket = None
        finally:
            self._sending.release()

    def _connected(self, until: float) -> socket.socket:
        """Connects to ``stoker run``. Raises OSError if that fails now, KeyError if none listens."""
        folder, wait_s = os.environ["STOKER_RUN"], max(0.0, until - time.monotonic())
        connection = private_sockets.connect(folder, private_sockets.REPORTS, wait_s)
        try:
            socket.send_fds(connection, [b"\n"], [self._live.fd])
        except BaseException:
            connection.close()
            raise
        return connection

    def _write(self, until: float) -> bool:
        """Writes the unsent bytes and returns whether all are sent. Stops waiting at ``until``."""
        assert self._socket is not None
        while self._unsent:
            self._socket.settimeout(max(0.0, until - time.monotonic()))
            try:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except (BlockingIOError, TimeoutError):
                return False
            self._unsent = self._unsent[sent:]
        return True

    def forked(self) -> None:
        """Resets the watch in a forked child, which reports for itself and has seen nothing yet."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket, self._steps, self._sent, self._sending = None, 0, 0.0, threading.Lock()
        self._live.close()
        self._live = Live()
        for metrics in self.loaders.values():
            metrics.__init__(metrics.name, settings=metrics.settings)  # type: ignore[misc]
        for clock in list(self._clocks):
            clock.forked(self.row(clock.metrics))
        # Destroying a CUDA event in a forked child aborts it (SIGABRT), so the parent's events are leaked on purpose.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._devices))
        self._clear()
