"""Ranks of a distributed run beside each other: one whose loader is late makes all others wait in their collectives."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

SLOWER = 2.0  # the median of the others' wait
LEAST = 0.1  # of its loop


def compare(snapshots: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """What each rank waited for, and the one that starves the others.

    Args:
        snapshots: of all processes; those that belong to no group have ``world`` 1.

    Returns:
        ``{"each": [{"rank", "batches", "wait_s", "step_s"}], "starving": rank or None}``; None for one rank.

    Example:
        >>> loader = {"batches": 10, "wait_s": 0.1, "first_wait_s": 0.0, "step_s": 1.0}
        >>> late = {**loader, "wait_s": 0.9, "step_s": 0.2}
        >>> ranks = [{"rank": 0, "world": 2, "loaders": [loader]}, {"rank": 1, "world": 2, "loaders": [late]}]
        >>> compare(ranks)["starving"]
        1
    """
    by_rank: dict[int, dict[str, float]] = {}
    for s in snapshots:
        if int(s.get("world", 1)) < 2:
            continue
        sums = by_rank.setdefault(int(s["rank"]), {"batches": 0, "wait_s": 0.0, "step_s": 0.0})
        for m in s["loaders"]:
            sums["batches"] += m["batches"]
            sums["wait_s"] += m["wait_s"] - m["first_wait_s"]
            sums["step_s"] += m["step_s"]
    if len(by_rank) < 2:
        return None
    waits = {rank: sums["wait_s"] / max(1, sums["batches"]) for rank, sums in by_rank.items()}
    worst = max(waits, key=lambda rank: waits[rank])
    others = statistics.median(wait for rank, wait in waits.items() if rank != worst)
    sums = by_rank[worst]
    share = sums["wait_s"] / max(1e-9, sums["wait_s"] + sums["step_s"])
    starves = waits[worst] > SLOWER * others and share >= LEAST
    return {
        "each": [{"rank": rank, **by_rank[rank]} for rank in sorted(by_rank)],
        "starving": worst if starves else None,
    }
