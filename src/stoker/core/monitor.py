"""What the whole machine did while a command ran: cores, pressure, swap, memory. Seen from outside, twice a second."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import resources
from .gpus import Nvml

EVERY_S = 0.5
POINTS = 240  # of the time line; after that every other one is dropped
SPAN_S = 10.0  # over which stalls for memory are seen together


class SystemMonitor:
    """Looks until it is told to stop.

    Example:
        >>> a = Ambient()
        >>> sorted(a.stop())[:3]
        ['cores_busy', 'memory_available_min', 'memory_stalled_max']
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._cores = self._before = _cores()
        self._swapped = _swapped()
        self._pressure: dict[str, float] = {}
        self._stalls: deque[tuple[float, int]] = deque()
        self._stalled = 0.0
        self._available = resources.memory_available()
        self._shm = resources.shm_free()
        self._line: list[list[float]] = []
        self._gpus = Nvml()
        self._gpu_line: list[list[float]] = []
        self._began = time.monotonic()
        self._every = EVERY_S
        self._stall()
        self._thread = threading.Thread(target=self._run, name="stoker_ambient", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._look()

    def _look(self) -> None:
        now = _cores()
        busy = _busy(self._before, now)
        self._before = now
        for what, share in resources.pressure().items():
            self._pressure[what] = max(self._pressure.get(what, 0.0), share)
        self._stall()
        available = resources.memory_available()
        self._available = min(self._available, available)
        shm = resources.shm_free()
        self._shm = shm if self._shm is None or shm is None else min(self._shm, shm)
        self._line.append([round(time.monotonic() - self._began, 2), round(sum(busy), 2), available])
        used = self._gpus.busy()
        if used:
            self._gpu_line.append(used)
        if len(self._line) > POINTS:
            del self._line[1::2]
            del self._gpu_line[1::2]
            self._every *= 2

    def _stall(self) -> None:
        """The kernel's own average over ten seconds would still hold what was before this began."""
        now, total = time.monotonic(), resources.memory_stalled()
        if total is None:
            return
        self._stalls.append((now, total))
        while now - self._stalls[0][0] > max(SPAN_S, self._every):
            self._stalls.popleft()
        since = self._stalls[0]
        self._stalled = max(self._stalled, (total - since[1]) / 1e6 / max(SPAN_S, now - since[0]))

    def stop(self) -> dict[str, Any]:
        """What was seen: ``cores_busy`` (share of each core, over all the time), ``pressure_max`` (PSI, "some avg10",
        per cent), ``memory_stalled_max`` (share of the worst ten seconds in which some task of this cgroup, or of the
        machine where the kernel does not count by cgroup, waited for memory), ``swapped`` (bytes, in and out),
        ``memory_available_min`` and ``shm_free_min`` (bytes), ``over_time`` (``[s, cores busy, bytes available]``),
        ``gpu_busy`` (share of each GPU's time, from its first use to its last; empty where NVML does not tell)."""
        self._stop.set()
        self._thread.join()
        self._gpus.close()
        swapped = _swapped()
        return {
            "cores_busy": [round(b, 3) for b in _busy(self._cores, _cores())],
            "pressure_max": self._pressure,
            "memory_stalled_max": round(self._stalled, 3),
            "swapped": swapped - self._swapped,
            "memory_available_min": self._available,
            "shm_free_min": self._shm,
            "over_time": self._line,
            "gpu_busy": [used_share(of) for of in zip(*self._gpu_line, strict=True)],
        }


def used_share(percents: Sequence[float]) -> float:
    """The mean of what lies between the first use and the last: before it a script starts, and after it it ends.

    Example:
        >>> used_share([0, 0, 40, 0, 80, 0])
        0.4
    """
    at = [i for i, p in enumerate(percents) if p]
    between = percents[at[0] : at[-1] + 1] if at else []
    return round(sum(between) / len(between) / 100, 3) if between else 0.0


def _cores() -> list[tuple[int, int]]:
    """Ticks that each core was busy, and all of them (proc(5), /proc/stat)."""
    out = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name != "cpu":
                ticks = [int(f) for f in fields[:8]]
                out.append((sum(ticks) - ticks[3] - ticks[4], sum(ticks)))
    return out


def _busy(before: list[tuple[int, int]], now: list[tuple[int, int]]) -> list[float]:
    return [(b[0] - a[0]) / max(1, b[1] - a[1]) for a, b in zip(before, now, strict=False)]


def _swapped() -> int:
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith(("pswpin ", "pswpout ")):
                total += int(line.split()[1]) * 4096
    return total
