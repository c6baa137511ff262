"""``too_few_workers``: the workers are busy all the time, and cores are idle."""

from __future__ import annotations

from . import gil_bound
from .loader_stats import Finding, LoaderStats
from .model import speedup

BUSY = 0.7  # of the loop's time; below that it is not the workers that cannot keep up


def check(case: LoaderStats) -> Finding | None:
    workers, service = case.workers, case.service
    if not case.starved or not workers or service is None or workers >= case.cores:
        return None
    busy = service / workers / (case.wait + case.step)
    if busy < BUSY or gil_bound.check(case):
        return None
    evidence = {
        "num_workers": workers,
        "cores": case.cores,
        "worker_busy_share": min(1.0, busy),
        "worker_ms_per_batch": service * 1e3,
        "worker_cpu_ms_per_batch": case.cpu * 1e3,
    }
    return Finding(
        "too_few_workers",
        case.share,
        evidence,
        f"num_workers={case.cores} (now {workers})",
        speedup(case, case.cores),
        {"num_workers": case.cores},
    )
