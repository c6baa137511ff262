"""Rules about how batches get from the workers to the loop, and about the loop itself."""

from __future__ import annotations

from .loader_stats import RARE, LoaderStats, RuleFinding

MIN_UNEXPLAINED = 0.25  # of the loop
IDLE_FOR_TRANSPORT = 0.7  # workers busier than this cannot make batches faster
MIN_KERNEL = 0.35  # of the workers' CPU time, in the kernel, which clears pages
MIN_COLLATE = 0.35  # of a task's time
DEEP = 4  # batches per worker; from here on, prefetch depth is not the problem
IDLE_FOR_PREFETCH = 0.8  # busier workers idle too little for a deeper prefetch to help
CORELESS = 0.3  # of the tasks' time, in which a worker has no core
UNEVEN = 2.0  # 95th percentile over median
MIN_LONG_STEPS = 2
MIN_LONG_STEP_TIME = 0.15  # of the loop


def slow_transport(stats: LoaderStats) -> RuleFinding | None:
    """Workers finish batches in time, but the batches arrive late; or allocating their memory dominates collating."""
    service, busy, now = stats.service, stats.busy, stats.loop
    if not stats.starved or not stats.workers or service is None or busy is None:
        return None
    if stats.loader.settings.engine != "torch":
        return None  # stoker's engine already copies less
    if allocates_each_batch(stats):
        best = max(stats.step, service * (1 - stats.collate * stats.kernel_share) / stats.workers)
        return RuleFinding(
            stats.share * stats.collate,
            {"collate_share_of_a_task": stats.collate, "kernel_share_of_cpu": stats.kernel_share},
            "each batch gets new shared memory, which the kernel clears page by page: use stoker run --apply, which "
            "reuses memory",
            now / best,
        )
    best = stats.period(stats.workers) or now
    unexplained = (now - best) / now
    often = stats.loader.waits.median_s >= MIN_UNEXPLAINED * now  # occasional waits have another cause
    if busy > IDLE_FOR_TRANSPORT or unexplained < MIN_UNEXPLAINED or not often or stats.code_shares("fetch", ran=False):
        return None
    return RuleFinding(
        unexplained,
        {"worker_busy_share": busy, "unexplained_share": unexplained, "worker_ms_per_batch": service * 1e3},
        "workers finish batches in time, but the batches arrive late: use stoker run --apply, which copies less",
        now / best,
    )


def allocates_each_batch(stats: LoaderStats) -> bool:
    """Returns whether torch's collate, in torch's workers, spends most of its time allocating shared memory."""
    if stats.loader.settings.engine != "torch" or not stats.workers or stats.collate < MIN_COLLATE:
        return False
    torchs = sum(v for name, v in stats.code_shares("collate").items() if name.startswith("collate_"))
    return torchs >= MIN_COLLATE and stats.kernel_share >= MIN_KERNEL


def prefetch_too_small(stats: LoaderStats) -> RuleFinding | None:
    """Workers idle while the loop waits, because too few batches are prefetched for an uneven loop."""
    depth, busy = stats.loader.settings.prefetch_factor, stats.busy
    if not stats.starved or not stats.workers or busy is None or busy > IDLE_FOR_PREFETCH:
        return None
    if not isinstance(depth, int) or depth >= DEEP:
        return None
    steps, tasks, now = stats.loader.steps, stats.loader.tasks, stats.loop
    if stats.coreless > CORELESS or 0 < steps.slow_count <= steps.count * RARE:
        return None  # cores are short, or rare long steps that no prefetch depth would bridge
    uneven = max(lasted.p95_s / lasted.median_s if lasted.median_s else 0.0 for lasted in (steps, tasks))
    best = stats.period(stats.workers) or now
    if uneven < UNEVEN or best > 0.9 * now or tasks.slow_share > 0.3:
        return None
    deeper = max(8, 4 * depth)
    return RuleFinding(
        1 - best / now,
        {"worker_busy_share": busy, "p95_over_median": uneven},
        f"prefetch_factor={deeper} (now {depth}): steps vary in length, and workers idle during the long ones",
        now / best,
        {"prefetch_factor": deeper},
    )


def checkpoint_or_logging(stats: LoaderStats) -> RuleFinding | None:
    """Occasionally a step of the loop itself takes many times as long as usual. The loader is not the cause."""
    steps = stats.loader.steps
    if not MIN_LONG_STEPS <= steps.slow_count <= steps.count * RARE:
        return None
    share = stats.loader.step_s / stats.total * steps.slow_share if stats.total else 0.0
    if stats.idle is not None:  # a long step costs nothing while the device still works through queued kernels
        share = min(share, stats.idle)
    if share * stats.weight < MIN_LONG_STEP_TIME:
        return None
    return RuleFinding(
        share,
        {"median_step_ms": steps.median_s * 1e3, "share_of_steps": steps.slow_share},
        f"{steps.slow_count} of {steps.count} steps take over 3 times the median (a checkpoint, logging, an "
        "evaluation): do that less often or in the background",
        1 / (1 - share),
    )
