"""Whether an object can be pickled, found out without a copy of it: a dataset may be half of the memory."""

from __future__ import annotations

import copyreg
import pickle
from collections import deque
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

MANY = 1000  # items of a longer container that are tried; the others are taken to be of the same kind
MOST = 1_000_000  # objects that are tried, half a second; what has passed by then is taken to pass as a whole
LONG = (list, tuple, dict, set, frozenset)
NUMBERS = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)


def refused(obj: Any, to_start: bool = False) -> Exception | None:
    """What pickle says against an object; None where it takes it.

    Args:
        obj: which.
        to_start: with what multiprocessing can pickle to start a process, too.
    """
    trial = _Trial()
    if to_start:
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


def culprit(obj: Any, path: str, depth: int = 0) -> str | None:
    """Path of the innermost attribute or item that pickle refuses, or None when it takes all."""
    if refused(obj, to_start=True) is None:
        return None
    inner: list[tuple[str, Any]] = []
    if isinstance(obj, dict):
        inner = [(f"{path}[{k!r}]", v) for k, v in islice(obj.items(), MANY)]
    elif isinstance(obj, (list, tuple)):
        inner = [(f"{path}[{i}]", v) for i, v in enumerate(obj[:MANY])]
    elif hasattr(obj, "__dict__") and not isinstance(obj, type):
        inner = [(f"{path}.{k}", v) for k, v in vars(obj).items()]
    if depth < 8:
        for name, value in inner:
            found = culprit(value, name, depth + 1)
            if found:
                return found
    return f"{path} ({type(obj).__name__})"


class _Enough(Exception):
    """So many objects have passed."""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _Trial(pickle.Pickler):
    """Pickles, and keeps nothing of it. Bytes of tensors and arrays are not looked at, of a long container some items.

    Attributes:
        later: items of long containers; they come last, so that no container hides what lies behind it.
    """

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: None)
        self.later: deque[Any] = deque()
        self._long: dict[int, Any] = {}  # the containers themselves, for another object may get a free one's id
        self._left = MOST

    def persistent_id(self, obj: Any) -> str | None:
        """Called with each object; a word stands in for one that is not to be pickled."""
        self._left -= 1
        if self._left < 0:
            raise _Enough
        array = isinstance(obj, np.ndarray)
        if isinstance(obj, NUMBERS) or (array and not obj.dtype.hasobject):
            return "numbers"
        size = obj.size if array else len(obj) if type(obj) in LONG else 0
        if size <= MANY:
            return None
        if id(obj) not in self._long:
            self._long[id(obj)] = obj
            items = obj.flat if array else obj.items() if type(obj) is dict else obj
            self.later.append(list(islice(items, MANY)))
        return "items"
