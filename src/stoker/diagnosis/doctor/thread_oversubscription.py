"""``thread_oversubscription``: native threads (OpenMP, BLAS, OpenCV) of several workers fight for the same cores."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

MORE = 1.4  # CPU of a worker's process over that of its own thread
EXCESS = 0.2  # of a task's time, CPU of other threads
DELAYED = 0.15
COMPUTES = 0.3  # of the tasks' time, in which their own thread computes or wants to
AT_WORK = 0.5  # of a worker's life, in tasks


def check(case: LoaderStats) -> Finding | None:
    kernel, tasks = case.loader.get("kernel") or {}, int(case.loader["stages"].get("worker", {}).get("tasks", 0))
    if not case.starved or case.workers < 2 or not tasks or not kernel:
        return None
    own = float(case.loader["stages"]["worker"]["cpu_s"])
    ratio = float(kernel["cpu_ns"]) / 1e9 / own if own > 0 else 0.0
    worked = (case.service or 0.0) * tasks
    if own + float(kernel["delay_ns"]) / 1e9 < COMPUTES * worked:
        return None  # the tasks sleep: whoever is short of cores, it is not they
    if float(kernel["cpu_ns"]) / 1e9 - own < EXCESS * worked:
        return None
    if ratio < MORE or case.delayed < DELAYED or worked < AT_WORK * kernel["seconds"]:
        return None  # or workers that hardly work: what their process does besides is not their tasks' threads
    return Finding(
        "thread_oversubscription",
        case.share,  # all that the workers do is slowed by it
        {"cpu_of_all_threads_over_own": ratio, "delayed_share": case.delayed, "num_workers": case.workers},
        "one native thread a worker: OMP_NUM_THREADS=1, cv2.setNumThreads(0), or stoker.DataLoader, which caps them",
        None,
    )
