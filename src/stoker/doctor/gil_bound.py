"""``gil_bound``: worker threads that all compute in Python share one interpreter, and so one core."""

from __future__ import annotations

from . import Case, Finding
from .model import period

ONE = 1.2  # cores that the threads use together


def check(case: Case) -> Finding | None:
    service, busy = case.service, case.busy
    if case.loader["settings"].get("worker_method") != "thread" or not case.starved or service is None or busy is None:
        return None
    now = case.wait + case.step
    used = (case.cpu + case.step_cpu) / now
    if case.workers < 2 or case.cores < 2 or busy < 0.6 or not 0.7 < used < ONE:
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
