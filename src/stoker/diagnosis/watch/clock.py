"""One iterator's place in its loader's numbers: when each batch was asked for, and when it came.

A loop of a thousand steps a second is to lose less than a hundredth of them to being watched, so most of its batches
only leave two readings of the clock; what follows from them is worked out for sixteen at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...core.metrics import EPOCHS, LoaderMetrics
from .device import DeviceWatch
from .worker_record import add

LONG_S = 2e-3  # a step, of which everything is read each time
MANY = 32  # readings of shorter ones, two each, that are worked out together
OFTEN_S = 0.02  # or those of so long: what a process that is killed may leave out
_now = time.perf_counter
_cpu = time.process_time


class Clock:
    """See the module.

    Args:
        metrics: the loader's numbers.
        row: its live row (``live.Live``).
        bounds: something else is to be done at each batch, so none of them is plain.
        moved: called after every reckoning, with the number of batches and the time.
        find_device: the watch on the device, once the script uses one.
        fetcher: that of an iterator without workers, whose tasks need not be watched one by one when they are short.

    Attributes:
        metrics: the loader's numbers.
        plain: of the next batch only the times are wanted.
        inside: ``next()`` runs; a ``next()`` inside another one is not watched.
        times: of batches that are not reckoned yet: asked for, came.
        samples: in those.
        settled: when they were reckoned last.
        size: the loader's batch size, for batches that do not say theirs.
    """

    __slots__ = (
        "__weakref__",
        "_began",
        "_bounds",
        "_cpu",
        "_device",
        "_epoch",
        "_fetcher",
        "_find_device",
        "_first",
        "_left",
        "_moved",
        "_ready",
        "_resting",
        "_row",
        "_skipped",
        "inside",
        "metrics",
        "plain",
        "samples",
        "settled",
        "size",
        "times",
    )

    def __init__(
        self,
        metrics: LoaderMetrics,
        row: Any,
        bounds: bool,
        moved: Callable[[int, float], None],
        find_device: Callable[[LoaderMetrics], DeviceWatch | None],
        fetcher: Any = None,
    ) -> None:
        self._fetcher = fetcher
        self._resting: Any = None
        self.metrics, self._row, self._bounds, self._moved = metrics, row, bounds, moved
        self._find_device = find_device
        self._device: DeviceWatch | None = None
        self.size = metrics.settings.get("batch_size") or 1
        self._epoch = [0.0] * 6
        self._began = self._ready = _now()
        if len(metrics.by_epoch) < EPOCHS:
            metrics.by_epoch.append(self._epoch)
        self.times: list[float] = []
        self.samples = self._skipped = 0
        self.plain = self.inside = False
        self._first = True
        self._left = self.settled = 0.0
        self._cpu: float | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # whatever it hangs on may be copied or pickled, and then has none

    def started(self, seconds: float, began: float | None = None) -> None:
        """The epoch began, and that took so long.

        Args:
            seconds: that were waited for it.
            began: when; what lies between that and now and is not in ``seconds`` is what stoker measured.
        """
        m = self.metrics
        self._ready = _now()
        self._began = self._ready - seconds if began is None else began
        if m.left_at:
            m.between_s += max(0.0, _now() - seconds - m.left_at)
            m.left_at = 0.0
        m.epochs += 1
        m.wait_s += seconds
        m.first_wait_s += seconds
        self._epoch[1] += seconds
        self._epoch[3] += seconds

    def enter(self, now: float) -> None:
        """``next()`` begins, of a batch that is not plain."""
        stepped = now - self._left if self._left else 0.0
        if self._cpu is not None and stepped:
            # Those that were skipped since the last reading are taken to be like this one, unless it is a long one.
            weight = 1 if stepped > LONG_S else 1 + self._skipped
            self.metrics.step_cpu_s += (_cpu() - self._cpu) * weight
            self._skipped = 0
        if self._device is not None:
            self._device.enter(now, stepped)

    def leave(self) -> None:
        """It returned."""
        came, asked = self.times[-1], self.times[-2]
        stepped = asked - self._left if self._left else LONG_S
        if self._device is not None:
            self._device.leave(came - asked)
        else:
            self._device = self._find_device(self.metrics)
        self.settle()
        self.plain = stepped < LONG_S and self._device is None and not self._bounds
        if self.plain and self._fetcher is not None:
            fetching = self._fetcher.__dict__.get("_stoker_fetching")
            if fetching is not None and fetching.short:
                self._resting = fetching
                fetching.rest(self._fetcher)
        self._cpu = None if self.plain else _cpu()
        self._left = _now()

    def _wake(self) -> None:
        if self._resting is not None:
            self._resting.wake(self._fetcher)
        self._resting, self.plain = None, False

    def ended(self, asked: float, now: float) -> None:
        """There is no more batch: what was waited for it, and the step before it, count."""
        self.settle()
        m = self.metrics
        if self._left:
            self._stepped(asked - self._left)
        m.wait_s += now - asked
        m.ended, m.left_at = m.ended + 1, 0.0
        self._reach(now)
        self._write()
        self.broken()

    def broken(self) -> None:
        """``next()`` raised: what comes after it is no step."""
        self.settle()
        self._wake()
        self._left = 0.0

    def forked(self, row: Any) -> None:
        """In a child, whose numbers begin here."""
        self._row, self.times, self.samples = row, [], 0

    def reckon(self) -> None:
        """Works out a number of plain batches; the next one is looked into."""
        self._skipped += len(self.times) // 2
        self.settle()
        self._wake()
        self._cpu = _cpu()
        self._left = _now()

    def settle(self) -> None:
        """Works out what is not worked out yet."""
        times, self.times = self.times, []
        samples, self.samples = self.samples, 0
        if not times:
            return
        m, epoch, left, waits = self.metrics, self._epoch, self._left, []
        steps: list[float] = []
        for i in range(0, len(times), 2):
            asked, came = times[i], times[i + 1]
            if left:
                steps.append(asked - left)
            waits.append(came - asked)
            left = came
        if self._resting is not None:
            self._resting.took += waits  # which is what fetching took
        count, waited, stepped = len(waits), sum(waits), sum(steps)
        m.wait_s += waited
        m.step_s += stepped
        m.batches += count
        m.samples += samples
        epoch[0] += count
        epoch[1] += waited
        epoch[2] += stepped
        if self._first:
            self._first = False
            self._began += max(0.0, times[0] - self._ready)  # an iterator that was made long before it was asked
            m.first_wait_s += waits[0]
            epoch[3] += waits[0]
            del waits[0]
        epoch[5] += samples
        self._reach(left)
        add(m.step_bins, steps)
        add(m.wait_bins, waits)
        self._left = self.settled = left
        m.left_at = left if epoch[0] == 1 else 0.0
        self._write()
        self._moved(count, left)

    def _reach(self, now: float) -> None:
        """The epoch has lasted until now."""
        self.metrics.loop_s += now - self._began - self._epoch[4]
        self._epoch[4] = now - self._began

    def _stepped(self, seconds: float) -> None:
        self.metrics.step_s += seconds
        self._epoch[2] += seconds
        add(self.metrics.step_bins, [seconds])

    def _write(self) -> None:
        m, row = self.metrics, self._row
        row[0], row[1], row[2] = m.wait_s, m.first_wait_s, m.step_s
        row[3], row[4], row[5] = m.batches, m.samples, m.epochs

    def __del__(self) -> None:
        # Of an iterator that was abandoned in the middle of an epoch. This may run anywhere, so nobody is told.
        self._moved = _nobody
        self.settle()
        if self.metrics.left_at and self._epoch[0] == 1:
            self.metrics.left_at = _now()  # to end its workers was no step


def _nobody(batches: int, now: float) -> None:
    pass
