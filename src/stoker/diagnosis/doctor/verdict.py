"""The verdict on a run: healthy, input-bound, or unknown where the evidence does not decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import (
    batch_too_small,
    cacheable_prefix,
    checkpoint_or_logging,
    cold_cache,
    gil_bound,
    main_process_loading,
    memory_pressure,
    pageable_transfer,
    pin_memory_exhausts_ram,
    pin_memory_wasted,
    prefetch_too_small,
    shm_too_small,
    slow_collate,
    slow_decode,
    slow_storage,
    slow_transform,
    slow_transport,
    stragglers,
    sync_transfer,
    thread_oversubscription,
    too_few_cores,
    too_few_workers,
    too_many_workers,
    worker_memory_growth,
    worker_startup,
)
from .later import filled, later
from .loader_stats import STARVED, Finding, LoaderStats

RULES: tuple[Callable[[LoaderStats], Finding | None], ...] = (
    main_process_loading.check,
    too_few_workers.check,
    too_many_workers.check,
    thread_oversubscription.check,
    slow_storage.check,
    slow_decode.check,
    slow_transform.check,
    slow_collate.check,
    slow_transport.check,
    pageable_transfer.check,
    sync_transfer.check,
    batch_too_small.check,
    prefetch_too_small.check,
    stragglers.check,
    gil_bound.check,
    worker_startup.check,
    memory_pressure.check,
    worker_memory_growth.check,
    shm_too_small.check,
    pin_memory_wasted.check,
    pin_memory_exhausts_ram.check,
    checkpoint_or_logging.check,
)
CAUSES = tuple(rule.__module__.rpartition(".")[2] for rule in (*RULES, cold_cache.check, too_few_cores.check))
TRANSFERS = ("pageable_transfer", "sync_transfer", "batch_too_small")
LEAST = 0.03  # of the loop; what costs less is not worth a line
FEW = 5  # batches; below that a wait is start-up and noise


def diagnose(
    loaders: list[dict[str, Any]],
    cores: int,
    cuda: bool,
    around: dict[str, Any] | None = None,
    gpus: int = 0,
    memory: int = 0,
) -> tuple[str, list[Finding]]:
    """Verdict and findings, what brings most first.

    Args:
        loaders: the report's ``loaders``.
        cores: cores granted.
        cuda: whether the script used CUDA, where waiting in ``next()`` only bounds the device's idle time from above.
        around: what the machine did meanwhile.
        gpus: accelerators that are there.
        memory: bytes that are granted.
    """
    seen = [entry for entry in loaders if entry["batches"] >= FEW]
    if not seen:
        return "unknown", []
    total = sum(float(entry["wait_s"]) + float(entry["step_s"]) for entry in seen)
    findings: list[Finding] = []
    weights: dict[str, float] = {}
    waited = 0.0
    for entry in seen:
        weight = weights[entry["name"]] = (float(entry["wait_s"]) + float(entry["step_s"])) / total if total else 0.0
        case = LoaderStats(entry, cores, cuda, around or {}, weight, gpus, memory)
        if filled(entry):  # while a cache was filled is not how it goes on
            case = replace(case, loader=later(entry))
        waited += case.share * weight
        cold = cold_cache.check(case)
        if cold is not None:
            case = replace(case, loader=later(entry))
        found = [f for f in (cold, *(rule(case) for rule in RULES)) if f is not None]
        if not found and case.starved:
            found = [f for f in (too_few_cores.check(case),) if f is not None]
        remedy = cacheable_prefix.check(case)
        found += [] if remedy is None else [remedy]
        findings += [replace(f, loader=entry["name"]) for f in found if not 0 < f.share < LEAST]
    findings.sort(key=lambda f: _rank(f, weights[f.loader]), reverse=True)
    causes = [f for f in findings if f.cause != "cacheable_prefix"]
    starved = waited >= STARVED or any(f.cause in ("worker_startup", "cold_cache") for f in findings)
    if causes and causes[0].cause in TRANSFERS and waited < STARVED:
        return "transfer-bound", findings
    return ("input-bound" if starved else "healthy"), findings


def _rank(f: Finding, weight: float) -> tuple[float, bool, float]:
    """By what it brings; of two that bring about as much the one that stoker does itself comes first."""
    return round(f.brings * weight, 1), f.cause == cacheable_prefix.__name__.rpartition(".")[2], f.brings * weight
