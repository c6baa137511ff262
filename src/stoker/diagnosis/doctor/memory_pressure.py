"""``memory_pressure``: the machine swaps, or tasks stall for want of memory (PSI, the kernel's accounting/psi.rst)."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

STALLED = 0.1  # of the worst ten seconds
SWAPPED = 256 << 20


def stalled(case: LoaderStats) -> float:
    """The part of the worst ten seconds in which something waited for memory: what it reads again and again, too."""
    return min(1.0, float(case.around.get("memory_stalled_max", 0.0)))


def check(case: LoaderStats) -> Finding | None:
    share = stalled(case)
    swapped = int(case.around.get("swapped", 0))
    if share < STALLED and swapped < SWAPPED:
        return None
    available = int(case.around.get("memory_available_min", 0))
    seen = [f"tasks waited for it in {share:.0%} of ten seconds"] if share >= STALLED else []
    seen += [f"{swapped >> 20:,} MB were swapped"] if swapped >= SWAPPED else []
    return Finding(
        "memory_pressure",
        share * case.weight,
        {
            "stalled_share": share,
            "swapped_bytes": swapped,
            "memory_available_min": available,
            "stored_bytes": (case.loader.get("kernel") or {}).get("stored", 0),
        },
        f"memory is short, {' and '.join(seen)}: fewer workers, smaller batches, or a dataset that fits",
        None,
    )
