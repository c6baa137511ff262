"""The verdict on a run: healthy, input-bound, transfer-bound, or unknown if there are too few batches to judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from ..report.schema import Around, Finding, LoaderReport
from . import device, loop, memory, sample_code, storage, workers
from .loader_stats import MIN_BATCHES, STARVED, LoaderStats, RuleFinding, filling_epochs, later_epochs

RULES: tuple[Callable[[LoaderStats], RuleFinding | None], ...] = (
    workers.main_process_loading,
    workers.too_few_workers,
    workers.too_many_workers,
    workers.thread_oversubscription,
    storage.slow_storage,
    sample_code.slow_decode,
    sample_code.slow_transform,
    sample_code.slow_collate,
    loop.slow_transport,
    device.pageable_transfer,
    device.sync_transfer,
    device.batch_too_small,
    loop.prefetch_too_small,
    sample_code.stragglers,
    workers.gil_bound,
    workers.worker_startup,
    memory.memory_pressure,
    memory.worker_memory_growth,
    memory.shm_too_small,
    device.pin_memory_wasted,
    device.pin_memory_exhausts_ram,
    loop.checkpoint_or_logging,
)
FIRST, LAST, REMEDY = storage.cold_cache, workers.too_few_cores, sample_code.cacheable_prefix
STALE = "stale_cache"  # found by --apply; see report/applied.py
CAUSES = tuple(rule.__name__ for rule in (*RULES, FIRST, LAST))
TRANSFERS = ("pageable_transfer", "sync_transfer", "batch_too_small")
BY_HAND = (
    "no setting alone fixes this: the iterable dataset does not appear to call get_worker_info(), so each worker "
    "would yield all samples. Divide them in __iter__ (see stoker explain iterable-datasets), then"
)
BY_HAND_DRAWN = (
    "no setting alone fixes this: loading batches draws random numbers in the script's process, so with workers its "
    "later draws, such as the order of samples, would differ. If that is acceptable"
)
ABOUT_AS_MUCH = 0.1  # of the loop; see ``_rank``
MIN_SHARE = 0.03  # of the loop; cheaper findings are not worth a line


def diagnose(
    loaders: Sequence[LoaderReport],
    cores: int,
    cuda: bool,
    around: Around | None = None,
    gpus: int = 0,
    memory_granted: int = 0,
) -> tuple[str, list[Finding]]:
    """Returns the verdict and the findings, costliest first (see ``_rank``)."""
    seen = [loader for loader in loaders if loader.batches >= MIN_BATCHES]
    if not seen:
        return "unknown", []
    total = sum(loader.busy_s for loader in seen)
    findings: list[Finding] = []
    weights: dict[str, float] = {}
    waited = 0.0
    for loader in seen:
        weight = weights[loader.name] = loader.busy_s / total if total else 0.0
        usual = later_epochs(loader) if filling_epochs(loader) else loader  # a cache is filled only once
        stats = LoaderStats(usual, cores, cuda, around or Around(), weight, gpus, memory_granted)
        waited += stats.share * weight
        findings += _findings(stats)
    findings.sort(key=lambda f: _rank(f, weights[f.loader]), reverse=True)
    causes = [f for f in findings if f.cause != REMEDY.__name__]
    starved = waited >= STARVED or any(f.cause in ("worker_startup", "cold_cache") for f in findings)
    if causes and causes[0].cause in TRANSFERS and waited < STARVED:
        return "transfer-bound", findings
    return ("input-bound" if starved else "healthy"), findings


def _findings(stats: LoaderStats) -> list[Finding]:
    """Runs the rules on one loader. If ``FIRST`` finds a cold first epoch, the other rules see only later epochs.
    ``LAST`` runs only if nothing else was found."""
    cold = FIRST(stats)
    found = {FIRST.__name__: cold}
    if cold is not None:
        stats = replace(stats, loader=later_epochs(stats.loader))
    found |= {rule.__name__: rule(stats) for rule in RULES}
    if not any(found.values()) and stats.starved:
        found[LAST.__name__] = LAST(stats)
    found[REMEDY.__name__] = REMEDY(stats)
    worth = {cause: f for cause, f in found.items() if f is not None and not 0 < f.share < MIN_SHARE}
    why = BY_HAND if stats.repeats else BY_HAND_DRAWN if stats.loader.settings.draws and not stats.workers else ""
    if why:
        worth = {cause: _by_hand(f, why) for cause, f in worth.items()}
    return [
        Finding(cause, f.share, f.evidence, f.fix, f.predicted_speedup, f.change, stats.loader.name)
        for cause, f in worth.items()
    ]


def _by_hand(f: RuleFinding, why: str) -> RuleFinding:
    """Removes a change of ``num_workers``, for a loader whose samples it would change, and says why in the fix."""
    if "num_workers" not in f.change:
        return f
    change = {name: value for name, value in f.change.items() if name != "num_workers"}
    return msgspec.structs.replace(f, fix=f"{why}: {f.fix}", change=change)


def _rank(f: Finding, weight: float) -> float:
    """Ranks a cause by the time it costs, and the remedy by the time it saves plus ``ABOUT_AS_MUCH``, so that it comes
    before a cause that costs about as much. Predicted speed-ups of two causes are not comparable, because each assumes
    that its cause is gone entirely."""
    if f.cause != REMEDY.__name__:
        return f.share * weight
    saves = 1 - 1 / f.predicted_speedup if f.predicted_speedup else f.share
    return saves * weight + ABOUT_AS_MUCH
