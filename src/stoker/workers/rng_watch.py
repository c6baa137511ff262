"""Finds code in worker threads that draws from generators shared with other threads: no seed can reproduce that.

Watches each worker's first tasks call by call (``sys.setprofile``, for this thread only), which shows the line that
draws.
"""

from __future__ import annotations

import os
import random
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from traceback import walk_stack
from types import FrameType
from typing import TypeVar

import numpy as np
import torch

from ..core import packages
from ..core.random_state import get_state
from ..core.warn import warn_user
from ..sampling.generators import Found, in_words

_numpy = np.random.mtrand._rand
FIRST_TASKS = 2  # tasks of each worker that are watched
MAX_WATCHED = 64  # watched tasks in all after which newly made generators no longer restart the watch
REWATCH_S = 1.0  # then at least this long between watched tasks: an augmentation may start in a later epoch,
REWATCH_SHARE = 200  # and at least this many times what watching one took, which costs 0.5 %
SIGHTINGS = 2  # tasks in which a generator must move; in one of them the consumer may have drawn meanwhile
T = TypeVar("T")
DrawingCall = tuple[str, int, str]  # file, line and function of a call that may draw
_QUIET = ("seed", "getstate", "setstate")
_DRAWS = frozenset(name for name in dir(_numpy) if not name.startswith("_") and "state" not in name)
_TORCH = (
    *("rand", "normal", "bernoulli", "uniform_", "multinomial", "dropout", "poisson", "binomial"),
    *("cauchy_", "exponential_", "geometric_"),
)
_LIBRARIES = (packages.torch(), packages.folder(np.__file__))

CHANCE = "The order in which threads draw is not deterministic, so no seed reproduces it."
_OWN = "get_worker_info().rng gives"
if hasattr(torch.random, "thread_safe_generator"):  # since torch 2.12
    _OWN = "torch.random.thread_safe_generator() and get_worker_info().rng give"
REMEDY = f'{CHANCE} {_OWN} each worker its own generators; so does worker_method="process".'


class _Place:
    """A call that may draw: the tasks in which a generator moved during it, how often, and how often none did."""

    def __init__(self) -> None:
        self.tasks: set[int] = set()
        self.moved = 0
        self.still = 0

    def draws(self) -> bool:
        """Whether the call draws, rather than merely coinciding now and then with a draw in another thread."""
        return len(self.tasks) >= SIGHTINGS and self.moved > 2 * self.still


class GlobalRngUse:
    """What is known about one loader's code, across epochs."""

    def __init__(self) -> None:
        # the code that draws from process-wide generators, ``"RandomFlip (flips.py:12)"``; None if none was seen
        self.who: str | None = None
        self.shared: Found = []  # generators in objects that all workers use, each with its path
        # the path of a shared generator that workers draw from; None if none was seen
        self.shared_drawn: str | None = None
        self.reported = False  # whether the user knows
        self._moved: Counter[str] = Counter()  # tasks in which a shared generator moved, by its path
        self._places: defaultdict[DrawingCall, _Place] = defaultdict(_Place)
        self._task = 0  # tasks watched so far
        self._watched: Counter[int] = Counter()  # tasks by worker
        self._next: dict[int, float] = {}  # by worker, when to watch again

    def share(self, found: Found) -> None:
        """Sets ``shared``. If new generators have appeared, the first tasks are watched again. This ends after
        ``MAX_WATCHED`` tasks, because some datasets make a generator for each sample."""
        before = {id(g) for _, g in self.shared}
        if self._task < MAX_WATCHED and not before.issuperset(id(g) for _, g in found):
            self._watched.clear()
        self.shared = found

    def run(self, worker: int, call: Callable[[], T]) -> T:
        """Calls ``call``, and watches it while it is unknown whether the code draws."""
        if self.who is not None or self.shared_drawn is not None:
            return call()
        if self._watched[worker] >= FIRST_TASKS and time.monotonic() < self._next[worker]:
            return call()
        began = time.monotonic()
        states = [(path, g, get_state(g)) for path, g in self.shared]
        self._task += 1
        out = self._watch(call, self._task)
        moved = next((path for path, g, state in states if get_state(g) != state), None)
        if moved is not None:
            self._moved[moved] += 1
            if self._moved[moved] >= SIGHTINGS:
                self.shared_drawn = moved
        now = time.monotonic()
        self._next[worker] = now + max(REWATCH_S, REWATCH_SHARE * (now - began))
        self._watched[worker] += 1
        return out

    def _watch(self, call: Callable[[], T], task: int) -> T:
        """Calls ``call``, and finds what draws. Does not watch a thread that is already being profiled."""
        if sys.getprofile() is not None:
            return call()
        torch_before: list[int] = []  # torch's state at each call that may draw
        numpy_before: list[int] = []  # NumPy's at each frame that may; its methods are Cython, which is not profiled

        def note(frame: FrameType, line: int, function: str, moved: bool) -> None:
            place = self._places[frame.f_code.co_filename, line, function]
            place.moved += moved
            place.still += not moved
            if moved:
                place.tasks.add(task)
                if place.draws():
                    self.who = _name(frame)

        def hook(frame: FrameType, event: str, function: object) -> None:
            if self.who is not None:
                return
            if not event.startswith("c_"):
                if _may_draw_from_numpy(frame):
                    if event == "call":
                        numpy_before.append(_numpy_state())
                    elif numpy_before:
                        note(frame, frame.f_code.co_firstlineno, "", numpy_before.pop() != _numpy_state())
                return
            name = getattr(function, "__name__", "")
            if getattr(function, "__self__", None) is random._inst and name not in _QUIET:
                self.who = _name(frame)
            elif name.startswith(_TORCH):
                if event == "c_call":
                    torch_before.append(_torch_state())
                elif torch_before:
                    note(frame, frame.f_lineno, name, torch_before.pop() != _torch_state())

        sys.setprofile(hook)
        try:
            return call()
        finally:
            sys.setprofile(None)

    def report(self) -> None:
        if self.reported or (self.who is None and self.shared_drawn is None):
            return
        self.reported = True
        if self.who is not None:
            text = f"{self.who} draws from the process-wide random generators. {REMEDY}"
        else:
            path = in_words(str(self.shared_drawn))
            text = f"{path} is a single random generator that all worker threads draw from. {CHANCE} "
            text += 'worker_method="process" gives each worker its own.'
        warn_user(text)


def _torch_state() -> int:
    return zlib.crc32(torch.default_generator.get_state().numpy().data)


def _numpy_state() -> int:
    state = _numpy.get_state(legacy=False)
    position = (state["state"]["pos"], state["has_gauss"])  # normal() draws two at once and keeps the second
    return hash((zlib.crc32(state["state"]["key"]), *position))


def _may_draw_from_numpy(frame: FrameType) -> bool:
    """Whether this function refers to NumPy, or to something from ``numpy.random``, and to a method that draws."""
    names = frame.f_code.co_names
    if _DRAWS.isdisjoint(names):
        return False
    if "numpy" in names:
        return True
    found = [frame.f_globals.get(name) for name in names]
    return any(it is np or it is np.random or getattr(it, "__self__", None) is _numpy for it in found)


def _is_library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, "<")) or path == random.__file__


def _name(inner: FrameType) -> str:
    """Names the innermost code that does not belong to a library."""
    frame = next((f for f, _ in walk_stack(inner) if not _is_library(f.f_code.co_filename)), inner)
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    name = code.co_name
    if hasattr(type(owner), name) and type(owner).__module__ != "builtins":
        name = type(owner).__name__ if name in ("__call__", "forward") else f"{type(owner).__name__}.{name}"
    return f"{name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
