"""``too_few_cores``: nothing stands out: making the samples takes all the cores that are granted."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

FULL = 0.8  # of the cores, that the loop and its workers use, or wait for


def check(case: LoaderStats) -> Finding | None:
    """For a loader that is starved and of which no other rule has said why."""
    made = float(case.loader["stages"].get("worker", {}).get("cpu_s", 0.0))
    kernel = case.loader.get("kernel") or {}
    if not case.starved or not made or case.total <= 0:
        return None
    if case.workers:
        made = max(made, float(kernel.get("cpu_ns", 0)) / 1e9)  # with all threads of each worker
    made += float(kernel.get("delay_ns", 0)) / 1e9  # on a machine that others use, too
    used = (made + float(case.loader["stages"].get("consumer", {}).get("cpu_s", 0.0))) / case.total
    if used < FULL * case.cores:
        return None
    return Finding(
        "too_few_cores",
        case.share,
        {"cores_wanted": used, "cores": case.cores, "worker_cpu_ms_per_batch": case.cpu * 1e3},
        f"the loop and its workers want {used:.1f} of {case.cores} cores, and no part of a sample stands out: more "
        "workers bring nothing; less work a sample does, or more cores",
    )
