"""Pins every tensor of a nested batch, or moves it to a device.

Follows torch's rules (``torch.utils.data._utils.pin_memory``), with two additions: the fields of a dataclass are
visited, and tensors that are on a device already are left alone instead of raising an error.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch

from .packages import is_users

Each = Callable[[torch.Tensor], torch.Tensor]
Own = Callable[[Any], Any]
PLAIN = {int, float, str, bytes, bool, type(None), torch.Tensor}
DEPTH = 8  # nesting depth of objects that is searched for tensors


def pin(data: Any, device: str | None = None) -> Any:
    """Returns the batch with its tensors in page-locked memory, without copying those that are already. ``data``:
    tensors; tuples, named tuples, lists, mappings and dataclasses of these; objects with a ``pin_memory`` method, whose
    return value is used. Anything else is returned as it is. ``device``: torch's name of the accelerator."""
    return _walk(data, lambda t: pin_tensor(t, device), "pin_memory", lambda own: own())


def move(data: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on a device; copies are asynchronous. ``data``: as for ``pin``, but objects
    need a ``to`` method."""

    def own(to: Callable[..., Any]) -> Any:
        try:
            return to(device, non_blocking=True)
        except TypeError:  # the method takes nothing but a device
            return to(device)

    return _walk(data, lambda t: t.to(device, non_blocking=True), "to", own)


def tensors(data: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yields the tensors in a batch, including those that objects hold as attributes."""
    if isinstance(data, torch.Tensor):
        yield data
    elif depth and not isinstance(data, (str, bytes, type)):
        inner: Any = getattr(data, "__dict__", {}).values()
        if isinstance(data, Mapping):
            inner = [*data.values(), *inner]
        elif isinstance(data, Sequence) and not isinstance(data, range):
            inner = [*data, *inner]
        for x in inner:
            yield from tensors(x, depth - 1)


def is_data(x: object) -> bool:
    """Whether a copy in another process stands for a value. It holds no object without attributes, whose identity the
    script may ask for (``y is MISSING``), no exception, and no set, whose copy may have another order. Dataclasses,
    named tuples and members of an ``Enum`` count as data."""
    if isinstance(x, dict):
        return all(map(is_data, x)) and all(map(is_data, dict.values(x)))
    if isinstance(x, (list, tuple)):
        return PLAIN.issuperset(map(type, x)) or all(map(is_data, x))
    if type(x) is object or isinstance(x, (set, frozenset, BaseException)):
        return False
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return all(is_data(getattr(x, f.name, None)) for f in dataclasses.fields(x))
    if isinstance(x, np.ndarray) and x.dtype == object:
        return all(map(is_data, x.flat))
    kind = type(x)
    if kind.__module__ == "builtins" or isinstance(x, (enum.Enum, np.generic, torch.Tensor, str, bytes)):
        return True
    held = getattr(x, "__dict__", None)
    if held:  # a batch class of the user's
        return all(map(is_data, held.values()))
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return module is not None and (file is None or not is_users(file))


def pin_tensor(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """Returns a page-locked tensor of the same values; the tensor itself if it is pinned or on a device."""
    if tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor
    return tensor.pin_memory(device) if device else tensor.pin_memory()


def _walk(data: Any, each: Each, method: str, own: Own) -> Any:
    if isinstance(data, torch.Tensor):
        return each(data)
    found = getattr(data, method, None)
    if callable(found) and not isinstance(data, type):
        return own(found)
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, Mapping):
        return _mapping(data, {k: _walk(v, each, method, own) for k, v in data.items()})
    if isinstance(data, tuple):
        inside = (_walk(x, each, method, own) for x in data)
        return type(data)(*inside) if hasattr(data, "_fields") else type(data)(inside)
    if isinstance(data, Sequence):
        return _sequence(data, [_walk(x, each, method, own) for x in data])
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        clone = copy.copy(data)
        for name in (f.name for f in dataclasses.fields(data) if hasattr(data, f.name)):
            object.__setattr__(clone, name, _walk(getattr(data, name), each, method, own))  # works for frozen ones too
        return clone
    return data


def _mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        if isinstance(data, MutableMapping):
            clone = copy.copy(data)  # copy: it may hold more than its items
            clone.update(items)
            return clone
        return type(data)(items)  # type: ignore[call-arg]
    except TypeError:  # cannot be built from a dict
        return items


def _sequence(data: Sequence[Any], items: list[Any]) -> Any:
    try:
        if isinstance(data, MutableSequence):
            clone = copy.copy(data)
            for i, x in enumerate(items):
                clone[i] = x
            return clone
        return type(data)(items)  # type: ignore[call-arg]
    except TypeError:  # cannot be built from a list, such as a range
        return items
