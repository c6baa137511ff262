"""``checkpoint_or_logging``: now and then the loop itself takes many times a step; the loader has no part in it."""

from __future__ import annotations

from .loader_stats import RARE, Finding, LoaderStats

LEAST = 0.15  # of the loop
FEW = 2


def check(case: LoaderStats) -> Finding | None:
    steps = case.loader.get("steps", {})
    if steps.get("slow_count", 0) < FEW or steps["slow_count"] > steps["count"] * RARE:
        return None
    own = float(case.loader["step_s"]) / case.total if case.total else 0.0
    share = own * steps["slow_share"]
    if share * case.weight < LEAST:
        return None
    return Finding(
        "checkpoint_or_logging",
        share,
        {
            "long_steps": steps["slow_count"],
            "of": steps["count"],
            "median_step_ms": steps["median_s"] * 1e3,
            "share_of_steps": steps["slow_share"],
        },
        f"{steps['slow_count']} of {steps['count']} steps take over 3 times the median (a checkpoint, a log, an "
        "evaluation): do that less often, or in the background",
        1 / (1 - share),
    )
