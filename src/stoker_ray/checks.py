"""Checks that a node makes the same batches as this machine: compares versions, then one batch, bit for bit."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from stoker.core import packages

from .node import Facts

LOOKED_AT = 40  # maximum number of packages whose versions are compared


def digest(batch: object) -> str:
    """Returns a hash of a batch: of its types, dtypes, shapes, and the bytes of all values.

    Example:
        >>> digest([torch.zeros(2), "a"]) == digest([torch.zeros(2), "a"])
        True
    """
    seen = hashlib.sha256()
    _add(batch, seen)
    return seen.hexdigest()


def _add(x: object, seen: hashlib._Hash) -> None:
    seen.update(f"{type(x).__module__}.{type(x).__qualname__};".encode())
    if isinstance(x, torch.Tensor) and type(x) is torch.Tensor and x.layout is torch.strided and not x.is_quantized:
        x = x.detach().cpu().resolve_conj().resolve_neg()
        seen.update(f"{x.dtype}{tuple(x.shape)};".encode())
        seen.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    elif isinstance(x, np.ndarray) and not x.dtype.hasobject:
        seen.update(f"{x.dtype.str}{x.shape};".encode())
        seen.update(np.ascontiguousarray(x).tobytes())
    elif isinstance(x, (str, bytes, int, float, complex, type(None))):
        seen.update(f"{x!r};".encode())
    elif isinstance(x, Mapping):
        for key, value in x.items():
            _add(key, seen)
            _add(value, seen)
    elif isinstance(x, Sequence):
        seen.update(f"{len(x)};".encode())
        for value in x:
            _add(value, seen)
    elif hasattr(x, "__dict__"):
        _add(dict(vars(x)), seen)
    else:
        seen.update(pickle.dumps(x, protocol=5))


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
