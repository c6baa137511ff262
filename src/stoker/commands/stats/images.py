"""Inside a worker: finds the image in a sample and makes its record."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.types import Sample
from .moments import Record, group_of

MAX_DESCRIPTION = 300  # characters


class NoImage(Exception):
    """A sample has no image; the message says what it is instead."""


def _is_pil(thing: object) -> bool:
    pil = sys.modules.get("PIL.Image")  # loaded wherever there is such an image
    return pil is not None and isinstance(thing, pil.Image)


def _is_image(thing: object, usual_types: bool) -> bool:
    """Whether it is a PIL image, or a tensor or array of 2 to 4 dimensions and a real type.

    Args:
        thing: a part of a sample.
        usual_types: accept only floating types and uint8; a mask or a label map has other ones.
    """
    if not isinstance(thing, (torch.Tensor, np.ndarray)):
        return _is_pil(thing)
    if not 2 <= thing.ndim <= 4:
        return False
    if isinstance(thing, torch.Tensor):
        return thing.dtype.is_floating_point or thing.dtype == torch.uint8 or not (usual_types or thing.is_complex())
    return thing.dtype.kind == "f" or thing.dtype == np.uint8 or (not usual_types and thing.dtype.kind in "iub")


def _leaves(sample: Sample) -> Iterator[Sample]:
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        for part in sample:
            yield from _leaves(part)
    else:
        yield sample


def _description(thing: Sample) -> str:
    if isinstance(thing, Mapping):
        parts = ", ".join(f"{k!r} ({type(v).__name__})" for k, v in thing.items())
        return f"a {type(thing).__name__} of {parts}"[:MAX_DESCRIPTION]
    if isinstance(thing, (list, tuple)):
        return f"a {type(thing).__name__} of {', '.join(type(v).__name__ for v in thing)}"[:MAX_DESCRIPTION]
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return f"a {type(thing).__name__} of {thing.dtype} and shape {tuple(thing.shape)}"
    return f"of type {type(thing).__name__}"


def image_in(sample: Sample, key: str | None) -> Any:
    """The image of a sample: what ``key`` names, else the first PIL image, or floating or uint8 tensor or array of 2 to
    4 dimensions; if there is none, the first one of another integer type.

    Args:
        sample: a tensor, array, PIL image, or tuple, list or dict of these, nested to any depth.
        key: a dict's key, a tuple's index or a field; dots lead inside: ``"0.image"``.

    Raises:
        NoImage: there is none.
    """
    if key is None:
        for usual_types in (True, False):
            for leaf in _leaves(sample):
                if _is_image(leaf, usual_types) and getattr(leaf, "dtype", None) not in (torch.bool, np.dtype(bool)):
                    return leaf
        raise NoImage(f"no image, but {_description(sample)}")
    found = sample
    for part in [key] if isinstance(sample, Mapping) and key in sample else key.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, (list, tuple)) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif not isinstance(found, Mapping) and hasattr(found, part):
            found = getattr(found, part)
        else:
            raise NoImage(f"there is no {part!r} in it: it is {_description(found)}")
    if not _is_image(found, usual_types=False):
        raise NoImage(f"{key!r} is not an image: it is {_description(found)}")
    return found


def record_of(image: Any, layout: str | None) -> Record:
    """The record of an image. Channels are its shorter outer axis; if both are equal a tensor's first, else the last.

    Raises:
        ValueError: it has no pixels.
    """
    values: NDArray[Any]
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
        raise ValueError(f"an image without pixels: its shape is {values.shape}")
    shape = "x".join(map(str, values.shape))
    if values.ndim == 2:
        layout, values = "HW", values[None, None]
    else:
        values = values if values.ndim == 4 else values[None]
        first, last = values.shape[1], values.shape[3]
        layout = layout or ("CHW" if first < last or (first == last and isinstance(image, torch.Tensor)) else "HWC")
        values = np.moveaxis(values, -1, 1) if layout == "HWC" else values
    images, channels = values.shape[:2]
    group = group_of(values.swapaxes(0, 1).reshape(channels, -1), images)
    scale = 255 if values.dtype == np.uint8 else 1
    return Record(1, {(channels, scale): group}, Counter([shape]), Counter([dtype]), Counter([layout]))
