"""Rules about workers: their number, their start-up, and what their threads compete for."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.types import JsonObject
from .loader_stats import LoaderStats, RuleFinding

HANDOVER_PAYS = 1.05  # predicted speed-up from which workers are advised
ALWAYS_BUSY = 0.7  # of the loop's time; below that, the workers keep up
PER_CORE = 3  # workers per core; fewer are never too many
CROWDED = 0.4  # of a worker's life, in which it is runnable but has no core
MIN_STARTUP = 0.15  # of the loop
MIN_EPOCHS = 5  # with fewer, an epoch left early may only be a look at one batch
PERSISTENT = "persistent_workers=True"
OVER_OWN_CPU = 1.4  # CPU time of a worker process over that of the thread that runs its tasks
EXCESS_CPU = 0.2  # of a task's time, CPU time of other threads
DELAYED = 0.15  # of a worker's life, without a core
COMPUTES = 0.3  # of the tasks' time, in which their own thread computes or waits for a core
AT_WORK = 0.5  # of a worker's life, in tasks
ONE_CORE = (0.7, 1.2)  # cores that thread workers use together if they take turns
ONE_HELPER_CORE = (0.5, 1.2)  # the same for the dataset's own threads, without the thread that waits for them
FULL = 0.8  # of the cores that the loop and its workers use or wait for


def main_process_loading(stats: LoaderStats) -> RuleFinding | None:
    """With ``num_workers=0`` loading and training take turns in one process."""
    chosen = stats.loader.settings.auto  # num_workers="auto" has already tried workers
    if not stats.starved or stats.workers or chosen or gil_bound(stats):
        return None
    gain = stats.speedup(stats.cores)
    if gain is not None and gain < HANDOVER_PAYS:
        return None  # samples are so cheap that handing them over costs as much
    cannot = stats.loader.settings.no_workers
    if cannot:
        return RuleFinding(
            stats.share,
            {"wait_ms": stats.wait * 1e3, "step_ms": stats.step * 1e3},
            f"loading and training take turns in one process, which cannot use workers: {cannot}",
        )
    return RuleFinding(
        stats.share,
        {"wait_ms": stats.wait * 1e3, "step_ms": stats.step * 1e3},
        f"load in worker processes: num_workers={stats.cores}",
        gain,
        {"num_workers": stats.cores},
    )


def too_few_workers(stats: LoaderStats) -> RuleFinding | None:
    """The workers are always busy, and there are more cores than workers."""
    workers, service = stats.workers, stats.service
    if not stats.starved or not workers or service is None or workers >= stats.cores:
        return None
    busy = service / workers / stats.loop
    if busy < ALWAYS_BUSY or gil_bound(stats):
        return None
    return RuleFinding(
        stats.share,
        {"worker_busy_share": min(1.0, busy), "worker_ms_per_batch": service * 1e3},
        f"num_workers={stats.cores} (now {workers}), with which random augmentation draws other numbers",
        stats.speedup(stats.cores),
        {"num_workers": stats.cores},
    )


def too_many_workers(stats: LoaderStats) -> RuleFinding | None:
    """There are many more workers than cores, and all of them compute. They wait for each other, take longer to start
    and use more memory."""
    if stats.workers < PER_CORE * stats.cores or stats.delayed < CROWDED or stats.waits > CROWDED:
        return None
    extra = 1 - stats.cores / stats.workers
    startup = stats.startup / stats.total * extra if stats.total else 0.0
    return RuleFinding(
        max(startup, stats.share * stats.delayed * extra),
        {"delayed_share": stats.delayed, "startup_s": stats.startup},
        f"num_workers={stats.cores} (now {stats.workers}): the workers compute, and wait for one of {stats.cores} "
        f"cores {stats.delayed:.0%} of their time",
        1 / (1 - startup) if startup < 1 else None,
        {"num_workers": stats.cores},
    )


def too_few_cores(stats: LoaderStats) -> RuleFinding | None:
    """Making the samples takes all granted cores. This rule runs last, for a loader without another cause."""
    if not stats.starved or not stats.loader.stages.worker.cpu_s or stats.total <= 0:
        return None
    wanted = cores_wanted(stats)
    if wanted < FULL * stats.cores:
        return None
    return RuleFinding(
        stats.share,
        {"cores_wanted": wanted, "worker_cpu_ms_per_batch": stats.cpu * 1e3},
        f"the loop and its workers want {wanted:.1f} of {stats.cores} cores, and no part of a sample dominates: more "
        "workers will not help; make samples cheaper or use more cores",
    )


def cpu_s(stats: LoaderStats) -> float:
    """Returns the CPU seconds of all threads of all workers, or of the fetching thread if there are no workers."""
    own = stats.loader.stages.worker.cpu_s
    return max(own, stats.loader.kernel.cpu_ns / 1e9) if stats.workers else own


def cores_wanted(stats: LoaderStats) -> float:
    """Returns the cores that the loop and its workers use or wait for. ``stats.total`` must be above 0."""
    return (cpu_s(stats) + stats.loader.kernel.delay_ns / 1e9 + stats.loader.stages.consumer.cpu_s) / stats.total


def worker_startup(stats: LoaderStats) -> RuleFinding | None:
    """Each epoch begins with a pause while workers start."""
    epochs = stats.loader.epochs
    if epochs < 2 or not stats.workers or stats.total <= 0:
        return None
    # Even with running workers, a first batch takes at least a task's time.
    pause = max(0.0, stats.startup / epochs - (stats.service or 0.0))
    for starts, total_s, fix, change in _fewer_starts(stats):
        share = pause * starts / total_s
        if share * stats.weight >= MIN_STARTUP:
            return RuleFinding(
                share,
                {"pause_s": pause, "epochs": epochs},
                f"each epoch begins with a pause of {pause * 1e3:,.0f} ms while workers start: {fix}",
                1 / (1 - share),
                change,
            )
    return None


def _fewer_starts(stats: LoaderStats) -> Iterator[tuple[int, float, str, JsonObject]]:
    """Yields ways to start workers less often: starts saved, total seconds that a share refers to, fix, settings."""
    loader = stats.loader
    epochs, abandoned = loader.epochs, loader.epochs - loader.ended
    if epochs >= MIN_EPOCHS and 2 * abandoned > epochs and stats.batches < 2 * epochs:  # next(iter(loader)), each step
        fix = f"{abandoned:,} epochs are left after one batch; keep one iterator, it = iter(loader), and call next(it)"
        yield (epochs - 1, stats.total + loader.between_s, fix, {})
        return
    if not loader.settings.persistent_workers:
        yield (epochs - loader.made, stats.total, PERSISTENT, {"persistent_workers": True})
    if loader.made > loader.at_once:  # workers never outlive their loader, whatever the settings
        fix = f"create the loader once, not {loader.made} times, with {PERSISTENT}"
        yield (epochs - loader.at_once, stats.total, fix, {})


def thread_oversubscription(stats: LoaderStats) -> RuleFinding | None:
    """Native threads (OpenMP, BLAS, OpenCV) of several workers compete for the same cores."""
    kernel, worked = stats.loader.kernel, stats.worked
    if not stats.starved or stats.workers < 2 or not worked or not kernel.seconds:
        return None
    own_s, all_s, delay_s = stats.loader.stages.worker.cpu_s, kernel.cpu_ns / 1e9, kernel.delay_ns / 1e9
    ratio = all_s / own_s if own_s > 0 else 0.0
    if own_s + delay_s < COMPUTES * worked:
        return None  # the tasks sleep, so they are not what lacks cores
    if all_s - own_s < EXCESS_CPU * worked or ratio < OVER_OWN_CPU or stats.delayed < DELAYED:
        return None
    if worked < AT_WORK * kernel.seconds:
        return None  # the worker is mostly idle, so its process's other CPU time does not come from its tasks
    return RuleFinding(
        stats.share,  # all work of the workers slows down
        {"cpu_of_all_threads_over_own": ratio, "delayed_share": stats.delayed},
        "use one native thread per worker: OMP_NUM_THREADS=1, cv2.setNumThreads(0)",
    )


def gil_bound(stats: LoaderStats) -> RuleFinding | None:
    """Threads that compute in Python, workers or a dataset's own pool, take turns holding the interpreter's lock.
    However many they are, together they use one core."""
    return _gil_bound_workers(stats) or _gil_bound_helpers(stats)


def _gil_bound_workers(stats: LoaderStats) -> RuleFinding | None:
    busy = stats.busy
    if stats.loader.settings.worker_method != "thread" or not stats.starved or busy is None:
        return None
    used = (stats.cpu + stats.step_cpu) / stats.loop
    if stats.workers < 2 or stats.cores < 2 or busy < 0.6 or not ONE_CORE[0] < used < ONE_CORE[1]:
        return None
    best = max(stats.step, (stats.cpu + stats.step_cpu) / stats.cores)
    return RuleFinding(
        stats.share * (1 - 1 / min(stats.workers, stats.cores)),
        {"cores_used": used},
        f"{stats.workers} threads use {used:.1f} cores together, because they compute in Python: use "
        'worker_method="process"',
        stats.loop / best if stats.period(stats.cores) else None,
        {"worker_method": "process"},
    )


def _gil_bound_helpers(stats: LoaderStats) -> RuleFinding | None:
    """Finds a fetching thread that waits for other threads of its process, which together use one core."""
    service, used = stats.service, stats.helper_cores
    if not stats.bottleneck or service is None or stats.cores < 2 or stats.waits < 0.5:
        return None
    if not ONE_HELPER_CORE[0] <= used <= ONE_HELPER_CORE[1]:
        return None
    more = stats.workers < stats.cores and not stats.loader.settings.no_workers
    return RuleFinding(
        stats.share,
        {"cores_used": used, "fetching_thread_waits": stats.waits},
        f"the dataset's own threads use {used:.1f} cores together, because they compute in Python: use worker "
        f"processes instead (num_workers={stats.cores})",
        max(1.0, stats.loop / max(stats.step, service / stats.cores)) if more else None,
        {"num_workers": stats.cores} if more else {},
    )
