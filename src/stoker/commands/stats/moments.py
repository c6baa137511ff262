"""Moments of images: what a worker says of a sample instead of its pixels, and how many such records become one.

Mean and sum of squared deviations are float64 and of one block of pixels at a time (two passes over it); blocks, images
and records are merged in pairs by the updating formula of Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", Stanford STAN-CS-79-773, 1979. No sum of squares is ever formed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK = 1 << 16  # pixels at once: half a megabyte a channel in float64, however large the image is


class Moments(NamedTuple):
    """Weight, mean and sum of weighted squared deviations; float64 arrays of one shape, such as [channels]."""

    n: Array
    mean: Array
    m2: Array


class Group(NamedTuple):
    """Images of one channel count and one unit.

    Attributes:
        pixels: of the finite values, [channels].
        clusters: of the samples' means, each weighted by the square of its number of pixels: what the standard error of
            the mean needs, for pixels of one image are no independent draws.
        low, high: of the finite values, [channels] float64; inf and -inf where there are none.
        nan, inf: counts, [channels] int64.
        images, samples: how many; a sample that is a batch has several images.
    """

    pixels: Moments
    clusters: Moments
    low: Array
    high: Array
    nan: Array
    inf: Array
    images: int
    samples: int


class Failed(NamedTuple):
    """A sample that could not be read.

    Attributes:
        sample: its index in the dataset; in a stream the place in its worker's part.
        file: its file, where the error or the dataset knows it.
        error: type and message.
    """

    sample: int
    file: str | None
    error: str


class Record(NamedTuple):
    """What is known of some samples.

    Attributes:
        samples: how many, unreadable ones included.
        groups: by channel count and by what a uint8 scale divides by (255; 1 for other types).
        shapes, dtypes, layouts: how many samples had which.
        failed: those that raised.
        imageless: those with no image in them.
        random: samples that came out differently when they were read twice.
    """

    samples: int = 1
    groups: Mapping[tuple[int, int], Group] = {}
    shapes: Mapping[str, int] = {}
    dtypes: Mapping[str, int] = {}
    layouts: Mapping[str, int] = {}
    failed: tuple[Failed, ...] = ()
    imageless: tuple[Failed, ...] = ()
    random: int = 0


def merged(a: Moments, b: Moments) -> Moments:
    """The moments of both, elementwise (Chan, Golub and LeVeque, 1979).

    Example:
        >>> one, two = (Moments(np.ones(1), np.array([x]), np.zeros(1)) for x in (1.0, 3.0))
        >>> [float(x[0]) for x in merged(one, two)]
        [2.0, 2.0, 2.0]
    """
    n = a.n + b.n
    part = np.divide(b.n, n, out=np.zeros_like(n), where=n > 0)
    delta = b.mean - a.mean
    return Moments(n, a.mean + delta * part, a.m2 + b.m2 + delta * (delta * (a.n * part)))


def pairwise(parts: Sequence[Moments]) -> Moments:
    """The moments of all, merged in pairs, then pairs of pairs: rounding grows with the logarithm of their number."""
    if len(parts) == 1:
        return parts[0]
    all_ = Moments(*(np.stack(field) for field in zip(*parts, strict=True)))
    while len(all_.n) > 1:
        even = len(all_.n) & ~1
        pairs = merged(Moments(*(x[0:even:2] for x in all_)), Moments(*(x[1:even:2] for x in all_)))
        all_ = Moments(*(np.concatenate([p, x[even:]]) for p, x in zip(pairs, all_, strict=True)))
    return Moments(*(x[0] for x in all_))


def _block(values: Array) -> Group:
    """Of ``values`` [channels, pixels] of any real type."""
    x = values.astype(np.float64, order="C")  # HWC comes as a view of pixels that lie three apart
    n = np.full(len(x), float(x.shape[1]))
    nan = inf = np.zeros(len(x), np.int64)
    finite = np.isfinite(x) if values.dtype.kind == "f" else None
    if finite is None or finite.all():
        low, high = x.min(1), x.max(1)
        mean = np.add.reduce(x, 1) / n
        x -= mean[:, None]
    else:
        nan = np.isnan(x).sum(1)
        inf = (~finite).sum(1) - nan
        n = n - nan - inf
        low, high = np.where(finite, x, np.inf).min(1), np.where(finite, x, -np.inf).max(1)
        mean = np.add.reduce(np.where(finite, x, 0.0), 1) / np.maximum(n, 1)
        x = np.where(finite, x, mean[:, None]) - mean[:, None]
    rest = np.add.reduce(x, 1)  # what rounding left of the mean
    m2 = np.einsum("cp,cp->c", x, x) - rest * rest / np.maximum(n, 1)
    return Group(Moments(n, mean, np.maximum(m2, 0.0)), Moments(n, mean, n), low, high, nan, inf, 0, 0)


def _join(parts: Sequence[Group]) -> Group:
    low, high, nan, inf = (np.stack([p[i] for p in parts]) for i in range(2, 6))
    return Group(
        pairwise([p.pixels for p in parts]),
        pairwise([p.clusters for p in parts]),
        low.min(0),
        high.max(0),
        nan.sum(0),
        inf.sum(0),
        sum(p.images for p in parts),
        sum(p.samples for p in parts),
    )


def group_of(values: Array, images: int) -> Group:
    """Of one sample: ``values`` [channels, pixels] of any real type, those of all its images."""
    with np.errstate(over="ignore", invalid="ignore"):  # 1e200 squared is inf, and is shown as such
        blocks = [_block(values[:, i : i + BLOCK]) for i in range(0, values.shape[1], BLOCK)]
        whole = _join(blocks) if len(blocks) > 1 else blocks[0]
    n, mean, _ = whole.pixels
    return whole._replace(clusters=Moments(n * n, mean, np.zeros_like(n)), images=images, samples=1)


def joined(records: Sequence[Record]) -> Record:
    """One record of many; as ``collate_fn`` in the worker, so that what travels does not grow with the batch."""
    groups: dict[tuple[int, int], list[Group]] = {}
    shapes, dtypes, layouts = (Counter[str]() for _ in range(3))
    for r in records:
        for key, group in r.groups.items():
            groups.setdefault(key, []).append(group)
        for seen, more in ((shapes, r.shapes), (dtypes, r.dtypes), (layouts, r.layouts)):
            for name, count in more.items():
                seen[name] += count
    with np.errstate(over="ignore", invalid="ignore"):
        whole = {key: _join(parts) for key, parts in groups.items()}
    return Record(
        sum(r.samples for r in records),
        whole,
        shapes,
        dtypes,
        layouts,
        tuple(f for r in records for f in r.failed),
        tuple(f for r in records for f in r.imageless),
        sum(r.random for r in records),
    )
