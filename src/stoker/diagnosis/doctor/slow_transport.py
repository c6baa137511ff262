"""``slow_transport``: batches are made in time and come late, or most of making them is getting memory for them."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

LEAST = 0.25  # of the loop
IDLE = 0.7  # workers busier than this cannot make batches faster
KERNEL = 0.35  # of the workers' CPU time, in which the kernel clears pages
COLLATE = 0.35  # of a task's time


def check(case: LoaderStats) -> Finding | None:
    service, busy = case.service, case.busy
    if not case.starved or not case.workers or service is None or busy is None:
        return None
    now = case.wait + case.step
    if hands_out(case):
        part = case.part("collate")
        made = max(case.step, service * (1 - part * kernel_share(case)) / case.workers)
        evidence = {"collate_share_of_a_task": part, "kernel_share_of_cpu": kernel_share(case)}
        words = (
            "each batch gets new shared memory, which the kernel clears page by page: stoker run --apply, whose slots "
            "are used again"
        )
        return Finding("slow_transport", case.share * part, evidence, words, now / made)
    made = max(service / case.workers, (case.cpu + case.step_cpu) / case.cores)
    unexplained = (now - max(made, case.step)) / now
    typical = case.loader.get("waits", {}).get("median_s", 0.0)
    if busy > IDLE or unexplained < LEAST or typical < LEAST * now or case.looks("fetch", ran=False):
        return None  # waits that come now and then have another cause
    return Finding(
        "slow_transport",
        unexplained,
        {"worker_busy_share": busy, "unexplained_share": unexplained, "worker_ms_per_batch": service * 1e3},
        "workers are done in time, their batches cross slowly: stoker run --apply, which copies less",
        now / max(made, case.step) if max(made, case.step) > 0 else None,
    )


def kernel_share(case: LoaderStats) -> float:
    kernel = case.loader.get("kernel") or {}
    return float(kernel.get("system_ns", 0)) / max(1.0, float(kernel.get("cpu_ns", 0)))


def hands_out(case: LoaderStats) -> bool:
    """Whether torch's own collate, in torch's workers, spends its time in the kernel: it asks for new shared memory for
    each batch."""
    if case.loader["settings"].get("engine") != "torch" or not case.workers or case.part("collate") < COLLATE:
        return False
    own = sum(v for k, v in case.looks("collate").items() if k.startswith("collate_"))
    return own >= COLLATE and kernel_share(case) >= KERNEL
