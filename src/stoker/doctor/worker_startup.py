"""``worker_startup``: each epoch begins with a pause while workers start."""

from __future__ import annotations

from . import Case, Finding

LEAST = 0.15  # of the loop


def check(case: Case) -> Finding | None:
    epochs, settings = int(case.loader["epochs"]), case.loader["settings"]
    if epochs < 2 or not case.workers or settings.get("persistent_workers") or case.total <= 0:
        return None
    # A first batch takes a task's time at best, workers or not.
    pause = max(0.0, case.startup / epochs - (case.service or 0.0))
    saved = pause * (epochs - 1)
    share = saved / case.total
    if share * case.weight < LEAST:
        return None
    return Finding(
        "worker_startup",
        share,
        {"pause_s": pause, "epochs": epochs, "num_workers": case.workers},
        f"each epoch begins with a pause of {pause * 1e3:,.0f} ms while workers start: persistent_workers=True",
        1 / (1 - share),
        {"persistent_workers": True},
    )
