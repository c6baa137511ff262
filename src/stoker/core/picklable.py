"""Tests whether an object can be pickled, without copying it: a dataset may take half of the memory."""

from __future__ import annotations

import copyreg
import pickle
from collections import deque
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

MAX_ITEMS = 1000  # items of a container that are tried; the others are assumed to be of the same kind
MAX_OBJECTS = 1_000_000  # objects tried, which takes half a second; if they pass, the rest is assumed to pass
CONTAINERS = (list, tuple, dict, set, frozenset)
NUMBERS = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)


def refused(obj: object) -> Exception | None:
    """Returns the error that multiprocessing's pickler would raise for an object when it starts a process; None if
    none."""
    trial = _Trial()
    registered: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    trial.dispatch_table = {**copyreg.dispatch_table, **registered}
    try:
        trial.dump(obj)
        while trial.later:
            trial.dump(trial.later.popleft())
    except _Enough:
        pass
    except Exception as e:
        return e
    return None


def culprit(obj: object, path: str, depth: int = 0) -> str | None:
    """Path of the innermost attribute or item that pickle rejects; None if it rejects none."""
    if refused(obj) is None:
        return None
    inner: list[tuple[str, object]] = []
    if isinstance(obj, dict):
        inner = [(f"{path}[{k!r}]", v) for k, v in islice(obj.items(), MAX_ITEMS)]
    elif isinstance(obj, (list, tuple)):
        inner = [(f"{path}[{i}]", v) for i, v in enumerate(obj[:MAX_ITEMS])]
    elif hasattr(obj, "__dict__") and not isinstance(obj, type):
        inner = [(f"{path}.{k}", v) for k, v in vars(obj).items()]
    if depth < 8:
        for name, value in inner:
            found = culprit(value, name, depth + 1)
            if found:
                return found
    return f"{path} ({type(obj).__name__})"


class _Enough(Exception):
    """``MAX_OBJECTS`` objects have passed."""


class _Null:
    """A file that discards what is written to it."""

    def write(self, data: bytes) -> int:
        return len(data)


class _Trial(pickle.Pickler):
    """Pickles and discards the result. Skips the bytes of tensors and arrays; tries only some items of a long
    container."""

    def __init__(self) -> None:
        super().__init__(_Null(), protocol=5, buffer_callback=lambda _: None)
        # items of long containers, tried last: otherwise they would use up the budget for objects after the container
        self.later: deque[object] = deque()
        # keeps the containers alive: another object could reuse the id of a freed one
        self._long: dict[int, object] = {}
        self._left = MAX_OBJECTS

    def persistent_id(self, obj: Any) -> str | None:
        """Called for each object; returning a string excludes the object from pickling."""
        self._left -= 1
        if self._left < 0:
            raise _Enough
        array = isinstance(obj, np.ndarray)
        if isinstance(obj, NUMBERS) or (array and not obj.dtype.hasobject):
            return "numbers"
        size = obj.size if array else len(obj) if type(obj) in CONTAINERS else 0
        if size <= MAX_ITEMS:
            return None
        if id(obj) not in self._long:
            self._long[id(obj)] = obj
            items = obj.flat if array else obj.items() if type(obj) is dict else obj
            self.later.append(list(islice(items, MAX_ITEMS)))
        return "items"
