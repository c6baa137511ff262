"""Page-locked memory cannot be swapped or reclaimed, and torch's allocator rounds each block up and keeps it."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

SHARE = 0.3  # of the memory that is granted
LEFT = 0.1  # of it, when it was scarcest


def check(case: LoaderStats) -> Finding | None:
    pinned = int((case.loader.get("device") or {}).get("pinned_bytes", 0))
    available = case.around.get("memory_available_min")
    if not case.loader["settings"].get("pin_memory") or not case.memory or available is None:
        return None
    if pinned < SHARE * case.memory or available > LEFT * case.memory:
        return None
    return Finding(
        "pin_memory_exhausts_ram",
        0.0,
        {"pinned_bytes": pinned, "memory_bytes": case.memory, "memory_available_min": available},
        f"{pinned >> 20:,} MB are page-locked, and {available >> 20:,} MB were left: fewer workers or a smaller "
        "prefetch_factor",
        None,
    )
