"""Times one iterator: when the consumer asks for each batch and when it gets it, and hence waits, steps and epochs.

::

    consumer   --step--> next()                returns --step--> next() ...
                           |asked: wait begins    |came: step begins

The two times of each batch are appended to ``times``. ``settle`` processes many of them at once, so that at a thousand
steps a second the watch costs about 1 % of the loop's time. All of it runs in the consumer's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...core.histogram import Histogram
from ...core.metrics import EPOCHS, LoaderMetrics
from .device import DeviceWatch

MOST_TIMES = 64  # numbers in ``times``, two per batch
MOST_S = 0.02  # seconds between two calls of ``settle``: a killed process loses about this much
_now = time.perf_counter
_cpu = time.process_time


class Clock:
    """The clock of one iterator. The consumer called ``iter()`` at ``began`` and waited ``waited_s`` for it; other time
    since then was spent on stoker's measurements."""

    def __init__(
        self,
        metrics: LoaderMetrics,
        row: memoryview[float],
        on_batches: Callable[[int, float], None],
        find_device: Callable[[LoaderMetrics], DeviceWatch | None],
        waited_s: float,
        began: float,
    ) -> None:
        self.metrics = metrics  # the loader's numbers
        self.size: int = metrics.settings.get("batch_size") or 1  # assumed for a batch whose size is unknown
        self.inside = False  # ``next()`` runs; a ``next()`` inside another one is not timed
        self.times: list[float] = []  # of batches not settled yet: asked, came, asked, came, ...
        self.samples = 0  # in those batches
        self._row = row  # the loader's row in shared memory (``shared_counters.Live``)
        self._on_batches = on_batches  # called after ``settle``, with the number of batches and the time
        self._find_device = find_device  # returns the watch on the device, once the script uses one
        self._device: DeviceWatch | None = None
        self._epoch = [0.0] * 7  # batches, wait_s, step_s, first_wait_s, loop_s, samples, first_step_s
        self._began = began  # of the epoch
        self._made = _now()
        self._came = 0.0  # when the last settled batch came; 0.0 if no step follows it
        self._cpu = 0.0  # the process's CPU time when the last batch came
        self._settled = 0.0  # when ``times`` were settled last
        if len(metrics.by_epoch) < EPOCHS:
            metrics.by_epoch.append(self._epoch)
        if metrics.left_at:
            metrics.between_s += max(0.0, self._made - waited_s - metrics.left_at)
            metrics.left_at = 0.0
        metrics.epochs += 1
        metrics.wait_s += waited_s
        metrics.first_wait_s += waited_s
        self._epoch[1] = self._epoch[3] = waited_s

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copied or unpickled iterator has no clock

    def before(self, now: float) -> None:
        """``next()`` begins."""
        came = self.times[-1] if self.times else self._came
        if came:
            self.metrics.step_cpu_s += _cpu() - self._cpu
        if self._device is not None:
            self._device.enter(now, now - came if came else 0.0)

    def after(self, asked: float, came: float, samples: int) -> None:
        """``next()`` returned a batch."""
        self.times += (asked, came)
        self.samples += samples
        if self._device is not None:
            self._device.leave(came - asked)
        if len(self.times) >= MOST_TIMES or came - self._settled > MOST_S:
            self._device = self._device or self._find_device(self.metrics)
            self.settle()
            self._came = _now()
        self._cpu = _cpu()

    def ended(self, asked: float, now: float) -> None:
        """``next()`` raised StopIteration. Counts this last wait and the step before it."""
        self.settle()
        m = self.metrics
        if self._came:
            step_s = asked - self._came
            m.step_s += step_s
            self._epoch[2] += step_s
            Histogram(m.step_bins).add([step_s])
        m.wait_s += now - asked
        m.ended, m.left_at = m.ended + 1, 0.0
        self._loop_until(now)
        self._write_row()
        self.failed()

    def failed(self) -> None:
        """``next()`` raised, so the time that follows is not a step."""
        self.settle()
        self._came = 0.0

    def forked(self, row: memoryview[float]) -> None:
        """Restarts the clock in a forked child, whose counts begin at zero."""
        self._row, self.times, self.samples = row, [], 0
        self._device = None  # CUDA cannot be used here

    def settle(self) -> None:
        times, self.times = self.times, []
        samples, self.samples = self.samples, 0
        if not times:
            return
        m, epoch = self.metrics, self._epoch
        asked, came = times[::2], [self._came, *times[1::2]]
        waits = [end - begin for begin, end in zip(asked, came[1:], strict=True)]
        steps = [end - begin for begin, end in zip(came[:-1], asked, strict=True) if begin]
        count, wait_s, step_s = len(waits), sum(waits), sum(steps)
        m.wait_s += wait_s
        m.step_s += step_s
        m.batches += count
        m.samples += samples
        if steps and not epoch[2]:
            epoch[6] = steps[0]
        epoch[0] += count
        epoch[1] += wait_s
        epoch[2] += step_s
        epoch[5] += samples
        if epoch[0] == count:  # the epoch's first batches
            self._began += max(0.0, asked[0] - self._made)  # the iterator may be created long before its first use
            m.first_wait_s += waits[0]
            epoch[3] += waits[0]
            del waits[0]
        Histogram(m.step_bins).add(steps)
        Histogram(m.wait_bins).add(waits)
        self._came = self._settled = came[-1]
        m.left_at = came[-1] if epoch[0] == 1 else 0.0
        self._loop_until(came[-1])
        self._write_row()
        self._on_batches(count, came[-1])

    def _loop_until(self, now: float) -> None:
        """Extends the epoch's wall-clock time until ``now``."""
        self.metrics.loop_s += now - self._began - self._epoch[4]
        self._epoch[4] = now - self._began

    def _write_row(self) -> None:
        m, row = self.metrics, self._row
        row[0], row[1], row[2] = m.wait_s, m.first_wait_s, m.step_s
        row[3], row[4], row[5], row[6] = m.batches, m.samples, m.epochs, m.ended

    def __del__(self) -> None:
        # The iterator may have been abandoned mid-epoch. This can run in any thread, so it must not send.
        self._on_batches = lambda batches, now: None
        self.settle()
        if self.metrics.left_at and self._epoch[0] == 1:
            self.metrics.left_at = _now()  # shutting its workers down is not part of a step
