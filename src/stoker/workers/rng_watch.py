"""Who draws from the process-wide random generators? In threads that run at the same time nobody can reproduce it.

Two kinds of evidence. The generators' states move while the consumer waits: then it was not the consumer. And a task
that is watched call by call (``sys.setprofile``, this thread's calls only) shows which line drew.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ..core import packages
from ..core.errors import StokerWarning
from ..core.random_state import get_state
from ..sampling.generators import Found, in_words

try:
    import numpy as np

    _numpy: Any = np.random.mtrand._rand
except (ModuleNotFoundError, AttributeError):
    _numpy = None

TASKS = 16  # of a worker, at most, that are watched until it is sure what it draws from
AGAIN_S = 1.0  # then one now and then: an augmentation may begin in a later epoch
AGAIN_SHARE = 200  # and so seldom that it costs half a per cent
DOUBTS = 4  # waits of the consumer that are looked at where such a task left a doubt
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
_LIBRARIES = (packages.torch(), *([] if _numpy is None else [packages.folder(np.__file__)]))

CHANCE = "Threads take turns by chance, so no seed reproduces that."
REMEDY = (
    f"{CHANCE} torch.random.thread_safe_generator() and "
    'get_worker_info().rng give each worker generators of its own; so does worker_method="process".'
)


class GlobalRngUse:
    """What is known of one loader's code, from one epoch to the next.

    Attributes:
        who: what drew; None while nothing did.
        suspect: what drew, or ran while the consumer did.
        said: whether the user knows.
        held: generators in objects that all workers use, each with its path.
        held_looks: tasks around which these are still to be compared.
        moved: the path of one of these that workers draw from; None while none was seen to.
        looks: waits of the consumer during which the generators are still to be looked at, 60 microseconds each.
        turns: moments at which the consumer began or ceased to wait; odd while it waits.
    """

    def __init__(self) -> None:
        self.who: str | None = None
        self.suspect: str | None = None
        self.held: Found = []
        self.moved: str | None = None
        self.held_looks = TASKS
        self._doubts = 0
        self.said = False
        self.looks = 16
        self.turns = 0
        self._left: dict[int, int] = {}
        self._next: dict[int, float] = {}

    def run(self, worker: int, call: Callable[[], Any]) -> Any:
        """Calls, watching while it is not known whether the worker's code draws: its first task, then one at times."""
        if not self.held or self.moved is not None or self.held_looks <= 0:
            return self._run(worker, call)
        self.held_looks -= 1
        turn, states = self.turns, [(path, g, get_state(g)) for path, g in self.held]
        out = self._run(worker, call)
        moved = [path for path, g, state in states if get_state(g) != state]
        self._doubts += bool(moved)
        if moved and ((turn & 1 and turn == self.turns) or self._doubts > DOUBTS):  # the consumer waited, or it goes on
            self.moved = moved[0]
        return out

    def _run(self, worker: int, call: Callable[[], Any]) -> Any:
        left = self._left.get(worker, TASKS)
        if self.who is not None or (left <= 0 and time.monotonic() < self._next[worker]):
            return call()
        began = time.monotonic()
        out, who, sure = watch(call, lambda: self.turns)
        now = time.monotonic()
        self._next[worker] = now + max(AGAIN_S, AGAIN_SHARE * (now - began))
        self._left[worker] = 0 if sure else left - 1
        if sure:
            self.who = who or self.who
        else:
            self.suspect = who
            self.looks = max(self.looks, DOUBTS)
        return out

    def say(self) -> None:
        """Tells the user, once."""
        if self.said or (self.who is None and self.moved is None):
            return
        self.said = True
        if self.who is not None:
            words = f"{self.who} draws from the process-wide random generators. {REMEDY}"
        else:
            path = in_words(str(self.moved))
            words = f"{path} is one random generator, and all worker threads draw from it. {CHANCE} "
            words += 'worker_method="process" gives each worker its own.'
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


def watch(call: Callable[[], Any], turns: Callable[[], int] = lambda: 1) -> tuple[Any, str | None, bool]:
    """Calls, and says what in this thread drew from a process-wide generator: ``"RandomFlip (flips.py:12)"``, or None;
    and whether that is sure: what a generator did while the consumer ran may have been the consumer.

    A thread that is being profiled already is not watched.
    """
    if sys.getprofile() is not None:
        return call(), None, True
    found: list[str] = []
    doubts: list[str] = []
    before: list[tuple[int, int]] = []  # torch's state, and whose turn it was, at each call that may draw
    entered: list[tuple[int, int]] = []  # NumPy's at each frame that may; its methods are Cython's, not reported

    def compare(then: tuple[int, int], now: int, frame: Any) -> None:
        if then[0] != now:
            (found if then[1] & 1 and then[1] == turns() else doubts).append(_name(frame))

    def hook(frame: Any, event: str, function: Any) -> None:
        if found:
            return
        turn = turns()  # before the state is looked at: what moved meanwhile may have been the consumer
        if not event.startswith("c_"):
            if _numpy is not None and not _DRAWS.isdisjoint(frame.f_code.co_names):
                now = _numpy_state()
                if event == "call":
                    entered.append((now, turn))
                elif entered:
                    compare(entered.pop(), now, frame)
            return
        name = getattr(function, "__name__", "")
        if getattr(function, "__self__", None) is random._inst and name not in _QUIET:
            found.append(_name(frame))
        elif name.startswith(_TORCH):
            now = zlib.crc32(torch.default_generator.get_state().numpy().data)
            if event == "c_call":
                before.append((now, turn))
            elif before:
                compare(before.pop(), now, frame)

    sys.setprofile(hook)
    try:
        out = call()
        return out, next(iter(found or doubts), None), bool(found) or not doubts
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
