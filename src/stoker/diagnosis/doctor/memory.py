"""Rules about the machine's memory, the workers' memory and ``/dev/shm``."""

from __future__ import annotations

import itertools

from .loader_stats import LoaderStats, RuleFinding

STALLED = 0.1  # of the worst ten seconds
SWAPPED = 256 << 20  # bytes
MIN_POINTS = 4  # readings of one worker, without the first, which is taken just after it starts
GROWTH = 1.3  # last reading over first
MIN_GROWN = 64 << 20  # bytes, all workers together
STEADY = 0.7  # of the readings are higher than the one before
SHM_LEFT = 32 << 20  # bytes


def memory_pressure(stats: LoaderStats) -> RuleFinding | None:
    """The machine swaps, or tasks stall for lack of memory (PSI, the kernel's accounting/psi.rst)."""
    share, swapped = stats.stalled, stats.around.swapped
    seen = [f"tasks waited for it in {share:.0%} of ten seconds"] if share >= STALLED else []
    seen += [f"{swapped >> 20:,} MB were swapped"] if swapped >= SWAPPED else []
    if not seen:
        return None
    return RuleFinding(
        share * stats.weight,
        {"stalled_share": share, "swapped_bytes": swapped},
        f"memory is short, {' and '.join(seen)}: use fewer workers, smaller batches, or a dataset that fits",
    )


def worker_memory_growth(stats: LoaderStats) -> RuleFinding | None:
    """The workers' private memory keeps growing as long as they live."""
    lives = [points[1:] for points in stats.loader.memory.own if len(points) > MIN_POINTS]
    growing = [points for points in lives if _grows(points)]
    if not stats.workers or not growing:
        return None
    first, last = (sum(points[at][1] for points in growing) / len(growing) for at in (0, -1))
    if (last - first) * stats.workers < MIN_GROWN:
        return None
    seconds = sum(points[-1][0] - points[0][0] for points in growing) / len(growing)
    rate = (last - first) / max(1e-9, seconds)
    return RuleFinding(
        0.0,
        {"bytes_at_first": first, "bytes_at_last": last, "bytes_per_s": rate, "seconds": seconds},
        f"each worker grows by {rate / 1e6:.3g} MB/s: the dataset accumulates data (a cache, a list), or workers copy "
        "the parent's pages when they touch its objects (use stoker.share)",
    )


def _grows(points: list[list[float]]) -> bool:
    up = sum(after[1] > before[1] for before, after in itertools.pairwise(points)) / (len(points) - 1)
    return points[-1][1] >= GROWTH * points[0][1] and up >= STEADY


def shm_too_small(stats: LoaderStats) -> RuleFinding | None:
    """``/dev/shm``, through which torch's workers send batches, is nearly full."""
    free = stats.around.shm_free_min
    if free is None or free >= SHM_LEFT or not stats.workers or stats.loader.settings.engine != "torch":
        return None
    return RuleFinding(
        0.0,
        {"shm_free_min": free},
        f"/dev/shm had {free >> 20} MB left: use docker run --shm-size=1g, or stoker.DataLoader, which does not use it",
    )
