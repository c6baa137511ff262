"""Compares the ranks of a distributed run: a rank whose loader is late makes all others wait in their collectives, and
one with fewer batches makes them wait forever."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ...core.metrics import LoaderMetrics
from ..report.merge import Snapshot
from ..report.schema import Ranks, RankWait, Unequal

SLOWER = 2.0  # times the median wait of the other ranks
MIN_WAIT = 0.1  # of the rank's loop


def compare(snapshots: Iterable[Snapshot]) -> Ranks | None:
    """Returns each rank's wait (without first batches), the rank that starves the others, and loaders whose numbers of
    batches differ between ranks. None if there are fewer than two ranks."""
    by_rank: dict[int, RankWait] = {}
    loaders: dict[str, dict[int, LoaderMetrics]] = {}
    ranks = 0  # world size of the last snapshot
    for s in snapshots:
        if s.world < 2:
            continue
        if s.world != ranks:
            ranks, loaders = s.world, {}
        rank = by_rank.setdefault(s.rank, RankWait(s.rank))
        for m in s.loaders:
            rank.batches += m.batches
            rank.wait_s += m.wait_s - m.first_wait_s
            rank.step_s += m.step_s
            loaders.setdefault(m.name, {})[s.rank] = m
    if len(by_rank) < 2:
        return None
    each = [by_rank[rank] for rank in sorted(by_rank)]
    waits = {r.rank: r.wait_s / max(1, r.batches) for r in each}
    worst = max(each, key=lambda r: waits[r.rank])
    others = statistics.median(wait for rank, wait in waits.items() if rank != worst.rank)
    share = worst.wait_s / max(1e-9, worst.wait_s + worst.step_s)
    starves = waits[worst.rank] > SLOWER * others and share >= MIN_WAIT
    unequal = [Unequal(name, sorted(found)) for name, of in loaders.items() if (found := _unequal(list(of.items())))]
    return Ranks(each, worst.rank if starves else None, unequal)


def _unequal(of_ranks: Sequence[tuple[int, LoaderMetrics]]) -> list[tuple[int, int]]:
    """Returns each rank's number of batches in an epoch if the numbers differ, else an empty list.

    If lengths are not known in advance, as with iterable datasets, compares epochs that at least one rank has ended: in
    these no other rank may have more batches."""
    lengths = [(rank, m.settings.get("length")) for rank, m in of_ranks]
    known = [(rank, int(n)) for rank, n in lengths if n is not None]
    if known:
        return known if len({n for _, n in known}) > 1 else []
    counts = {rank: _by_epoch(m) for rank, m in of_ranks}
    for epoch in range(max((m.ended for _, m in of_ranks), default=0)):
        rows = [(rank, m.ended > epoch, counts[rank][epoch]) for rank, m in of_ranks if len(counts[rank]) > epoch]
        ended = [n for _, over, n in rows if over]
        if ended and any(n > min(ended) or (over and n != ended[0]) for _, over, n in rows):
            return [(rank, n) for rank, _, n in rows]
    return []


def _by_epoch(m: LoaderMetrics) -> list[int]:
    """Returns the batches of each epoch. If the process was killed, its last ones are counted only in the total."""
    rows = [int(row[0]) for row in m.by_epoch]
    missing = m.batches - sum(rows)
    if len(rows) == m.epochs - 1:
        rows.append(missing)
    elif rows and len(rows) == m.epochs:
        rows[-1] += missing
    return rows
