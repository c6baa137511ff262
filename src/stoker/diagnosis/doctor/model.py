"""What a loop would take with other settings: the slowest of three things that have to happen for each batch.

The consumer's own step; a worker's time shared by the workers; and, for work that runs on this machine's cores, all
CPU seconds over all cores. The same reasoning as the bounds of a closed queueing network (Denning and Buzen, "The
operational analysis of queueing network models", ACM Computing Surveys 10(3), 1978).
"""

from __future__ import annotations

from .loader_stats import LoaderStats

# What workers cost that were not there before: torch's own, two cores (python -m benchmarks run).
HANDOVER_S = 0.4e-3  # CPU a batch: 0.58 ms for 64 scalars, of which making them is 0.18
START_S = 10e-3  # a worker and an epoch, under fork


def period(stats: LoaderStats, workers: int) -> float | None:
    """Seconds per batch with ``workers`` workers; None where the workers' time is not known."""
    service = stats.service
    if service is None:
        return None
    handover = start = 0.0
    if stats.workers == 0:
        handover, start = HANDOVER_S, START_S * workers * stats.loader.epochs / stats.batches
    return start + max(stats.step, service / workers, (stats.cpu + stats.step_cpu + handover) / stats.cores)


def without(stats: LoaderStats, part: float) -> float | None:
    """Speed-up of the loop if this part of a worker's time on a task were not there; the same workers otherwise."""
    service = stats.service
    if service is None:
        return None
    left = 1 - min(1.0, max(0.0, part))
    if stats.workers == 0:
        then = stats.step + service * left
    else:
        then = max(stats.step, service * left / stats.workers, (stats.cpu * left + stats.step_cpu) / stats.cores)
    return max(1.0, stats.loop / then) if then else None


def speedup(stats: LoaderStats, workers: int) -> float | None:
    """Loop time now over loop time with ``workers`` workers, at least 1."""
    then = period(stats, workers)
    return max(1.0, stats.loop / then) if then else None
