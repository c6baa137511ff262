"""``worker_memory_growth``: the workers weigh more and more."""

from __future__ import annotations

import itertools

from . import Case, Finding

POINTS = 4
FACTOR = 1.3
LEAST = 64 << 20
STEADY = 0.7  # of the steps between two looks go up


def check(case: Case) -> Finding | None:
    line = case.loader.get("memory", {}).get("over_time", [])
    # The first look finds workers that have just started.
    line = line[1:]
    if len(line) < POINTS or not case.workers:
        return None
    first, last = float(line[0][1]), float(line[-1][1])
    up = sum(b[1] > a[1] for a, b in itertools.pairwise(line)) / (len(line) - 1)
    if last < FACTOR * first or last - first < LEAST or up < STEADY:
        return None
    seconds = line[-1][0] - line[0][0]
    each = (last - first) / max(1e-9, seconds)
    return Finding(
        "worker_memory_growth",
        0.0,
        {"bytes_at_first": first, "bytes_at_last": last, "bytes_per_s": each, "seconds": seconds},
        f"workers grow by {each / 1e6:.3g} MB/s: something is kept (a cache, a list in the dataset), or fork's "
        "pages are copied as they are touched (stoker.share)",
        None,
    )
