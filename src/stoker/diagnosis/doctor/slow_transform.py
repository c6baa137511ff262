"""``slow_transform``: one transform, or one line of ``__getitem__``, is most of what a worker does."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats
from .model import without

LEAST = 0.3  # of a task's time


def check(case: LoaderStats) -> Finding | None:
    if not case.bottleneck:
        return None
    parts = {**case.looks("fetch", waited=False), **case.looks("transform")}
    if not parts:
        return None
    name, part = max(parts.items(), key=lambda kv: kv[1])
    if part < LEAST:
        return None
    return Finding(
        "slow_transform",
        case.share * part * case.clear,
        {"transform": name, "share_of_a_task": part, "looks": case.loader["looks"]},
        f"{name} takes {part:.0%} of a worker's time: do it once and keep the result, or do it on whole batches",
        without(case, part),
    )
