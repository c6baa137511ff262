"""Who draws from the process-wide random generators? In threads that run at the same time nobody can reproduce it.

Two kinds of evidence. The generators' states move while the consumer waits: then it was not the consumer. And a task
that is watched call by call (``sys.setprofile``, this thread's calls only) shows which line drew.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ..errors import StokerWarning

try:
    import numpy as np

    _numpy: Any = np.random.mtrand._rand
except (ModuleNotFoundError, AttributeError):
    _numpy = None

_QUIET = ("seed", "getstate", "setstate")
_DRAWS = frozenset(name for name in dir(_numpy) if not name.startswith("_") and "state" not in name)
_TORCH: tuple[str, ...] = (
    "rand",
    "normal",
    "bernoulli",
    "uniform_",
    "multinomial",
    "dropout",
    "exponential_",
    "poisson",
    "binomial",
)
_TORCH += ("cauchy_", "geometric_")
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, getattr(_numpy and np, "__file__", "x"))
)

REMEDY = (
    "Threads take turns by chance, so no seed reproduces that. torch.random.thread_safe_generator() and "
    'get_worker_info().rng give each worker generators of its own; so does worker_method="process".'
)


class Noticed:
    """What is known of one loader's code, from one epoch to the next.

    Attributes:
        who: what drew; None while nothing did.
        said: whether the user knows.
        watched: workers whose first task has been watched.
        looks: waits of the consumer during which the generators are still to be looked at, 60 microseconds each.
    """

    def __init__(self) -> None:
        self.who: str | None = None
        self.said = False
        self.watched: set[int] = set()
        self.looks = 16

    def first(self, worker: int) -> bool:
        """Whether this is the worker's first task of all."""
        if worker in self.watched:
            return False
        self.watched.add(worker)
        return True

    def say(self) -> None:
        """Tells the user, once."""
        if self.who is not None and not self.said:
            self.said = True
            words = f"{self.who} draws from the process-wide random generators. {REMEDY}"
            warnings.warn(words, StokerWarning, stacklevel=2)


def _numpy_state() -> int:
    state = _numpy.get_state(legacy=False)["state"]
    return zlib.crc32(state["key"]) ^ int(state["pos"])


def state() -> tuple[int, int, int]:
    """A fingerprint of the three generators; 30 microseconds."""
    return (
        zlib.crc32(torch.default_generator.get_state().numpy().data),
        hash(random.getstate()),
        0 if _numpy is None else _numpy_state(),
    )


def watch(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Calls, and says what in this thread drew from a process-wide generator: ``"RandomFlip (flips.py:12)"``, or None.

    A thread that is being profiled already is not watched.
    """
    if sys.getprofile() is not None:
        return call(), None
    found: list[str] = []
    before: list[int] = []  # torch's state at each call that may draw
    entered: list[int] = []  # NumPy's at each frame that may; its methods are Cython's, which are not reported

    def hook(frame: Any, event: str, function: Any) -> None:
        if found:
            return
        if not event.startswith("c_"):
            if _numpy is not None and not _DRAWS.isdisjoint(frame.f_code.co_names):
                now = _numpy_state()
                if event == "call":
                    entered.append(now)
                elif entered and entered.pop() != now:
                    found.append(_name(frame))
            return
        name = getattr(function, "__name__", "")
        if getattr(function, "__self__", None) is random._inst and name not in _QUIET:
            found.append(_name(frame))
        elif name.startswith(_TORCH):
            now = zlib.crc32(torch.default_generator.get_state().numpy().data)
            if event == "c_call":
                before.append(now)
            elif before and before.pop() != now:
                found.append(_name(frame))

    sys.setprofile(hook)
    try:
        return call(), None if not found else found[0]
    finally:
        sys.setprofile(None)


def _name(frame: Any) -> str:
    """The innermost code that belongs to no library."""
    inner = frame
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES) and path != random.__file__ and not path.startswith("<"):
            break
        frame = frame.f_back
    frame = frame or inner
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    name = code.co_name
    if hasattr(type(owner), name) and type(owner).__module__ != "builtins":
        name = type(owner).__name__ if name in ("__call__", "forward") else f"{type(owner).__name__}.{name}"
    return f"{name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
