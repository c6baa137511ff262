"""Predicts the loop's time per batch with other settings, as the largest of three lower bounds.

The bounds are the consumer's own step, a task's time divided by the number of workers, and all CPU time divided by the
number of cores. These are the bottleneck bounds of a closed queueing network (Denning and Buzen, "The operational
analysis of queueing network models", ACM Computing Surveys 10(3), 1978).
"""

from __future__ import annotations

from .loader_stats import LoaderStats

# What the first workers add to a loop without any, measured with torch's workers on two cores
# (python -m benchmarks run).
HANDOVER_S = 0.4e-3  # CPU seconds per batch: 0.58 ms for 64 scalars, of which 0.18 ms is making them
START_S = 10e-3  # seconds per worker and epoch, with fork


def period(stats: LoaderStats, workers: int, left: float = 1.0) -> float | None:
    """Predicts seconds per batch with ``workers`` workers, if this part of a task's time were left. None if the
    workers' time is unknown."""
    service = stats.service
    if service is None:
        return None
    if workers == 0:
        return stats.step + service * left
    handover = start = 0.0
    if stats.workers == 0:
        handover, start = HANDOVER_S, START_S * workers * stats.loader.epochs / stats.batches
    cpu = stats.cpu * left + stats.step_cpu + handover
    return start + max(stats.step, service * left / workers, cpu / stats.cores)


def speedup(stats: LoaderStats, workers: int, left: float = 1.0) -> float | None:
    """Predicts the speed-up by the same changes: loop time now over loop time then, at least 1."""
    then = period(stats, workers, left)
    return max(1.0, stats.loop / then) if then else None


def without(stats: LoaderStats, part: float) -> float | None:
    """Predicts the speed-up if ``part`` of a task's time were saved, with the same number of workers."""
    return speedup(stats, stats.workers, 1 - min(1.0, max(0.0, part)))
