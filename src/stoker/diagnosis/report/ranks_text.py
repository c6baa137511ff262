"""The text report's section about the ranks of a distributed run."""

from __future__ import annotations

import textwrap

from ...core.terminal import human_seconds, short, table
from .schema import Ranks, Unequal

MAX_RANKS = 16  # ranks in the table; if there are more, those that waited longest


def rank_lines(ranks: Ranks, columns: int) -> list[str]:
    """Returns a table of what each rank waited, followed by ``rank_sentences``."""
    out = ["", _table(ranks, columns)]
    if len(ranks.each) > MAX_RANKS:
        out.append(f"of {len(ranks.each)} ranks those that waited longest")
    return out + ["\n".join(textwrap.wrap(text, columns, subsequent_indent="  ")) for text in rank_sentences(ranks)]


def rank_sentences(ranks: Ranks | None) -> list[str]:
    """Returns sentences on loaders with unequal numbers of batches, and on the rank that makes the others wait."""
    if ranks is None:
        return []
    out = [_unequal(loader) for loader in ranks.unequal]
    return out if ranks.starving is None else [*out, _starving(ranks, ranks.starving)]


def _table(ranks: Ranks, columns: int) -> str:
    longest = sorted(ranks.each, key=lambda r: -r.wait_s)[:MAX_RANKS]
    rows = []
    for r in sorted(longest, key=lambda r: r.rank):
        busy_s, batches = r.wait_s + r.step_s, max(1, r.batches)
        share = f"{r.wait_s / busy_s if busy_s else 0.0:.0%}"
        rows.append([f"{r.rank}", f"{r.batches:,}", human_seconds(r.wait_s), share, human_seconds(r.step_s / batches)])
    return table(["rank", "batches", "waited", "of loop", "step"], rows, columns)


def _unequal(loader: Unequal) -> str:
    least = min(loader.batches, key=lambda pair: pair[1])
    most = max(loader.batches, key=lambda pair: pair[1])
    return (
        f"{short(loader.loader)}: ranks have unequal numbers of batches in an epoch: rank {least[0]} has {least[1]:,}, "
        f"rank {most[0]} {most[1]:,}. A collective in the loop then waits for ever. Use a DistributedSampler, or "
        "drop_last=True on equal shares"
    )


def _starving(ranks: Ranks, starving: int) -> str:
    waits = {r.rank: r.wait_s / max(1, r.batches) for r in ranks.each}
    others = max(wait for rank, wait in waits.items() if rank != starving)
    return (
        f"rank {starving} starves the others: it waits {human_seconds(waits[starving])} for a batch, they at most "
        f"{human_seconds(others)}, and then for it"
    )
