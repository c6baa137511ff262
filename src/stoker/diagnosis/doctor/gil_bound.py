"""Threads that compute in Python take turns at the interpreter's lock: worker threads, or a dataset's own pool."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats
from .model import period

ONE = 1.2  # cores that the threads use together
LEAST = 0.7
WANT = 1.8  # threads at work, or wanting to be, at once
HELD = 0.35  # of the looks, at which the lock did not come back at once


def check(case: LoaderStats) -> Finding | None:
    return _workers(case) or _helpers(case)


def _workers(case: LoaderStats) -> Finding | None:
    service, busy = case.service, case.busy
    if case.loader["settings"].get("worker_method") != "thread" or not case.starved or service is None or busy is None:
        return None
    now = case.wait + case.step
    used = (case.cpu + case.step_cpu) / now
    if case.workers < 2 or case.cores < 2 or busy < 0.6 or not LEAST < used < ONE:
        return None
    then = period(case, case.cores)
    best = max(case.step, (case.cpu + case.step_cpu) / case.cores)
    return Finding(
        "gil_bound",
        case.share * (1 - 1 / min(case.workers, case.cores)),
        {"cores_used": used, "threads": case.workers, "cores": case.cores},
        f'{case.workers} threads use {used:.1f} cores together, for they compute in Python: worker_method="process"',
        now / best if then else None,
        {"worker_method": "process"},
    )


def _helpers(case: LoaderStats) -> Finding | None:
    service, used = case.service, case.used
    if not case.bottleneck or service is None or not case.pooled or used > ONE:
        return None
    seen = case.loader["helpers"]
    threads, held = seen["threads"] / seen["looks"], seen["held"] / seen["looks"]
    if threads < WANT or held < HELD:
        return None
    more = case.workers < case.cores
    return Finding(
        "gil_bound",
        case.share,
        {"threads": threads, "lock_held_share": held, "cores_used": used, "cores": case.cores},
        f"{threads:.0f} threads of the dataset take turns and use {used:.1f} cores together, for they compute in "
        f"Python: worker processes instead (num_workers={case.cores})",
        max(1.0, (case.wait + case.step) / max(case.step, service / case.cores)) if more else None,
        {"num_workers": case.cores} if more else {},
    )
