"""What the whole machine did while a command ran: cores, pressure, swap, memory; sampled twice a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import psutil

from . import resources
from .gpus import Nvml
from .types import JsonObject

SAMPLE_S = 0.5
MAX_POINTS = 240  # of the time line; beyond, every other one is dropped, and sampling slows down
STALL_SPAN_S = 10.0  # over which stalls for memory are added up


class SystemMonitor:
    """Samples the machine in a thread until it is stopped.

    Example:
        >>> monitor = SystemMonitor()
        >>> sorted(monitor.stop())[:3]
        ['cores_busy', 'gpu_busy', 'memory_available_min']
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._cores_at_start = _core_times()
        self._cores_before = self._cores_at_start
        self._swapped_at_start = _swapped()
        self._pressure: dict[str, float] = {}
        self._stalls: deque[tuple[float, int]] = deque()
        self._stalled = 0.0
        self._available = resources.memory_available()
        self._shm = resources.shm_free()
        self._points: list[list[float]] = []
        self._gpus = Nvml()
        self._gpu_points: list[list[float]] = []
        self._began = time.monotonic()
        self._sample_s = SAMPLE_S
        self._sample_stalls()
        self._thread = threading.Thread(target=self._run, name="stoker_monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._sample_s):
            self._sample()

    def _sample(self) -> None:
        cores = _core_times()
        busy = _busy(self._cores_before, cores)
        self._cores_before = cores
        for resource, share in resources.pressure().items():
            self._pressure[resource] = max(self._pressure.get(resource, 0.0), share)
        self._sample_stalls()
        available = resources.memory_available()
        self._available = min(self._available, available)
        shm = resources.shm_free()
        self._shm = shm if self._shm is None or shm is None else min(self._shm, shm)
        self._points.append([round(time.monotonic() - self._began, 2), round(sum(busy), 2), available])
        gpus = self._gpus.busy()
        if gpus:
            self._gpu_points.append(gpus)
        if len(self._points) > MAX_POINTS:
            del self._points[1::2]
            del self._gpu_points[1::2]
            self._sample_s *= 2

    def _sample_stalls(self) -> None:
        """The kernel's own average over ten seconds is not used: it begins with what was before this monitor."""
        now, total = time.monotonic(), resources.memory_stalled()
        if total is None:
            return
        self._stalls.append((now, total))
        while now - self._stalls[0][0] > max(STALL_SPAN_S, self._sample_s):
            self._stalls.popleft()
        began, total_then = self._stalls[0]
        self._stalled = max(self._stalled, (total - total_then) / 1e6 / max(STALL_SPAN_S, now - began))

    def stop(self) -> JsonObject:
        """Ends sampling.

        Returns:
            ``cores_busy``: share of each core, over all the time. ``pressure_max``: PSI, "some avg10", per cent.
            ``memory_stalled_max``: share of the worst ten seconds in which some task of this cgroup waited for memory;
            of the machine, where the kernel does not count by cgroup. ``swapped``: bytes, in and out.
            ``memory_available_min``, ``shm_free_min``: bytes. ``over_time``: ``[s, cores busy, bytes available]``.
            ``gpu_busy``: share of each GPU's time, from its first use to its last; empty without NVML.
        """
        self._stop.set()
        self._thread.join()
        self._gpus.close()
        return {
            "cores_busy": [round(b, 3) for b in _busy(self._cores_at_start, _core_times())],
            "pressure_max": self._pressure,
            "memory_stalled_max": round(self._stalled, 3),
            "swapped": _swapped() - self._swapped_at_start,
            "memory_available_min": self._available,
            "shm_free_min": self._shm,
            "over_time": self._points,
            "gpu_busy": [used_share(of) for of in zip(*self._gpu_points, strict=True)],
        }


def used_share(percents: Sequence[float]) -> float:
    """The mean from the first use to the last: before that a script starts, and after that it ends.

    Example:
        >>> used_share([0, 0, 40, 0, 80, 0])
        0.4
    """
    used = [i for i, p in enumerate(percents) if p]
    between = percents[used[0] : used[-1] + 1] if used else []
    return round(sum(between) / len(between) / 100, 3) if between else 0.0


def _core_times() -> list[tuple[float, float]]:
    """Seconds that each core was busy, and all of them."""
    times = psutil.cpu_times(percpu=True)
    totals = [sum(t[:8]) for t in times]  # guest time, which follows, is in user time already
    return [(total - t.idle - getattr(t, "iowait", 0.0), total) for t, total in zip(times, totals, strict=True)]


def _busy(before: Sequence[tuple[float, float]], now: Sequence[tuple[float, float]]) -> list[float]:
    pairs = zip(before, now, strict=False)
    return [
        (busy - busy_before) / max(1e-2, total - total_before) for (busy_before, total_before), (busy, total) in pairs
    ]


def _swapped() -> int:
    swap = psutil.swap_memory()
    return int(swap.sin + swap.sout)
