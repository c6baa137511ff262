"""``worker_startup``: each epoch begins with a pause while workers start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .loader_stats import Finding, LoaderStats

LEAST = 0.15  # of the loop
FEW = 5  # epochs, that one of them might be a look at a batch
STAY = "persistent_workers=True"


def check(case: LoaderStats) -> Finding | None:
    epochs = int(case.loader["epochs"])
    if epochs < 2 or not case.workers or case.total <= 0:
        return None
    # A first batch takes a task's time at best, workers or not.
    pause = max(0.0, case.startup / epochs - (case.service or 0.0))
    for starts, total, fix, change in _ways(case, epochs):
        share = pause * starts / total
        if share * case.weight >= LEAST:
            evidence = {"pause_s": pause, "epochs": epochs, "num_workers": case.workers}
            said = f"each epoch begins with a pause of {pause * 1e3:,.0f} ms while workers start: {fix}"
            return Finding("worker_startup", share, evidence, said, 1 / (1 - share), change)
    return None


def _ways(case: LoaderStats, epochs: int) -> Iterator[tuple[int, float, str, dict[str, Any]]]:
    """What would help: how many starts it saves, of how many seconds, in words, and as a setting."""
    loader = case.loader
    made, at_once = int(loader.get("made", 1)), int(loader.get("at_once", 1))
    left = epochs - int(loader.get("ended", epochs))
    if epochs >= FEW and 2 * left > epochs and case.batches < 2 * epochs:  # next(iter(loader)), step for step
        fix = f"{left:,} are left after a batch; keep one iterator, it = iter(loader), and ask that, next(it)"
        yield epochs - 1, case.total + float(loader.get("between_s", 0.0)), fix, {}
        return
    if not loader["settings"].get("persistent_workers"):
        yield epochs - made, case.total, STAY, {"persistent_workers": True}
    if made > at_once:  # workers stay as long as their loader does, and no setting makes that longer
        yield epochs - at_once, case.total, f"make the loader once, not {made} times, with {STAY}", {}
