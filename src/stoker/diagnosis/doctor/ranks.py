"""Ranks of a distributed run beside each other: one whose loader is late makes all others wait in their collectives."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ..report.merge import Snapshot
from ..report.schema import Ranks, RankWait

SLOWER = 2.0  # than the median of the others' wait
MIN_WAIT = 0.1  # of its loop


def compare(snapshots: Iterable[Snapshot]) -> Ranks | None:
    """What each rank waited for, first batches left out, and the one that makes the others wait; None for one rank."""
    by_rank: dict[int, RankWait] = {}
    for s in snapshots:
        if s.world < 2:
            continue
        rank = by_rank.setdefault(s.rank, RankWait(s.rank))
        for m in s.loaders:
            rank.batches += m.batches
            rank.wait_s += m.wait_s - m.first_wait_s
            rank.step_s += m.step_s
    if len(by_rank) < 2:
        return None
    each = [by_rank[rank] for rank in sorted(by_rank)]
    waits = {r.rank: r.wait_s / max(1, r.batches) for r in each}
    worst = max(each, key=lambda r: waits[r.rank])
    others = statistics.median(wait for rank, wait in waits.items() if rank != worst.rank)
    share = worst.wait_s / max(1e-9, worst.wait_s + worst.step_s)
    starves = waits[worst.rank] > SLOWER * others and share >= MIN_WAIT
    return Ranks(each, worst.rank if starves else None)
