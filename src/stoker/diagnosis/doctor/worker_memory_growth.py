"""``worker_memory_growth``: what the workers have of their own becomes more and more."""

from __future__ import annotations

import itertools

from .loader_stats import Finding, LoaderStats

POINTS = 4  # of one worker's life, without the first, which finds it just started
FACTOR = 1.3
LEAST = 64 << 20  # bytes, of all workers together
STEADY = 0.7  # of the steps between two looks go up


def check(case: LoaderStats) -> Finding | None:
    lives = [line[1:] for line in case.loader.get("memory", {}).get("own", []) if len(line) > POINTS]
    growing = [line for line in lives if _grows(line)]
    if not case.workers or not growing:
        return None
    first, last = (sum(float(line[at][1]) for line in growing) / len(growing) for at in (0, -1))
    if (last - first) * case.workers < LEAST:
        return None
    seconds = sum(line[-1][0] - line[0][0] for line in growing) / len(growing)
    each = (last - first) / max(1e-9, seconds)
    return Finding(
        "worker_memory_growth",
        0.0,
        {"bytes_at_first": first, "bytes_at_last": last, "bytes_per_s": each, "seconds": seconds},
        f"a worker grows by {each / 1e6:.3g} MB/s as long as it lives: something is kept (a cache, a list in the "
        "dataset), or fork's pages are copied as they are touched (stoker.share)",
        None,
    )


def _grows(line: list[list[float]]) -> bool:
    up = sum(b[1] > a[1] for a, b in itertools.pairwise(line)) / (len(line) - 1)
    return line[-1][1] >= FACTOR * line[0][1] and up >= STEADY
