"""``prefetch_too_small``: workers idle while the loop waits, for too few batches are made ahead of an uneven loop."""

from __future__ import annotations

from .loader_stats import RARE, Finding, LoaderStats

DEEP = 4  # from here on it is not the depth
IDLE = 0.8
DELAYED = 0.3  # of its tasks' time, a worker without a core
UNEVEN = 2.0  # 95th percentile over median


def check(case: LoaderStats) -> Finding | None:
    depth, busy, service = case.loader["settings"].get("prefetch_factor"), case.busy, case.service
    if not case.starved or not case.workers or busy is None or service is None or busy > IDLE:
        return None
    if not isinstance(depth, int) or depth >= DEEP:
        return None
    steps = case.loader.get("steps", {})
    if case.coreless > DELAYED or 0 < steps.get("slow_count", 0) <= steps["count"] * RARE:
        return None  # no core to be had; or a pause now and then, that no depth would bridge
    uneven = max(_uneven(steps), _uneven(case.loader.get("tasks", {})))
    best = max(case.step, service / case.workers, (case.cpu + case.step_cpu) / case.cores)
    now = case.wait + case.step
    if uneven < UNEVEN or best > 0.9 * now or case.loader.get("tasks", {}).get("slow_share", 0.0) > 0.3:
        return None
    deeper = max(8, 4 * depth)
    return Finding(
        "prefetch_too_small",
        1 - best / now,
        {"prefetch_factor": depth, "worker_busy_share": busy, "p95_over_median": uneven},
        f"prefetch_factor={deeper} (now {depth}): the loop is uneven and workers idle meanwhile",
        now / best,
        {"prefetch_factor": deeper},
    )


def _uneven(spread: dict[str, float]) -> float:
    return spread["p95_s"] / spread["median_s"] if spread.get("median_s") else 0.0
