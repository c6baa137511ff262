"""``pin_memory_wasted``: batches are copied to page-locked memory for an accelerator that is not there."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats


def check(case: LoaderStats) -> Finding | None:
    if not case.loader["settings"].get("pin_memory") or case.cuda or case.gpus:
        return None
    return Finding(
        "pin_memory_wasted",
        0.0,
        {"pin_memory": True, "accelerators": 0},
        "pin_memory=False: there is no accelerator",
        None,
        {"pin_memory": False},
    )
