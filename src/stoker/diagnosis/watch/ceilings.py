"""``stoker run --ceilings``: what the loop could do if its loader were free, and the loader if the steps were.

Three phases of the script's own loop, one after the other::

    loop    the loop as it is
    steps   one batch is delivered again and again, so that only the steps take time
    loader  batches are drawn and dropped, so that only the loader takes time

The script trains on one batch in the second phase and on none in the third, so it ends there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...core.types import Batch

PHASE_S = 2.0
MIN_BATCHES = 5  # of a phase
WARM_UP = 5  # batches before the first phase
_now = time.perf_counter


class Ceilings:
    """The three phases of one loader.

    Args:
        count: returns the number of samples in a batch.

    Attributes:
        found: samples per second by phase, as far as they were measured.
        name: the loader's.
    """

    def __init__(self, count: Callable[[Batch], int]) -> None:
        self.found: dict[str, float] = {}
        self.name: str | None = None
        self._count = count
        self._phase = "loop"
        self._batch: Batch = None
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        """The phase begins now; 0.0: it warms up first."""
        self._began = now
        self._batches = 0
        self._samples = 0

    def next(self, draw: Callable[[], Batch], ahead: int) -> Batch:
        """What the script gets for a batch.

        Args:
            draw: the loader's own next batch; may raise ``StopIteration``.
            ahead: batches that may have been made meanwhile.

        Returns:
            The batch, or None when all is measured.
        """
        if self._phase == "loop":
            if not self._is_over():
                return self._draw(draw)
            self._end_phase("steps")
        if not self._is_over():
            self._add(self._batch)
            return self._batch
        self._end_phase("loader")
        self._measure_loader(draw, ahead)
        return None

    def _is_over(self) -> bool:
        return bool(self._began) and self._batches >= MIN_BATCHES and _now() - self._began >= PHASE_S

    def _end_phase(self, following: str) -> None:
        now = _now()
        self.found[self._phase] = self._samples / (now - self._began)
        self._phase = following
        self._begin(now)

    def _add(self, batch: Batch) -> None:
        self._batches += 1
        self._samples += self._count(batch)

    def _draw(self, draw: Callable[[], Batch]) -> Batch:
        try:
            self._batch = draw()
        except StopIteration:  # the time between two epochs is no step
            self._begin(0.0)
            raise
        self._add(self._batch)
        if not self._began and self._batches >= WARM_UP:
            self._begin(_now())
        return self._batch

    def _measure_loader(self, draw: Callable[[], Batch], ahead: int) -> None:
        self._batch = None
        try:
            for _ in range(ahead):
                draw()
            self._begin(_now())
            while not self._is_over():
                self._add(draw())
        except StopIteration:
            if self._batches < MIN_BATCHES:
                return  # too near the epoch's end
        self.found["loader"] = self._samples / (_now() - self._began)
