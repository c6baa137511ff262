"""Samples memory, swap and GPUs of the whole machine twice a second while a command runs."""

from __future__ import annotations

import threading
import time
from collections import deque

import psutil

from . import resources
from .gpus import Nvml
from .types import JsonObject

SAMPLE_S = 0.5
STALL_SPAN_S = 10.0  # window over which stalls for memory are added up


class GpuUse:
    """The mean utilisation of a GPU from its first use to its last: without startup and shutdown of the script."""

    def __init__(self) -> None:
        self.share = 0.0
        self._sum = 0.0
        self._count = 0

    def add(self, per_cent: float) -> None:
        self._sum += per_cent
        self._count += bool(self._sum)
        if per_cent:
            self.share = round(self._sum / self._count / 100, 3)


class SystemMonitor:
    """Samples the machine in a thread until stopped."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._swapped_at_start = _swapped()
        self._stalls: deque[tuple[float, int]] = deque()
        self._stalled = 0.0
        self._available = resources.memory_available()
        self._shm = resources.shm_free()
        self._gpus = Nvml()
        self._uses: list[GpuUse] = []
        self._sample_stalls()
        self._thread = threading.Thread(target=self._run, name="stoker_monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        self._sample_stalls()
        self._available = min(self._available, resources.memory_available())
        shm = resources.shm_free()
        self._shm = shm if self._shm is None or shm is None else min(self._shm, shm)
        busy = self._gpus.busy()
        self._uses = self._uses or [GpuUse() for _ in busy]
        for use, per_cent in zip(self._uses, busy, strict=False):
            use.add(per_cent)

    def _sample_stalls(self) -> None:
        """Updates the worst share of stalled time. The kernel's own ten-second average would include the time before
        this monitor."""
        now, total = time.monotonic(), resources.memory_stalled()
        if total is None:
            return
        self._stalls.append((now, total))
        while now - self._stalls[0][0] > STALL_SPAN_S:
            self._stalls.popleft()
        began, total_then = self._stalls[0]
        self._stalled = max(self._stalled, (total - total_then) / 1e6 / max(STALL_SPAN_S, now - began))

    def stop(self) -> JsonObject:
        """Ends sampling and returns the results.

        ``memory_stalled_max`` is the share of the worst ten seconds in which some task of this cgroup waited for memory
        (of the machine, if the kernel does not count by cgroup). ``swapped`` (in and out), ``memory_available_min`` and
        ``shm_free_min`` are bytes. ``gpu_busy`` is each GPU's mean utilisation, 0 to 1, from its first use to its last;
        empty without NVML."""
        self._stop.set()
        self._thread.join()
        self._gpus.close()
        return {
            "memory_stalled_max": round(self._stalled, 3),
            "swapped": _swapped() - self._swapped_at_start,
            "memory_available_min": self._available,
            "shm_free_min": self._shm,
            "gpu_busy": [use.share for use in self._uses],
        }


def _swapped() -> int:
    swap = psutil.swap_memory()
    return int(swap.sin + swap.sout)
