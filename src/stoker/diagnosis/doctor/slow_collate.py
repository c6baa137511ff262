"""``slow_collate``: putting samples together costs more than making them."""

from __future__ import annotations

from . import slow_transport
from .loader_stats import Finding, LoaderStats
from .model import without

LEAST = 0.35


def check(case: LoaderStats) -> Finding | None:
    part = case.part("collate")
    if not case.bottleneck or part < LEAST or slow_transport.hands_out(case):
        return None
    return Finding(
        "slow_collate",
        case.share * part * case.clear,
        {"share_of_a_task": part, "collate_ms_per_batch": part * (case.service or 0.0) * 1e3},
        f"collate_fn takes {part:.0%} of a worker's time: stack arrays once, without loops over elements",
        without(case, part),
    )
