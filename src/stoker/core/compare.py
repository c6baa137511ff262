"""Bitwise equality of two values: NaN equals itself, 0.0 differs from -0.0, and types count."""

from __future__ import annotations

import pickle
import sys
import types
import weakref
from collections.abc import Collection
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .object_tree import attributes
from .types import Sample

IDENTICAL = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
Seen: TypeAlias = dict[tuple[int, int], tuple[object, object]]


def equal_bits(a: object, b: object) -> bool:
    """Returns whether two samples, or any two values, are bitwise identical.

    Compares tensors and arrays by dtype, shape and bytes (tensors also by strides); containers item by item, in order;
    PIL images by mode, size and pixels; other objects by their attributes."""
    return _equal(a, b, {})


def _equal(a: Sample, b: Sample, seen: Seen) -> bool:
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in (int, str, bytes, bool, type(None)):
        return bool(a == b)
    if kind is float or kind is complex:
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if isinstance(a, torch.Tensor):
        return _equal_tensors(a, b) and _equal(vars(a), vars(b), seen)
    if isinstance(a, np.ndarray):
        return _equal_arrays(a, b, seen)
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, weakref.ref):  # PyG's Data refers back from the objects it holds
        return _equal(a(), b(), seen)
    if (id(a), id(b)) in seen:
        return True
    seen[id(a), id(b)] = a, b  # kept alive: otherwise the id of a temporary dict could be reused
    if isinstance(a, dict):
        return _equal_items(a, b, seen) and _equal_items(_without_address(a), _without_address(b), seen)
    if isinstance(a, (list, tuple)):
        return _equal_items(a, b, seen)
    if "PIL.Image" in sys.modules and isinstance(a, sys.modules["PIL.Image"].Image):
        return bool((a.mode, a.size) == (b.mode, b.size) and a.tobytes() == b.tobytes())
    if isinstance(a, (set, frozenset, *IDENTICAL)):
        return bool(a == b)
    return _equal_objects(a, b, seen)


def _without_address(items: dict[object, object]) -> Collection[object]:
    """The values of a dict, without the ``id`` of a MONAI transform record: it is an address and may differ in each
    call."""
    if "do_transforms" in items and "extra_info" in items:
        return [value for key, value in items.items() if key != "id"]
    return items.values()


def _equal_items(a: Collection[object], b: Collection[object], seen: Seen) -> bool:
    return len(a) == len(b) and all(_equal(x, y, seen) for x, y in zip(a, b, strict=True))


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape, a.device, a.layout) != (b.dtype, b.shape, b.device, b.layout):
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return pickle.dumps(a) == pickle.dumps(b)
    if a.stride() != b.stride():
        return False
    x, y = (t.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous() for t in (a, b))
    return torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)) if a.numel() else True


def _equal_arrays(a: NDArray[np.generic], b: NDArray[np.generic], seen: Seen) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.dtype.hasobject:
        return all(_equal(x, y, seen) for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
    return bool(a.tobytes() == b.tobytes())


def _equal_objects(a: object, b: object, seen: Seen) -> bool:
    held = attributes(a)
    if held or hasattr(a, "__dict__"):
        return _equal(held, attributes(b), seen)
    try:
        return pickle.dumps(a) == pickle.dumps(b)
    except Exception:
        return bool(a == b)
