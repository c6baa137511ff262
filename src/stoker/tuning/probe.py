"""How many workers: an empty loop over throw-away workers, one count after another, and the knee of the curve.

What ``num_workers="auto"`` does before its first epoch, where no profile was kept: a few seconds, one knob.
"""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from .. import machine, seeding
from ..options import Budget, Measured
from .bench import BadSample, Bench, PoolBench, TooSlow
from .model import KNEE
from .tasks import Draw, Tasks

WINDOW_S = 0.4  # one measurement; long enough that a scheduler tick of a busy machine is noise
TASKS = 3  # and at least so many tasks for each worker
PREFETCH = 2  # torch's
ROUNDS = 2  # each count is measured so often, the rounds interleaved
LIMIT_S = 5.0  # all together; a dataset too slow for it gets the first guess
WAITING = 0.5  # workers that use less CPU than this share of their time wait for something, and more of them may help


def knee(rates: dict[int, float]) -> int:
    """The smallest count whose rate is within 3 % of the best.

    Example:
        >>> knee({1: 50.0, 2: 98.0, 4: 100.0})
        2
    """
    best = max(rates.values())
    return min(n for n, rate in rates.items() if rate >= KNEE * best)


def measure(loader: Any, budget: Budget, method: str = "process") -> Measured:
    """Measures ``loader``'s workers, all of one kind. Never raises for what its dataset does: the reason says it."""
    began = time.monotonic()
    cores = machine.cores_granted()
    if loader._dataset_kind == _DatasetKind.Iterable:
        return Measured(1, reason="an iterable dataset: only itself knows how to share its samples among workers")
    if Draw.like(loader) is None:
        return Measured(
            cores, reason=f"a sampler of its own, whose order is not to be disturbed: {cores} cores granted"
        )

    def guess(reason: str, failed: bool) -> Measured:
        return Measured(cores, reason=reason, seconds=time.monotonic() - began, failed=failed)

    bench = PoolBench(loader, Tasks(loader), method, budget, began + LIMIT_S)
    try:
        with seeding.unchanged():
            rates, inline = _curve(bench, cores)
    except TooSlow:
        return guess(f"too slow to be measured in {LIMIT_S:g} s: {cores} cores granted", False)
    except BadSample:
        return guess(f"a sample could not be loaded in a worker: {cores} cores granted", True)
    except Exception as e:
        return guess(f"could not measure ({type(e).__name__}: {e})", True)
    finally:
        bench.close()
    n = knee(rates)
    curve = ", ".join(f"{k}: {rate:.3g}" for k, rate in rates.items())
    reason = f"measured batches/s by workers: {curve}; {n} is the smallest within 3 % of the best"
    return Measured(n, rates, inline, reason, time.monotonic() - began)


def _curve(bench: Bench, cores: int) -> tuple[dict[int, float], float]:
    """Batches per second by count, from 1 up to where more cannot help; and of fetch and collate alone."""
    first = bench.window(1, PREFETCH, WINDOW_S, TASKS)
    seen = {1: [first.rate]}
    most = cores if first.cpu_s >= WAITING * first.work_s else 4 * cores
    counts = [n for n in range(1, most + 1) if n <= 4 or n in (6, 8, 12) or n % 16 == 0 or n == most]
    try:
        for n in counts[1:]:
            seen[n] = [bench.window(n, PREFETCH, WINDOW_S, TASKS).rate]
            if seen[n][0] < 0.8 * max(r[0] for r in seen.values()):
                break  # far past the top
        for _ in range(ROUNDS - 1):
            for n in seen:
                seen[n].append(bench.window(n, PREFETCH, WINDOW_S, TASKS).rate)
    except TooSlow:
        if len(seen) < min(2, len(counts)):
            raise
    return {n: max(rates) for n, rates in seen.items()}, 1 / first.make_s if first.make_s else 0.0
