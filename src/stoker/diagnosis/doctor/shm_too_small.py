"""``shm_too_small``: torch's batches cross in /dev/shm, and it is nearly full."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

LEAST = 32 << 20


def check(case: LoaderStats) -> Finding | None:
    free = case.around.get("shm_free_min")
    if free is None or free >= LEAST or not case.workers or case.loader["settings"].get("engine") != "torch":
        return None
    return Finding(
        "shm_too_small",
        0.0,
        {"shm_free_min": free},
        f"/dev/shm had {free >> 20} MB left: docker run --shm-size=1g, or stoker.DataLoader, "
        "whose batches do not lie there",
        None,
    )
