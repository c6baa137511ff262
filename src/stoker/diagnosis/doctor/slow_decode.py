"""``slow_decode``: workers spend their time turning bytes into arrays."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats
from .model import without

LEAST = 0.3


def check(case: LoaderStats) -> Finding | None:
    if not case.bottleneck:
        return None
    parts = case.looks("decode", waited=False)
    part = sum(parts.values())
    if part < LEAST:
        return None
    name = max(parts, key=lambda k: parts[k])
    return Finding(
        "slow_decode",
        case.share * part * case.clear,
        {"decoder": name, "share_of_a_task": part, "looks": case.loader["looks"]},
        f"{name} takes {part:.0%} of a worker's time: decode once and keep the result, or decode smaller",
        without(case, part),
    )
