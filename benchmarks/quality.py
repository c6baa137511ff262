"""How far an order of samples is from a uniform shuffle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from stoker import ChunkSampler


class Quality(NamedTuple):
    """How far an order is from a uniform shuffle, which has about 0, 0 and 1.

    Attributes:
        rank_correlation: Spearman's, of place and index ("The Proof and Measurement of Association between Two Things",
            1904). Over ``n`` samples a uniform shuffle has a standard deviation of 1/sqrt(n).
        distance: for each tenth of the data the Kolmogorov-Smirnov distance between where in the epoch its samples
            stand and everywhere alike; the mean of the ten. A uniform shuffle has 0.82/sqrt(n/10) (the mean of
            Kolmogorov's distribution, for a tenth drawn without replacement), no shuffle 0.7.
        neighbours: pairs of samples in a batch that come from the same chunk, on average over full batches, as a
            multiple of what a uniform shuffle has.
    """

    rank_correlation: float
    distance: float
    neighbours: float


def quality(order: Iterable[int], n: int, chunk_size: int | None = None, batch_size: int = 64) -> Quality:
    """Measures one epoch's order.

    Args:
        order: the indices of an epoch, at least 10, each at most once.
        n: length of the dataset.
        chunk_size: samples in a chunk, for ``neighbours``; None: ``ChunkSampler``'s for this length.
        batch_size: at least 2.

    Example:
        >>> quality(range(1000), 1000, chunk_size=100, batch_size=10)
        Quality(rank_correlation=1.0, distance=0.7, neighbours=10.090909090909)
    """
    indices = np.asarray(order if isinstance(order, np.ndarray) else list(order), np.int64)
    m = len(indices)
    rank = np.empty(m)
    rank[np.argsort(indices)] = np.arange(m)
    correlation = float(np.corrcoef(np.arange(m), rank)[0, 1])

    apart = []
    tenth = indices * 10 // n
    for d in range(10):
        at = np.flatnonzero(tenth == d)
        if len(at):
            seen = np.arange(len(at))
            above, below = (seen + 1) / len(at) - (at + 1) / m, at / m - seen / len(at)
            apart.append(max(abs(above).max(), abs(below).max()))

    chunk = indices // (chunk_size or ChunkSampler(range(n)).chunk_size)
    full = m // batch_size
    batch = np.arange(full * batch_size) // batch_size
    together = np.unique(batch * (chunk.max() + 1) + chunk[: len(batch)], return_counts=True)[1]
    pairs = float((together * (together - 1)).sum()) / max(1, full)
    every = np.bincount(chunk).astype(float)
    uniform = batch_size * (batch_size - 1) * float((every * (every - 1)).sum()) / (m * (m - 1))
    ratio = pairs / uniform if uniform else 1.0
    return Quality(*(round(x, 12) for x in (correlation, float(np.mean(apart)), ratio)))
