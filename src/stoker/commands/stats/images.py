"""What a worker does with a sample: finds the image in it and makes its record, or says what is wrong with it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .moments import Array, Failed, Record, group_of

FEW = 4  # as many channels as common images have (RGB and alpha); an axis that short is no height or width
TWICE = 4  # samples at the beginning that are read twice, to see whether they come out the same
LONG = 300  # characters of an error that are kept
PATHS = ("samples", "imgs")  # where torchvision's folder datasets keep (path, label)


class NoImage(Exception):
    """A sample without an image in it; ``args[0]`` says what it is instead."""


def _is_pil(thing: Any) -> bool:
    pil = sys.modules.get("PIL.Image")  # who has an image has loaded it
    return pil is not None and isinstance(thing, pil.Image)


def _is_image(thing: Any, usual: bool) -> bool:
    if isinstance(thing, torch.Tensor):
        kind = thing.dtype
        right = kind.is_floating_point or kind == torch.uint8 if usual else not kind.is_complex
    elif isinstance(thing, np.ndarray):
        right = thing.dtype.kind == "f" or thing.dtype == np.uint8 if usual else thing.dtype.kind in "fiub"
    else:
        return _is_pil(thing)
    return right and 2 <= thing.ndim <= 4


def _leaves(sample: Any) -> Iterator[Any]:
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        for part in sample:
            yield from _leaves(part)
    else:
        yield sample


def words_for(thing: Any) -> str:
    """What something is, for an error."""
    if isinstance(thing, Mapping):
        return f"a {type(thing).__name__} of {', '.join(f'{k!r} ({type(v).__name__})' for k, v in thing.items())}"[
            :LONG
        ]
    if isinstance(thing, (list, tuple)):
        return f"a {type(thing).__name__} of {', '.join(type(v).__name__ for v in thing)}"[:LONG]
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return f"a {type(thing).__name__} of {thing.dtype} and shape {tuple(thing.shape)}"
    return f"of type {type(thing).__name__}"


def image_in(sample: Any, key: str | None) -> Any:
    """The image of a sample: what ``key`` names, else the first in it that is a PIL image, or a floating or uint8
    tensor or array of 2 to 4 dimensions; where there is none of these, the first of another integer type.

    Args:
        sample: a tensor, array, PIL image, or tuple, list or dict of these, nested as you like.
        key: a dict's key, a tuple's place or a field; dots lead inside: ``"0.image"``.

    Raises:
        NoImage: there is none.
    """
    if key is None:
        for usual in (True, False):
            for leaf in _leaves(sample):
                if _is_image(leaf, usual) and not _is_bool(leaf):
                    return leaf
        raise NoImage(f"no image, but {words_for(sample)}")
    found = sample
    for part in [key] if isinstance(sample, Mapping) and key in sample else key.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, (list, tuple)) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif not isinstance(found, Mapping) and hasattr(found, part):
            found = getattr(found, part)
        else:
            raise NoImage(f"there is no {part!r} in it: it is {words_for(found)}")
    if not _is_image(found, usual=False):
        raise NoImage(f"{key!r} is no image: it is {words_for(found)}")
    return found


def _is_bool(thing: Any) -> bool:
    return getattr(thing, "dtype", None) in (torch.bool, np.dtype(bool))


def layout_of(first: int, last: int, tensor: bool) -> str:
    """Where the channels are: the first axis or the last, whichever has at most 4 entries while the other has more.
    Where that decides nothing: the first of a tensor, the shorter of an array, the last where they are equal.

    Example:
        >>> layout_of(3, 224, True), layout_of(224, 3, True), layout_of(13, 64, False)
        ('CHW', 'HWC', 'CHW')
    """
    if (first <= FEW) != (last <= FEW):
        return "CHW" if first <= FEW else "HWC"
    return "CHW" if tensor or first < last else "HWC"


def record_of(image: Any, layout: str | None) -> tuple[Record, Array]:
    """The record of an image, and its values, [channels, pixels].

    Raises:
        ValueError: it has no pixels.
    """
    tensor, kind = isinstance(image, torch.Tensor), ""
    if tensor:
        plain = image.detach().cpu()
        kind = str(plain.dtype).removeprefix("torch.")
        values = (plain.double() if plain.dtype.is_floating_point and plain.dtype.itemsize < 4 else plain).numpy()
    elif _is_pil(image):
        values = np.asarray(image)
        values = values.astype(np.uint8) * np.uint8(255) if image.mode == "1" else values  # as ToTensor does
        kind = f"{values.dtype} (PIL {image.mode})"
        layout = "HWC"
    else:
        values = image
    if values.size == 0:
        raise ValueError(f"an image without pixels: its shape is {values.shape}")
    shape = "x".join(map(str, values.shape))
    if values.ndim == 2:
        where, values = "HW", values[None, None]
    else:
        batch = values if values.ndim == 4 else values[None]
        where = layout or layout_of(batch.shape[1], batch.shape[3], tensor)
        values = np.moveaxis(batch, -1, 1) if where == "HWC" else batch
    n, channels = values.shape[:2]
    values = values.swapaxes(0, 1).reshape(channels, -1)
    group = group_of(values, n)
    scale = 255 if values.dtype == np.uint8 else 1
    record = Record(1, {(channels, scale): group}, {shape: 1}, {kind or str(values.dtype): 1}, {where: 1})
    return record, values


class _Reader:
    """Reads samples and says what they are.

    Args:
        dataset: the user's.
        key, layout: see ``stats.mean_std``.
    """

    def __init__(self, dataset: Any, key: str | None, layout: str | None) -> None:
        self.dataset, self.key, self.layout = dataset, key, layout

    def read(self, index: int, get: Callable[[], Any], again: bool = False) -> Record:
        image = None
        try:
            image = image_in(get(), self.key)
            record, values = record_of(image, self.layout)
            if again:
                other = record_of(image_in(get(), self.key), self.layout)[1]
                same = np.array_equal(values, other, equal_nan=values.dtype.kind == "f")
                record = record._replace(random=0 if same else 1)
            return record
        except NoImage as e:
            return Record(imageless=(Failed(index, self.file(index), str(e)),))
        except Exception as e:
            words = f"{type(e).__name__}: {e}".partition("\n")[0][:LONG]
            return Record(failed=(Failed(index, self.file(index, e, image), words),))

    def file(self, index: int, error: Exception | None = None, image: Any = None) -> str | None:
        """Where a sample was read from: the error's word for it, the image's, a path in its message, the dataset's."""
        for holder in (error, image):
            named = getattr(holder, "filename", None)
            if isinstance(named, (str, os.PathLike)) and os.fspath(named):
                return os.fspath(named)
        for quoted in re.findall(r"['\"]([^'\"\n]+)['\"]", str(error or "")):
            if os.path.isfile(quoted):
                return str(quoted)
        dataset = self.dataset
        try:
            while isinstance(dataset, torch.utils.data.Subset):
                index, dataset = dataset.indices[index], dataset.dataset
            known: Any = next(value for name in PATHS if (value := getattr(dataset, name, None)) is not None)
            item = known[index]
            return os.fspath(item[0] if isinstance(item, (list, tuple)) else item)
        except Exception:
            return None  # a file's name is a courtesy, whatever these attributes may be


