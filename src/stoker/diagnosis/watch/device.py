"""Watches the device: its time without data, and copies between it and the host. Never waits for the device itself.

*Gaps* (starved time): an event on the stream when ``next()`` begins, and one when it returns::

    host     step: launches kernels | next() waits ............ | step
    stream   kernels ... kernels, event A                         event B, kernels
    device   kernels ......... A passed (idle ................) B passed

The device passes A when it has finished all launched work. Between A and B it is idle for lack of data. If kernels are
still queued when B is recorded, it passes both at once (CUDA C++ Programming Guide, "Events").

*Crossings*: in 8 of every 512 steps, calls that copy between host and device or wait for the device are timed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

import torch

from ...core.metrics import LoaderMetrics
from ...core.patches import Patches
from ...loader.describe import made_at

PAIRS = 64  # most pairs of events in flight; beyond that none are added
PERIOD_S = 1e-3  # seconds between two measured gaps: an event costs a few microseconds
FIRST = 8  # steps before calls are first timed
EVERY = 512  # steps from the start of one timed burst to the next
TIMED_STEPS = 8  # steps in a timed burst
SYNCS = ("item", "tolist", "cpu", "numpy")
_now = time.perf_counter


class Gaps:
    """Events around ``next()``, on the consumer's stream."""

    def __init__(self, metrics: LoaderMetrics, make: Callable[[], torch.cuda.Event]) -> None:
        self._metrics, self._make = metrics, make
        self._flying: deque[tuple[torch.cuda.Event, torch.cuda.Event, float]] = deque()
        self._entry: torch.cuda.Event | None = None
        self._last = 0.0

    def enter(self, now: float) -> None:
        """``next()`` begins."""
        while self._flying and self._flying[0][1].query():
            first, second, waited = self._flying.popleft()
            m = self._metrics
            m.gaps += 1
            m.gap_s += min(waited, first.elapsed_time(second) / 1e3)
            m.gap_wait_s += waited
        self._entry = None
        if now - self._last >= PERIOD_S and len(self._flying) < PAIRS:
            self._last = now
            self._entry = self._make()
            self._entry.record()

    def leave(self, waited: float) -> None:
        """``next()`` returns, after a wait of ``waited`` seconds."""
        entry, self._entry = self._entry, None
        if entry is not None:
            end = self._make()
            end.record()
            self._flying.append((entry, end, waited))


class Crossings:
    """Times copies to the device (``Tensor.to``, ``.cuda``, ``.copy_``) and calls that wait for it, in occasional
    bursts of steps.

    Kinds of calls: ``pageable`` copies from memory that is not page-locked, so the driver copies twice and the call
    waits. ``blocking`` copies page-locked memory without ``non_blocking``, ``free`` with it. ``sync`` makes the host
    wait for the device."""

    def __init__(self, metrics: LoaderMetrics, device: str = "cuda") -> None:
        self._metrics, self._device = metrics, device
        self._steps = 0

    def step(self, seconds: float) -> None:
        """A step has ended, after ``seconds`` seconds."""
        self._steps += 1
        since = (self._steps - FIRST) % EVERY
        if self in _timing:
            self._metrics.crossing_steps += 1
            self._metrics.crossing_s += seconds
        if self._steps >= FIRST and since == 0:
            self.begin()
        elif since >= TIMED_STEPS:
            self.end()

    def begin(self) -> None:
        if not _timing:
            for name in ("to", "cuda", "copy_", *SYNCS):
                _patches.put(torch.Tensor, name, functools.partial(_timed, name))
            _patches.put(torch.cuda, "synchronize", functools.partial(_timed, "synchronize"))
        _timing.append(self)

    def end(self) -> None:
        if self in _timing:
            _timing.remove(self)
            if not _timing:
                _patches.undo()

    def kind(self, name: str, source: object, out: object, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Classifies a call by the kinds listed in the class; "" for other calls. ``source`` is the tensor that the
        call copies or reads."""
        if name == "synchronize":
            return "sync"
        if not isinstance(source, torch.Tensor):
            return ""
        at, to = source.device.type, out.device.type if isinstance(out, torch.Tensor) else ""
        if at == self._device:
            waits = name in SYNCS or (to == "cpu" and not kwargs.get("non_blocking"))
            return "sync" if waits else ""
        if name in SYNCS or at != "cpu" or to != self._device:
            return ""
        if not source.is_pinned():
            return "pageable"
        # Tensor.to(device, dtype, non_blocking) and .copy_(source, non_blocking): non_blocking may be positional.
        free = kwargs.get("non_blocking") or any(a is True for a in args)
        return "free" if free else "blocking"

    def add(self, kind: str, frame: FrameType, seconds: float, size: int) -> None:
        entry = self._metrics.crossings.setdefault(f"{kind} {made_at(frame)}", [0, 0.0, 0])
        entry[0] += 1
        entry[1] += seconds
        entry[2] += size


# Loaders iterated in lockstep are timed at the same time: torch's methods are replaced once for all of them.
_timing: list[Crossings] = []
_patches = Patches()


def _timed(name: str, original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> object:
        began = _now()
        out = original(*args, **kwargs)
        if _timing:
            took, frame = _now() - began, sys._getframe(1)
            source = args[1] if name == "copy_" and len(args) > 1 else args[0] if args else None
            for crossings in list(_timing):
                kind = crossings.kind(name, source, out, args[1:], kwargs)
                if kind:
                    crossings.add(kind, frame, took, getattr(source, "nbytes", 0))
        return out

    return call


class DeviceWatch:
    """Gaps and crossings of one loader, in a script that uses CUDA."""

    def __init__(self, metrics: LoaderMetrics) -> None:
        self._metrics = metrics
        self._gaps = Gaps(metrics, lambda: torch.cuda.Event(enable_timing=True))
        self._crossings = Crossings(metrics)
        self.leave = self._gaps.leave

    def enter(self, now: float, stepped: float) -> None:
        """``next()`` begins, after a step of ``stepped`` seconds."""
        self._crossings.step(stepped)
        self._gaps.enter(now)

    def collect(self, final: bool) -> None:
        """Updates the loader's metrics. If ``final``, also unwraps torch's methods."""
        if final:
            self._crossings.end()
        with contextlib.suppress(Exception):  # torch before 2.8 has no such counter
            self._metrics.pinned_bytes = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
