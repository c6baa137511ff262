"""Pinning a batch, whatever it is made of: tensors in any nesting, and objects that know how to pin themselves.

torch's rules (``torch.utils.data._utils.pin_memory``), and two more: the fields of a dataclass are looked at, and
tensors that lie on a device are left alone instead of being an error.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch


def pin(data: Any, device: str | None = None) -> Any:
    """The same batch with its tensors in page-locked memory; what lies there already is not copied.

    Args:
        data: tensors; tuples, named tuples, lists, mappings and dataclasses of such; objects with a ``pin_memory``
            method, whose return value is taken. Anything else is returned as it is.
        device: torch's name of the accelerator.

    Example:
        >>> pin({"name": "a", "count": 3})
        {'name': 'a', 'count': 3}
    """
    if isinstance(data, torch.Tensor):
        return pin_tensor(data, device)
    own = getattr(data, "pin_memory", None)
    if callable(own) and not isinstance(data, type):
        return own()
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, Mapping):
        return _mapping(data, device)
    if isinstance(data, tuple):
        each = (pin(x, device) for x in data)
        return type(data)(*each) if hasattr(data, "_fields") else type(data)(each)
    if isinstance(data, Sequence):
        return _sequence(data, device)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _fields(data, device)
    return data


def pin_tensor(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A page-locked tensor of the same values; the tensor itself where it is one, or lies on a device."""
    if tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor
    return tensor.pin_memory(device) if device else tensor.pin_memory()


def _mapping(data: Mapping[Any, Any], device: str | None) -> Any:
    pinned = {k: pin(v, device) for k, v in data.items()}
    try:
        if isinstance(data, MutableMapping):
            clone = copy.copy(data)  # may hold more than its items
            clone.update(pinned)
            return clone
        return type(data)(pinned)  # type: ignore[call-arg]
    except TypeError:  # it cannot be made of a dict
        return pinned


def _sequence(data: Sequence[Any], device: str | None) -> Any:
    pinned = [pin(x, device) for x in data]
    try:
        if isinstance(data, MutableSequence):
            clone = copy.copy(data)
            for i, x in enumerate(pinned):
                clone[i] = x
            return clone
        return type(data)(pinned)  # type: ignore[call-arg]
    except TypeError:  # it cannot be made of a list, as a range
        return pinned


def _fields(data: Any, device: str | None) -> Any:
    clone = copy.copy(data)
    for field in dataclasses.fields(data):
        if hasattr(data, field.name):
            object.__setattr__(clone, field.name, pin(getattr(data, field.name), device))  # frozen ones, too
    return clone
