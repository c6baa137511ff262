"""``too_many_workers``: more of them than cores, all computing: they wait for each other, and start and weigh more."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

PER_CORE = 3  # from here on
DELAYED = 0.4  # of a worker's time, in which it could run and has no core


def check(case: LoaderStats) -> Finding | None:
    if case.workers < PER_CORE * case.cores or case.delayed < DELAYED or case.waits > DELAYED:
        return None
    extra = 1 - case.cores / case.workers
    startup = case.startup / case.total * extra if case.total else 0.0
    pss = case.loader.get("memory", {}).get("worker_pss", [])
    evidence = {
        "num_workers": case.workers,
        "cores": case.cores,
        "delayed_share": case.delayed,
        "startup_s": case.startup,
        "memory_bytes": sum(pss),
    }
    return Finding(
        "too_many_workers",
        max(startup, case.share * case.delayed * extra),
        evidence,
        f"num_workers={case.cores} (now {case.workers}): they compute, and {case.delayed:.0%} of their time "
        f"they wait for one of {case.cores} cores",
        1 / (1 - startup) if startup < 1 else None,
        {"num_workers": case.cores},
    )
