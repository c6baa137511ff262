"""``worker_startup``: each epoch begins with a pause while workers start."""

from __future__ import annotations

from typing import Any

from . import Case, Finding

LEAST = 0.15  # of the loop
STAY = {"persistent_workers": True}


def check(case: Case) -> Finding | None:
    epochs = int(case.loader["epochs"])
    if epochs < 2 or not case.workers or case.total <= 0:
        return None
    made, at_once = int(case.loader.get("made", 1)), int(case.loader.get("at_once", 1))
    # A first batch takes a task's time at best, workers or not.
    pause = max(0.0, case.startup / epochs - (case.service or 0.0))
    ways: list[tuple[int, str, dict[str, Any]]] = []
    if not case.loader["settings"].get("persistent_workers"):
        ways.append((epochs - made, "persistent_workers=True", STAY))
    if made > at_once:  # workers stay as long as their loader does, and no setting makes that longer
        ways.append((epochs - at_once, f"make the loader once, not {made} times, with persistent_workers=True", {}))
    for starts, fix, change in ways:
        share = pause * starts / case.total
        if share * case.weight >= LEAST:
            evidence = {"pause_s": pause, "epochs": epochs, "made": made, "num_workers": case.workers}
            said = f"each epoch begins with a pause of {pause * 1e3:,.0f} ms while workers start: {fix}"
            return Finding("worker_startup", share, evidence, said, 1 / (1 - share), change)
    return None