class Items(_Reader, Dataset[Record]):
    """The records of a map-style dataset's samples; ``keys`` are their indices."""

    def __init__(self, dataset: Any, keys: Sequence[int], key: str | None, layout: str | None) -> None:
        super().__init__(dataset, key, layout)
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> Record:
        index = int(self.keys[i])
        return self.read(index, lambda: self.dataset[index], again=i < TWICE)


class Stream(_Reader, IterableDataset[Record]):
    """The records of an iterable dataset's samples; ``limit`` of all workers together, or None. A stream that raises
    ends there."""

    def __init__(self, dataset: Any, limit: int | None, key: str | None, layout: str | None) -> None:
        super().__init__(dataset, key, layout)
        self.limit = limit

    def __iter__(self) -> Iterator[Record]:
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info is not None else (0, 1)
        left = sys.maxsize if self.limit is None else self.limit // parts + (part < self.limit % parts)
        samples: Any = None
        for at in range(left):
            try:
                samples = iter(self.dataset) if samples is None else samples
                sample = next(samples)
            except StopIteration:
                return
            except Exception as e:
                words = f"{type(e).__name__}: {e}".partition("\n")[0][:LONG]
                yield Record(failed=(Failed(at, self.file(at, e), f"{words} (the stream ended there)"),))
                return
            yield self.read(at, lambda sample=sample: sample)  # type: ignore[misc]


def start(init_fn: Callable[[int], None] | None, worker: int) -> None:
    """A worker's ``worker_init_fn``: the user's, which finds the user's dataset in ``get_worker_info()``."""
    info = get_worker_info()
    if info is not None:
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # it is frozen
    if init_fn is not None:
        init_fn(worker)
