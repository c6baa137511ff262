"""Each step waits for the device (``.item()``, ``.to()`` of page-locked memory without ``non_blocking``), which has
nothing to do then until the host has asked for more."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

LEAST = 0.05  # of the loop, in which the device is idle and its data is there
EACH = 0.5  # of the steps


def check(case: LoaderStats) -> Finding | None:
    idle = case.idle
    if idle is None or idle < LEAST:
        return None
    waits, blocked = case.crossings("sync")
    copies, copied = case.crossings("blocking")
    found = waits if copies is None or blocked >= copied else copies
    if found is None or found["calls"] < EACH * case.loader["device"]["steps"]:
        return None
    words = "non_blocking=True" if found is copies else "keep it on the device, and read it every hundredth step"
    return Finding(
        "sync_transfer",
        idle,
        {
            "line": found["line"],
            "calls_per_step": found["calls"] / case.loader["device"]["steps"],
            "blocked_share": blocked + copied,
            "device_idle_share": idle,
        },
        f"each step waits for the device at {found['line']}, and the device idles {idle:.0%} of the time with its data "
        f"there: {words}",
        1 / (1 - idle),
    )
