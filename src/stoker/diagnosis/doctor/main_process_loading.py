"""``main_process_loading``: with ``num_workers=0`` loading and training take turns in one process."""

from __future__ import annotations

from . import gil_bound
from .loader_stats import Finding, LoaderStats
from .model import speedup

WORTH = 1.05


def check(case: LoaderStats) -> Finding | None:
    chosen = case.loader["settings"].get("auto")  # by num_workers="auto", which has tried workers
    if not case.starved or case.workers or chosen or gil_bound.check(case):
        return None
    gain = speedup(case, case.cores)
    if gain is not None and gain < WORTH:
        return None  # so little work a sample that handing it over costs as much
    evidence = {"num_workers": 0, "cores": case.cores, "wait_ms": case.wait * 1e3, "step_ms": case.step * 1e3}
    return Finding(
        "main_process_loading",
        case.share,
        evidence,
        f"load in worker processes: num_workers={case.cores}",
        gain,
        {"num_workers": case.cores},
    )
