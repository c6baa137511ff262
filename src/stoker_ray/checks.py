"""Checks that a node makes the same batches as this machine: compares versions, then one batch, bit for bit."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from stoker.core import packages

from .node import Facts

LOOKED_AT = 40  # maximum number of packages whose versions are compared


def digests(batch: object) -> dict[str, str]:
    """Returns a hash of each part of a batch, by its place (``batch[1][0]``): of its type, dtype, shape, and the bytes
    of all values."""
    return {place: hashlib.sha256(described).hexdigest() for place, described in _parts(batch, "batch")}


def first_difference(here: dict[str, str], there: dict[str, str]) -> str:
    """Returns the first place at which two batches differ; "" if they are the same."""
    return next((place for place in {**here, **there} if here.get(place) != there.get(place)), "")


def _parts(x: object, place: str) -> Iterator[tuple[str, bytes]]:
    kind = f"{type(x).__module__}.{type(x).__qualname__};"
    if isinstance(x, torch.Tensor) and type(x) is torch.Tensor and x.layout is torch.strided and not x.is_quantized:
        x = x.detach().cpu().resolve_conj().resolve_neg()
        numbers = x.contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""
        yield place, f"{kind}{x.dtype}{tuple(x.shape)};".encode() + numbers
    elif isinstance(x, np.ndarray) and not x.dtype.hasobject:
        yield place, f"{kind}{x.dtype.str}{x.shape};".encode() + np.ascontiguousarray(x).tobytes()
    elif isinstance(x, (str, bytes, int, float, complex, type(None))):
        yield place, f"{kind}{x!r}".encode()
    elif isinstance(x, Mapping):
        yield place, f"{kind}{len(x)}".encode()
        for k, (key, value) in enumerate(x.items()):
            yield from _parts(key, f"{place}.keys()[{k}]")
            yield from _parts(value, f"{place}[{key if isinstance(key, (str, int)) else k!r}]")
    elif isinstance(x, Sequence):
        yield place, f"{kind}{len(x)}".encode()
        for k, value in enumerate(x):
            yield from _parts(value, f"{place}[{k}]")
    elif hasattr(x, "__dict__"):
        yield place, kind.encode()
        for name, value in vars(x).items():
            yield from _parts(value, f"{place}.{name}")
    else:
        yield place, kind.encode() + pickle.dumps(x, protocol=5)


def imported_packages() -> list[str]:
    """Returns names of installed packages that are imported here, starting with those that usually make batches."""
    from importlib import metadata

    found: set[str] = set()
    by_module = metadata.packages_distributions()
    for name, module in list(sys.modules.items()):
        if "." not in name and packages.installed(getattr(module, "__file__", None) or ""):
            found.update(by_module.get(name, ()))
    first = ("numpy", "pillow", "opencv-python", "opencv-python-headless", "torchvision", "albumentations")
    return sorted(found, key=lambda name: (name.lower() not in first, name.lower()))[:LOOKED_AT]


def difference(here: dict[str, str], facts: Facts) -> str:
    """Lists the differences between this process's versions and a node's; "" if there are none."""
    differing = [
        f"{name} {facts.versions[name] or 'is not installed'} (here {version})"
        for name, version in here.items()
        if name in facts.versions and facts.versions[name] != version
    ]
    return ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
