"""Decides whether a loader keeps the workers that ``stoker run --apply`` gave it, once all samples are cached.

Often so little work is left per sample that starting workers, and moving batches between processes, costs more than
making them in the script's process, as the script asked for. Each way is timed for one epoch, and the faster one
stays::

    epoch 1        workers fill the cache
    epoch 2        in the script's process, where an estimate says that this may pay
    epoch 3        by workers, unless they could save little of the epoch before at best, or have made one already in
                   which nothing was added to the cache
    epoch 4 ...    whichever took less time for a batch, when it was used last
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

FILLED = 0.9  # of the samples: an epoch that drops its last batch skips some
GROWING = 0.02  # share by which a cache may grow in an epoch; if it grew more, it is still being filled
START_S = 0.02  # cost of starting a worker for an epoch
# of work for an epoch's batches; longer epochs are left to workers, which run in parallel with the script's step
MOST_S = 5.0
PAYS = 1.5  # the script's process is not tried if it is expected to take this many times as long as workers
MAY_LOSE_S = 0.1  # or this many seconds more: measuring it is worth that
WORTH = 0.2  # minimum share of an epoch's time in the script's process that workers must be able to save, to be tried


class Maker(enum.Enum):
    """Who makes an epoch's batches."""

    WORKERS = "workers"
    SCRIPT = "the script's process"


class Epoch(NamedTuple):
    """A row of ``LoaderMetrics.by_epoch``."""

    batches: float
    wait_s: float
    step_s: float
    first_wait_s: float
    loop_s: float
    samples: float
    first_step_s: float = 0.0


class CachedEpochs:
    """History of one loader's epochs. ``sample_s``: seconds for a cached sample, including its collation."""

    def __init__(self, sample_s: float, workers: int, cores: int) -> None:
        self._sample_s = sample_s
        self._workers = workers
        self._cores = cores
        self._begun: tuple[Maker, int, bool, int] | None = None  # maker, number, was filled, stored before
        self._last: Epoch | None = None
        self._by_maker: dict[Maker, Epoch] = {}
        self._stored = 0

    def is_filled(self, stored: int, room: int) -> bool:
        """Whether the coming epoch finds nearly all it needs in the cache, which holds ``stored`` samples or call
        results. There may be fewer distinct calls than ``room``; their number is unknown. Call once per epoch."""
        before, self._stored = self._stored, stored
        return stored >= FILLED * room or 0 < stored <= (1 + GROWING) * before

    def choose(self, rows: Sequence[Sequence[float]], filled: bool) -> Maker:
        """Chooses who makes the coming epoch's batches. ``rows``: those of earlier epochs."""
        self._note(rows)
        maker = self._choice() if filled else Maker.WORKERS
        self._begun = maker, len(rows), filled, self._stored
        return maker

    def _note(self, rows: Sequence[Sequence[float]]) -> None:
        """Records the result of the previous epoch."""
        if self._begun is None:
            return
        maker, at, filled, before = self._begun
        self._begun = None
        if at < len(rows) and rows[at][0]:
            self._last = Epoch(*rows[at])
            if filled or 0 < self._stored <= (1 + GROWING) * before:
                self._by_maker[maker] = self._last

    def _choice(self) -> Maker:
        script = self._by_maker.get(Maker.SCRIPT)
        workers = self._by_maker.get(Maker.WORKERS)
        if script is None:
            return Maker.SCRIPT if self._may_pay() else Maker.WORKERS
        if workers is None:
            return Maker.SCRIPT if self._workers_at_best(script) > (1 - WORTH) * script.loop_s else Maker.WORKERS
        faster = script.loop_s / script.batches <= workers.loop_s / workers.batches
        return Maker.SCRIPT if faster else Maker.WORKERS

    def _may_pay(self) -> bool:
        """Whether, by estimate, an epoch without workers takes little longer than one with them."""
        if self._last is None:
            return False
        here_s, step_s = self._sample_s * self._last.samples, self._last.step_s
        return here_s <= MOST_S and here_s + step_s <= PAYS * self._by_workers(here_s, step_s) + MAY_LOSE_S

    def _workers_at_best(self, script: Epoch) -> float:
        """Lower bound in seconds for an epoch whose batches are made in parallel with the script's step."""
        return self._by_workers(script.wait_s, script.loop_s - script.wait_s)

    def _by_workers(self, making_s: float, step_s: float) -> float:
        """The same from seconds of work; all of it shares the cores."""
        return max(step_s, making_s / self._workers, (making_s + step_s) / self._cores) + START_S * self._workers
