"""For ``stoker stats``: the record that a worker computes from a sample, and how records merge. Workers send no pixels.

Mean and sum of squared deviations are float64, computed in two passes over a block of pixels. Blocks, images and
records are merged with the updating formula of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", Stanford STAN-CS-79-773, 1979. No sum of squares is formed, since subtracting from it loses
digits.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.types import Index, MapDataset, Sample

BLOCK = 1 << 16  # pixels at a time: half a megabyte per channel in float64, however large the image is
MAX_DESCRIPTION = 300  # characters
Pixels = NDArray[np.generic]  # of any real type


class NoImage(Exception):
    """Raised if a sample has no image; the message says what the sample is instead."""


class ChannelGroup(NamedTuple):
    """Statistics of images with the same channel count and unit. Arrays have shape [channels]."""

    images: int
    n: NDArray[np.float64]  # number of finite values
    mean: NDArray[np.float64]
    m2: NDArray[np.float64]  # the sum of their squared deviations
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    nan: NDArray[np.int64]
    inf: NDArray[np.int64]


@dataclass
class ImageRecord:
    """The statistics of some samples. ``groups`` is keyed by channel count and scale (255 for uint8, else 1)."""

    samples: int = 1
    groups: dict[tuple[int, int], ChannelGroup] = field(default_factory=dict)
    shapes: Counter[str] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)


def group_of(values: Pixels, images: int) -> ChannelGroup:
    """Computes the group of one sample. ``values`` holds the pixels of all its images, with shape [channels, pixels]
    and of a real dtype."""
    with np.errstate(over="ignore", invalid="ignore"):  # 1e200 squared overflows to inf, and is shown as such
        blocks = [_block(values[:, i : i + BLOCK]) for i in range(0, values.shape[1], BLOCK)]
        return functools.reduce(merged, blocks)._replace(images=images)


def _block(values: Pixels) -> ChannelGroup:
    x = values.astype(np.float64, order="C")  # HWC images arrive as strided views
    finite, nan = np.isfinite(x), np.isnan(x).sum(1)
    n = finite.sum(1)
    inf = x.shape[1] - n - nan
    low, high = np.where(finite, x, np.inf), np.where(finite, x, -np.inf)
    mean = np.where(finite, x, 0.0).sum(1) / np.maximum(n, 1)
    x = np.where(finite, x - mean[:, None], 0.0)
    rounding = x.sum(1)  # 0 but for the mean's rounding error, which is corrected below
    m2 = np.einsum("cp,cp->c", x, x) - rounding * rounding / np.maximum(n, 1)
    return ChannelGroup(0, n.astype(np.float64), mean, np.maximum(m2, 0.0), low.min(1), high.max(1), nan, inf)


def merged(a: ChannelGroup, b: ChannelGroup) -> ChannelGroup:
    """Merges two groups (Chan, Golub and LeVeque, 1979)."""
    n = a.n + b.n
    share = np.divide(b.n, n, out=np.zeros_like(n), where=n > 0)
    delta = b.mean - a.mean
    return ChannelGroup(
        a.images + b.images,
        n,
        a.mean + delta * share,
        a.m2 + b.m2 + delta * (delta * (a.n * share)),
        np.minimum(a.low, b.low),
        np.maximum(a.high, b.high),
        a.nan + b.nan,
        a.inf + b.inf,
    )


def joined(records: Sequence[ImageRecord]) -> ImageRecord:
    """Merges records into one. Used as the workers' ``collate_fn``, so that messages do not grow with the batch."""
    out = ImageRecord(0)
    with np.errstate(over="ignore", invalid="ignore"):
        for record in records:
            out.samples += record.samples
            for key, group in record.groups.items():
                out.groups[key] = merged(out.groups[key], group) if key in out.groups else group
            out.shapes.update(record.shapes)
            out.types.update(record.types)
    return out


def _is_pil(thing: object) -> bool:
    pil = sys.modules.get("PIL.Image")  # a PIL image exists only if this is imported
    return pil is not None and isinstance(thing, pil.Image)


def _is_image(thing: object, kinds: str) -> bool:
    """Returns whether ``thing`` is a PIL image, or a 2- to 4-D tensor or array of uint8 or one of these NumPy kinds."""
    if isinstance(thing, torch.Tensor):
        dtype = thing.dtype
        kind = "f" if dtype.is_floating_point else "c" if dtype.is_complex else "b" if dtype == torch.bool else "i"
    elif isinstance(thing, np.ndarray):
        kind = thing.dtype.kind
    else:
        return _is_pil(thing)
    return 2 <= thing.ndim <= 4 and (kind in kinds or thing.dtype in (torch.uint8, np.uint8))


def _leaves(sample: Sample) -> Iterator[Sample]:
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        yield from (leaf for part in sample for leaf in _leaves(part))
    else:
        yield sample


def record_in(key: str | None, layout: str | None, dataset: MapDataset, index: Index) -> ImageRecord:
    """Reads a sample and computes its record. Raises ValueError if its image has no pixels."""
    return _record_of(_image_in(dataset[index], key), layout)


def _image_in(sample: Sample, key: str | None) -> Sample:
    """Finds the image of a sample: the first one in the part that ``key`` names. Without a key, the first one at any
    depth of floating type or uint8, or else of another integer type."""
    if key is not None:
        part = int(key) if isinstance(sample, (list, tuple)) and key.isdigit() else key
        try:
            sample = getattr(sample, key) if hasattr(sample, key) else sample[part]
        except (LookupError, TypeError):
            raise NoImage(f"there is no {key!r} in a sample: it is a {type(sample).__name__}") from None
    for kinds in ("f", "iu") if key is None else ("fiub",):
        for leaf in _leaves(sample):
            if _is_image(leaf, kinds):
                return leaf
    parts = list(_leaves(sample))
    found = ", ".join(f"{type(x).__name__} {tuple(getattr(x, 'shape', ()))}".removesuffix(" ()") for x in parts)
    raise NoImage(f"no image, but {found[:MAX_DESCRIPTION]}")


def _record_of(image: Sample, layout: str | None) -> ImageRecord:
    """Computes the record of an image. Without ``layout``, channels are the shorter of the first and last axis; if both
    are equal, a tensor's first, otherwise the last."""
    values: Pixels
    if isinstance(image, torch.Tensor):
        dtype = str(image.dtype).removeprefix("torch.")
        plain = image.detach().cpu()
        values = (plain.double() if plain.dtype.is_floating_point and plain.dtype.itemsize < 4 else plain).numpy()
    elif _is_pil(image):
        values = np.asarray(image)
        values = values.astype(np.uint8) * np.uint8(255) if image.mode == "1" else values  # as ToTensor does
        dtype, layout = f"{values.dtype} (PIL {image.mode})", "HWC"
    else:
        values, dtype = image, str(image.dtype)
    if values.size == 0:
        raise ValueError(f"the image has no pixels: its shape is {values.shape}")
    shape = "x".join(map(str, values.shape))
    if values.ndim == 2:
        layout, values = "HW", values[None]
    values = values if values.ndim == 4 else values[None]
    first, last = values.shape[1], values.shape[3]
    layout = layout or ("CHW" if first < last or (first == last and isinstance(image, torch.Tensor)) else "HWC")
    values = np.moveaxis(values, -1, 1) if layout == "HWC" else values
    images, channels = values.shape[:2]
    group = group_of(values.swapaxes(0, 1).reshape(channels, -1), images)
    scale = 255 if values.dtype == np.uint8 else 1
    return ImageRecord(1, {(channels, scale): group}, Counter([shape]), Counter([f"{layout} {dtype}"]))
