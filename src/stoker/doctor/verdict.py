"""The verdict on a run: healthy, input-bound, or unknown where the evidence does not decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Case, Finding, main_process_loading, too_few_workers

RULES: tuple[Callable[[Case], Finding | None], ...] = (main_process_loading.check, too_few_workers.check)
STARVED = 0.10  # a loop that waits a tenth of its time is worth somebody's evening
FEW = 5  # batches; below that a wait is start-up and noise


def diagnose(loaders: list[dict[str, Any]], cores: int, cuda: bool) -> tuple[str, list[Finding]]:
    """Verdict and findings, the costliest first.

    Args:
        loaders: the report's ``loaders``.
        cores: cores granted.
        cuda: whether the script used CUDA, where waiting in ``next()`` only bounds the device's idle time from above.
    """
    seen = [entry for entry in loaders if entry["batches"] >= FEW]
    if not seen:
        return "unknown", []
    cases = [Case(entry, cores, cuda) for entry in seen]
    total = sum((case.wait + case.step) * case.batches for case in cases)
    findings = []
    waited = 0.0
    for case in cases:
        weight = (case.wait + case.step) * case.batches / total if total else 0.0
        waited += case.share * weight
        if case.share * weight < STARVED:
            continue
        findings += [f for f in (rule(case) for rule in RULES) if f is not None]
    findings.sort(key=lambda f: -f.share)
    return ("input-bound" if waited >= STARVED else "healthy"), findings
