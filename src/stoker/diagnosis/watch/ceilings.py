"""``stoker run --ceilings``: what the loop could do if its loader were free, and the loader if the steps were.

Three spells of the script's own loop, one after the other: as it is; with one batch handed over again and again, so
that only the steps are left; and with batches drawn and dropped, so that only the loader is. The script trains on one
batch in the second and on none in the third, so it ends there: this is a measurement, not a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SPELL_S = 2.0
FEW = 5  # batches in a spell, at least
WARM = 5  # batches before the first


class Ceilings:
    """The three spells of one loader.

    Args:
        count: samples in a batch.

    Attributes:
        found: samples per second: ``loop``, ``steps``, ``loader``; what was measured so far.
        name: the loader's.
    """

    def __init__(self, count: Callable[[Any], int]) -> None:
        self.found: dict[str, float] = {}
        self.name: str | None = None
        self._count = count
        self._phase = "loop"
        self._batch: Any = None
        self._restart()

    def _restart(self) -> None:
        self._began, self._batches, self._samples = 0.0, 0, 0

    def next(self, draw: Callable[[], Any], ahead: int) -> Any:
        """What the script gets for a batch.

        Args:
            draw: the loader's own next batch; may raise ``StopIteration``.
            ahead: batches that may have been made meanwhile.

        Returns:
            The batch, or None when all is measured.
        """
        now = time.perf_counter()
        if self._phase == "loop":
            if self._over(now):
                self._end("loop", "steps", now)
            else:
                return self._draw(draw)
        if self._phase == "steps":
            if not self._over(now):
                self._batches += 1
                self._samples += self._count(self._batch)
                return self._batch
            self._end("steps", "loader", now)
        self._empty(draw, ahead)
        return None

    def _over(self, now: float) -> bool:
        return bool(self._began) and self._batches >= FEW and now - self._began >= SPELL_S

    def _end(self, phase: str, following: str, now: float) -> None:
        self.found[phase] = self._samples / (now - self._began)
        self._phase = following
        self._restart()
        self._began = now

    def _draw(self, draw: Callable[[], Any]) -> Any:
        try:
            self._batch = draw()
        except StopIteration:  # what comes between two epochs is no step
            self._restart()
            raise
        self._batches += 1
        if self._began:
            self._samples += self._count(self._batch)
        elif self._batches >= WARM:
            self._restart()
            self._began = time.perf_counter()
        return self._batch

    def _empty(self, draw: Callable[[], Any], ahead: int) -> None:
        self._batch = None
        try:
            for _ in range(ahead):
                draw()
            self._restart()
            self._began = time.perf_counter()
            while not self._over(time.perf_counter()):
                self._samples += self._count(draw())
                self._batches += 1
        except StopIteration:
            if self._batches < FEW:
                return  # too near the epoch's end to say anything
        self.found["loader"] = self._samples / (time.perf_counter() - self._began)
