"""Vets branches of the user's code: a sample that takes a new branch is recomputed under other conditions and compared.

This runs in a child process, which can change nothing here. Samples that take a branch which changes the dataset are
never cached; a branch that changes what cached parts read ends the cache.
"""

from __future__ import annotations

import copy
import random
import re
import time
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch

from ..core import marked_code
from ..core.compare import equal_bits
from ..core.errors import UsageError
from ..core.random_state import RandomState
from . import branches
from .change_watch import shortly
from .executed_code import Executed
from .isolate import output_size, places, run_isolated
from .plan import Unplanned
from .samples import occupy
from .source import Function, NoSource, compiled_like, marked_lambda, tree_of
from .split import Split
from .verify import make_unusable

T = TypeVar("T")
RUNS = 2  # number of runs that must give the same
LIMIT_S = 3.0  # plus LIMIT times the duration of making the sample
LIMIT = 2 * RUNS
FREE_S, SHARE = 2.0, 0.1  # seconds, and share of the time since the first sample, that vetting may take in a process
MOST_FAILURES = 2  # after that no more branches are vetted: each may have used up the whole limit
SEED = 77_000


class Vetting:
    """Decides whether a result may be cached, from the branches that it took. For one process."""

    def __init__(
        self,
        dataset: object,
        split: Split | None,
        vetted: branches.Vetted,
        states: Callable[[], RandomState],
        end: Callable[[str], None],
        unwatched_file: Callable[[Mapping[str, Collection[str]]], str],
    ) -> None:
        self.dataset = dataset
        self._unwatched_file = unwatched_file  # among those that a sample looks at: one that nobody compares
        self._split = split  # how the dataset is divided; None: changes by samples are the user's responsibility
        self._vetted = vetted
        self._states = states
        self._end = end  # ends the cache, with a reason
        self._failures = 0
        self._began, self._spent_s = 0.0, 0.0  # time of the first vetting, and seconds that all of them took
        self.is_postponed = False  # the last result was not vetted, because vetting has taken its share of the time

    def run(self, make: Callable[[], T]) -> tuple[T, bool]:
        """Returns the result of ``make`` and whether it may be cached. Leaves the random states as after ``make``."""
        around = branches.taken()
        branches.begin()
        self.is_postponed = False
        try:
            began = time.monotonic()
            made = make()
            may_be_kept = self.may_keep(made, make, time.monotonic() - began)
        finally:
            branches.restore(around)
        return made, may_be_kept

    def new(self) -> list[int]:
        """Numbers of the unvetted branches taken since ``branches.begin``."""
        return self._vetted.new(branches.taken())

    def may_keep(self, made: object, make: Callable[[], object], took_s: float) -> bool:
        """Whether a result made since ``branches.begin`` may be cached."""
        self.is_postponed = False
        new = self.new()
        if not new:
            return True
        if self._vetted.may_not(new):
            return False
        began = time.monotonic()
        self._began = self._began or began
        self.is_postponed = self._spent_s > FREE_S + SHARE * (began - self._began)
        if self.is_postponed:
            return False
        is_same, has_effects, changes = False, False, list[str]()
        if self._failures < MOST_FAILURES:
            try:
                is_same, has_effects, changes = run_isolated(
                    lambda: self._check(made, make), LIMIT_S + LIMIT * took_s, waits=True
                )
            except UsageError:  # it would change something outside, or waits for a thread missing in the child
                self._failures += 1
        self._spent_s += time.monotonic() - began
        self._vetted.note(new, is_same)
        if has_effects:
            self._vetted.note_effects()
        if changes:
            self._end(f"some samples change data that others read: {shortly(changes)}")
        return is_same

    def _check(self, made: object, make: Callable[[], object]) -> tuple[bool, bool, list[str]]:
        """Whether ``make`` gives the same and changes nothing; whether it changes anything; what of that is read."""
        split = self._split
        plan = None if split is None else split.plan
        held = None if split is None else split.inputs(of_all=True)
        if split is not None and plan is not None:
            make_unusable((split.dataset, split.globals_now()), plan.scratch)
        code = Executed(self.dataset, () if held is None else held.objects)
        written = output_size()
        is_same = self._is_same(made, make, code, set(plan.moves if plan else ()))
        is_quiet = output_size() == written  # a cached sample prints and logs nothing
        is_same = is_same and is_quiet and not code.asks and not self._unwatched_file(places())
        if split is None or held is None:
            return is_same, False, []
        # What it reads must be among what is compared at each epoch: new code may be found under any name.
        is_same = is_same and (split.reads is None or code.user_names <= split.reads)
        known = {*(plan.stores if plan else ()), *map(_name_in, split.opened)}
        changes = held.changes(split.inputs(of_all=True), split.opened)
        read = [change for change in changes if split.reads is None or _name_in(change) in split.reads]
        has_effects = bool(changes) or not code.stored_in_lasting <= known or not is_quiet
        return is_same and not has_effects, has_effects, read

    def _is_same(self, made: object, make: Callable[[], object], code: Executed, moves: set[str]) -> bool:
        """Whether ``make`` gives the same in each run, and draws from no generators but ``moves``."""
        is_same, occupied = True, list[object]()
        for k in range(RUNS):
            _seed(SEED + k)
            occupied += occupy(SEED + k)
            before = self._states()
            try:
                is_same = is_same and equal_bits(made, code.run(make) if k == 0 else make())
            except (Exception, Unplanned):
                is_same = False
            is_same = is_same and moves.issuperset(before.moved())
        return is_same


def _name_in(change: str) -> str:
    """Attribute or global variable of a change: "n" for "dataset[0].stats.n was 1 and is 2"."""
    return str(re.findall(r"[A-Za-z_]\w*", change.partition(" ")[0])[-1])


def mark(functions: Iterable[types.FunctionType]) -> str:
    """Instruments functions. Returns why samples may not be cached, if one has no source; "" if all have."""
    why = ""
    for fn in functions:
        code = fn.__code__
        is_generated = code.co_filename == "<string>" and fn.__name__.startswith("__")  # by dataclass or namedtuple
        if marked_code.is_marked(code) or is_generated:
            continue
        try:
            made = marked_lambda(code) if code.co_name == "<lambda>" else _marked(fn)
            reason = f"{fn.__qualname__} cannot be compiled again"
        except (NoSource, SyntaxError, ValueError) as e:
            made, reason = None, str(e)
        if made is None or made.co_freevars != code.co_freevars:
            why = why or f"which branches samples take is not known: {reason}"
            continue
        marked_code.note(made, code)
        fn.__code__ = made
    return why


def _marked(fn: types.FunctionType) -> types.CodeType | None:
    function = tree_of(fn)
    made = compiled_like(
        fn, Function(copy.deepcopy(function.tree), function.owner), [(copy.deepcopy(function.tree), False)]
    )
    return made[0].__code__ if made else None


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
