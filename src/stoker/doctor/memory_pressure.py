"""``memory_pressure``: the machine swaps, or tasks stall for want of memory."""

from __future__ import annotations

from . import Case, Finding

STALLED = 10.0  # per cent of ten seconds in which something waited for memory (PSI)
SWAPPED = 256 << 20


def check(case: Case) -> Finding | None:
    stalled = float(case.around.get("pressure_max", {}).get("memory", 0.0))
    swapped = int(case.around.get("swapped", 0))
    if stalled < STALLED and swapped < SWAPPED:
        return None
    available = int(case.around.get("memory_available_min", 0))
    return Finding(
        "memory_pressure",
        min(1.0, stalled / 100) * case.weight,
        {"stalled_percent": stalled, "swapped_bytes": swapped, "memory_available_min": available},
        "fewer workers or smaller batches: memory is short",
        None,
    )
