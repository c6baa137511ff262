"""What a worker reports about samples in place of their pixels, and how two such records are merged.

Mean and sum of squared deviations are float64, in two passes over a block of pixels. Blocks, images and records are
merged by the updating formula of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
sample variances", Stanford STAN-CS-79-773, 1979. A sum of squares, whose difference would lose digits, is never formed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 16  # pixels at once: half a megabyte a channel in float64, however large the image is


class Group(NamedTuple):
    """Images of one channel count and one unit; arrays have a number for each channel.

    Attributes:
        images: how many.
        n: finite values.
        mean: of these.
        m2: sum of their squared deviations.
        low, high: the least and the greatest; inf and -inf if there are none.
        nan, inf: counts of values that are left out.
    """

    images: int
    n: NDArray[np.float64]
    mean: NDArray[np.float64]
    m2: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    nan: NDArray[np.int64]
    inf: NDArray[np.int64]


@dataclass
class Record:
    """What is known about some samples.

    Attributes:
        samples: how many.
        groups: by channel count and scale (255 for uint8; 1 for other types).
        shapes, dtypes, layouts: how many samples have which.
    """

    samples: int = 1
    groups: dict[tuple[int, int], Group] = field(default_factory=dict)
    shapes: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)


def group_of(values: NDArray[Any], images: int) -> Group:
    """Of one sample: ``values`` [channels, pixels] of any real type, those of all its images."""
    with np.errstate(over="ignore", invalid="ignore"):  # 1e200 squared is inf, and is shown as such
        blocks = [_block(values[:, i : i + BLOCK]) for i in range(0, values.shape[1], BLOCK)]
        return functools.reduce(merged, blocks)._replace(images=images)


def _block(values: NDArray[Any]) -> Group:
    x = values.astype(np.float64, order="C")  # HWC comes as a view of pixels that are three values apart
    n = np.full(len(x), x.shape[1])
    nan = inf = np.zeros(len(x), np.int64)
    low, high = x, x
    finite = np.isfinite(x) if values.dtype.kind == "f" else np.True_
    if not finite.all():
        n, nan = finite.sum(1), np.isnan(x).sum(1)
        inf = x.shape[1] - n - nan
        low, high = np.where(finite, x, np.inf), np.where(finite, x, -np.inf)
        x = np.where(finite, x, 0.0)
    mean = x.sum(1) / np.maximum(n, 1)
    x = x - mean[:, None]
    x = x if finite.all() else np.where(finite, x, 0.0)
    rounding = x.sum(1)  # what rounding left of the mean
    m2 = np.einsum("cp,cp->c", x, x) - rounding * rounding / np.maximum(n, 1)
    return Group(0, n.astype(np.float64), mean, np.maximum(m2, 0.0), low.min(1), high.max(1), nan, inf)


def merged(a: Group, b: Group) -> Group:
    """The group of both (Chan, Golub and LeVeque, 1979).

    Example:
        >>> both = merged(group_of(np.array([[1.0]]), 1), group_of(np.array([[3.0]]), 1))
        >>> [float(x[0]) for x in (both.n, both.mean, both.m2)]
        [2.0, 2.0, 2.0]
    """
    n = a.n + b.n
    share = np.divide(b.n, n, out=np.zeros_like(n), where=n > 0)
    delta = b.mean - a.mean
    return Group(
        a.images + b.images,
        n,
        a.mean + delta * share,
        a.m2 + b.m2 + delta * (delta * (a.n * share)),
        np.minimum(a.low, b.low),
        np.maximum(a.high, b.high),
        a.nan + b.nan,
        a.inf + b.inf,
    )


def joined(records: Sequence[Record]) -> Record:
    """One record of many; the ``collate_fn`` of the workers, so that what they send does not grow with the batch."""
    out = Record(0)
    with np.errstate(over="ignore", invalid="ignore"):
        for record in records:
            out.samples += record.samples
            for key, group in record.groups.items():
                out.groups[key] = merged(out.groups[key], group) if key in out.groups else group
            out.shapes.update(record.shapes)
            out.dtypes.update(record.dtypes)
            out.layouts.update(record.layouts)
    return out
