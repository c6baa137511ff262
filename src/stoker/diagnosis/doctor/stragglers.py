"""``stragglers``: a few samples take many times as long as the others, and everybody waits for them."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

LEAST = 0.1  # of the tasks' time
WAITS = 0.4  # of the waiting, which comes in a few long waits then
FEW = 3
RARE = 0.2  # of the tasks; if more of them are slow, the loader is
DELAYED = 0.4


def check(case: LoaderStats) -> Finding | None:
    tasks, waits = case.loader.get("tasks", {}), case.loader.get("waits", {})
    if (case.loader.get("cache") or {}).get("filled") and not case.loader.get("filled_epochs"):
        return None  # tasks that filled a cache took longer than those it served, and stand among them
    if not case.starved or not case.workers or not FEW <= tasks.get("slow_count", 0) <= RARE * tasks["count"]:
        return None
    if tasks["slow_share"] < LEAST or waits.get("slow_share", 0.0) < WAITS:
        return None
    seconds = tasks["slow_share"] * (case.service or 0.0) * int(case.loader["stages"]["worker"]["tasks"])
    if case.delayed > DELAYED or seconds / case.workers < LEAST * case.total:
        return None  # tasks that had no core, or were so short that a start made them long
    slow = tasks.get("slow_samples", {})
    worst = sorted(slow, key=lambda k: -slow[k])[:5]
    names = f"; seen at work then: samples {', '.join(worst)}" if worst else ""
    share = case.share * waits["slow_share"]
    return Finding(
        "stragglers",
        share,
        {
            "slow_tasks": tasks["slow_count"],
            "of": tasks["count"],
            "share_of_task_time": tasks["slow_share"],
            "samples": worst,
        },
        f"{tasks['slow_count']} of {tasks['count']} tasks take over 3 times the median{names}: mend or "
        "split those samples, or prefetch deeper",
        1 / max(1e-3, 1 - share),
    )
