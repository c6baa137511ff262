"""Finds the calls of a dataset that can be answered from memory. See ``memo``; it runs where ``trial`` runs."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.fingerprint import Fingerprint
from .compare import equal_bits
from .isolate import output_size
from .memoize import Memo, MemoNode, Table, call_key, is_small, names_of
from .plan import Callee, callee_of, key_of
from .random_state import RandomStates
from .rewrite_calls import calls_around, surveyed
from .source import NoSource
from .store.decode import Layout
from .store.encode import CacheError, take
from .verify import positions, shares_memory

WORTH_S = 100e-6  # a call that is kept takes at least so long
WORTH_SHARE = 0.02  # and such a part of a sample
VISITS = 3000  # calls that one survey looks at; then the rest of the code runs as it is
DEPTH = 5
ROUNDS = 6  # selections that are verified
PAYS = 0.7  # of a sample's time is left at most, or nothing is kept


@dataclass
class MemoPlan:
    """Calls that are answered from memory.

    Attributes:
        root: of ``dataset.__getitem__``.
        reads: names of attributes and globals that the kept calls may read; None: any.
        globals: module and name of each global variable that they read.
        served_s: seconds of a sample when all calls are answered.
        nbytes: bytes that are kept of a call.
        sites: how many calls of the code are kept.
    """

    root: MemoNode
    reads: set[str] | None = None
    globals: list[tuple[str, str]] = field(default_factory=list)
    served_s: float = 0.0
    nbytes: float = 0.0
    sites: int = 0


class _Function:
    """What was seen of the calls of one function."""

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self.refused: set[int] = set()  # known by local variables that are no small values
        self.struck: set[int] = set()  # that draw, or must not be kept for another reason
        self.large: set[int] = set()  # whose arguments are no small values
        self.spent: dict[int, list[float]] = {}
        self.inner: dict[tuple[int, str], _Function] = {}


class Survey:
    """One survey of a dataset.

    Args:
        dataset: map-style.
        seed: sets all random states from a number.
        save_random: saves them.
        is_closed: whether a function's code is left as it is.
        executed: looks at the code that runs (``trial.Executed``).
    """

    def __init__(
        self,
        dataset: Any,
        seed: Callable[[int], Any],
        save_random: Callable[[], RandomStates],
        is_closed: Callable[[Callee], bool],
        executed: Callable[[], Any],
    ) -> None:
        self._dataset, self._seed, self._save = dataset, seed, save_random
        self._is_closed, self._executed = is_closed, executed
        self._visits, self._least_s = 0, WORTH_S
        self._names = names_of(dataset)
        self.root: _Function | None = None
        self.reasons: list[str] = []

    def run(self, indices: list[int], sample_s: float) -> MemoPlan | None:
        """Calls to be kept, verified; None where none pays."""
        callee = callee_of(self._dataset.__getitem__)
        if callee is None or self._is_closed(callee):
            return None
        self.root = _Function(callee)
        self._least_s = max(WORTH_S, WORTH_SHARE * sample_s)
        try:
            for k, i in enumerate(indices):
                self._seed(20 + k)
                self._call(self.root, self._dataset.__getitem__, (i,), {}, DEPTH)
        except NoSource as e:
            self.reasons.append(str(e))
            return None
        for _ in range(ROUNDS):
            self._methods: set[str] = set()
            node = self._select(self.root)
            if node is None:
                return None
            self._everywhere(node, self.root)
            plan = MemoPlan(node, sites=len(node.all_shown()))
            if self._verify(plan, indices):
                left = plan.served_s / max(1e-9, sample_s)
                return plan if left < PAYS else None
        return None

    # -- what calls do

    def _call(self, function: _Function, called: Any, args: Any, kwargs: Any, depth: int) -> Any:
        callee = function.callee
        copied = surveyed(callee.fn, callee.is_method)
        return copied(*callee.first, *args, _stoker=_Visitor(self, function, depth), **kwargs)

    def visit(self, function: _Function, number: int, run: Callable[[], Any], values: tuple[Any, ...]) -> Any:
        """A call is made: what it costs, and whether it could be kept."""
        self._visits += 1
        if self._visits > VISITS:
            function.struck.add(number)
            return run()
        before = self._save()
        began = time.perf_counter()
        out = run()
        function.spent.setdefault(number, []).append(time.perf_counter() - began)
        if not is_small(values):
            function.refused.add(number)
        if before.moved():
            function.struck.add(number)
        return out

    def call(self, function: _Function, number: int, called: Any, args: Any, kwargs: Any, depth: int) -> Any:
        """The call itself; inside a Python function, its calls are looked at, too."""
        if call_key(called, args, kwargs, self._names) is None:
            function.large.add(number)
        callee = callee_of(called)
        if callee is None or depth <= 1 or self._visits > VISITS or self._is_closed(callee):
            return called(*args, **kwargs)
        key = number, key_of(called)
        inner = function.inner.setdefault(key, _Function(callee))
        inner.callee = callee
        try:
            surveyed(callee.fn, callee.is_method)
        except NoSource:
            del function.inner[key]
            return called(*args, **kwargs)
        return self._call(inner, called, args, kwargs, depth - 1)

    # -- choosing

    def _select(self, function: _Function) -> MemoNode | None:
        """The outermost calls that can be kept and take long enough; None where there are none."""
        node = MemoNode()
        around = calls_around(function.callee.fn)
        file = os.path.basename(function.callee.fn.__code__.co_filename)
        slow = {n for n, spent in function.spent.items() if sorted(spent)[len(spent) // 2] > self._least_s}
        by_args = slow - function.struck - function.large
        fit = by_args | (slow - function.struck - function.refused)
        for n in sorted(fit):
            outer, text, line = around[n]
            if not outer & fit:
                (node.by_args if n in by_args else node.kept).add(n)
                node.shown.append(f"{file}:{line} {text}")
        if any("self." in around[n][1] for n in node.by_args):
            self._methods |= {around[n][1].partition("(")[0] for n in node.by_args}
        for (n, key), inner in function.inner.items():
            kept = node.kept | node.by_args
            if n not in kept and not around[n][0] & kept:
                found = self._select(inner)
                if found is not None:
                    node.entered[n, key] = found
        return node if node.kept or node.by_args or node.entered else None

    def _everywhere(self, node: MemoNode, function: _Function) -> None:
        """Calls of the same methods in branches that no sample took are kept, too."""
        for n, (outer, text, _) in calls_around(function.callee.fn).items():
            if text.partition("(")[0] in self._methods and not outer & (node.kept | node.by_args):
                node.by_args.add(n)
        node.by_args -= node.kept | {n for n, _ in node.entered}
        for key, inner in node.entered.items():
            self._everywhere(inner, function.inner[key])

    # -- verifying

    def _verify(self, plan: MemoPlan, indices: list[int]) -> bool:
        """Whether a selection changes no bit. A call that must not be kept is struck out, for the next selection."""
        code = self._executed()
        checker = _Checker(self, plan, code)
        for i in indices:
            self._seed(40)
            try:
                plan.root.run(checker, self._dataset.__getitem__, (i,), {})  # type: ignore[arg-type]
            except Exception as e:
                self.reasons.append(f"with calls from memory sample {i} fails: {type(e).__name__}: {e}")
                return False
        if checker.struck:
            return False
        if code.changes:
            self.reasons.append(f"a call changes {code.changes}")
            return False
        plan.nbytes = checker.nbytes / max(1, checker.kept)
        plan.reads, plan.globals = (None if code.looks_up_names else code.names), sorted(code.variables)
        problems: list[str] = []
        memo = Memo(self._dataset, _Kept(), Table(1 << 12), self._save, problems.append)
        served = []
        for round_ in range(2):
            for k, i in enumerate(indices):
                self._seed(60 + k)
                plain = self._dataset[i]
                states = self._save().values()
                self._seed(60 + k)
                began = time.perf_counter()
                kept = plan.root.run(memo, self._dataset.__getitem__, (i,), {})
                if round_:
                    served.append(time.perf_counter() - began)
                if problems or not equal_bits(plain, kept) or self._save().values() != states:
                    self.reasons.append(problems[0] if problems else f"with calls from memory sample {i} is another")
                    return False
        plan.served_s = min(served)  # the machine's other work only adds to it
        return True

    def strike(self, key: Any, why: str) -> None:
        """Calls with such a key must not be kept."""
        assert self.root is not None
        waiting = [self.root]
        while waiting:
            function = waiting.pop()
            waiting += function.inner.values()
            code = function.callee.fn.__code__
            if key[:2] == (code.co_filename, code.co_firstlineno):
                function.struck.add(key[2])
            name = str(key[1]).rpartition(".")[2]
            for n, (_, text, _) in calls_around(function.callee.fn).items():
                if len(key) == 5 and isinstance(key[1], str) and text.partition("(")[0].endswith(name):
                    function.struck.add(n)
        self.reasons.append(why)


class _Kept:
    """What a selection keeps while it is verified."""

    usable = True

    def __init__(self) -> None:
        self._samples: dict[int, tuple[str, list[Any]]] = {}

    def where(self, numbers: Any) -> Any:
        return [int(n) + 1 if int(n) in self._samples else 0 for n in numbers]

    def read(self, at: int) -> Any:
        text, leaves = self._samples[at - 1]
        return Layout(text).put(leaves)

    def admit(self, samples: dict[int, tuple[str, list[Any]]], spent_ns: int, keep_ns: int) -> None:
        self._samples.update({n: (text, [x.copy() for x in leaves]) for n, (text, leaves) in samples.items()})


class _Visitor:
    """What a surveyed function finds as ``_stoker``."""

    def __init__(self, survey: Survey, function: _Function, depth: int) -> None:
        self._survey, self._function, self._depth = survey, function, depth

    def visit(self, number: int, run: Callable[[], Any], values: tuple[Any, ...]) -> Any:
        return self._survey.visit(self._function, number, run, values)

    def call(self, number: int, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._survey.call(self._function, number, called, args, kwargs, self._depth)


class _Checker:
    """Stands where ``Memo`` stands: makes each kept call twice, under other random states, and compares."""

    def __init__(self, survey: Survey, plan: MemoPlan, code: Any) -> None:
        self._survey, self._code = survey, code
        self.names = names_of(survey._dataset)
        self.struck = False
        self.kept, self.nbytes = 0, 0.0

    def answer(self, key: Any, call: Callable[[], Any]) -> Any:
        survey = self._survey
        before, look = survey._save(), Fingerprint(survey._dataset)
        outs: list[Any] = []
        printed, self._code.asks = (positions(survey._dataset), output_size()), ""
        self._code.run(lambda: outs.append(call()))
        states = survey._save()
        survey._seed(90 + self.kept)
        again = call()
        before.restore()
        why = ""
        changes = look.changed(survey._dataset)
        if states.values() != before.values():
            why = "it draws random numbers"
        elif changes:
            why = f"it changes {changes[0]}"
        elif self._code.asks:
            why = f"it asks {self._code.asks}"
        elif (positions(survey._dataset), output_size()) != printed:
            why = "it prints, logs or writes to a file"
        elif shares_memory(outs[0], again):
            why = "its results are one and the same object"
        elif not equal_bits(outs[0], again):
            why = "it gives other bits on a repeat"
        else:
            try:
                self.nbytes += sum(x.nbytes for x in take(outs[0])[1])
            except CacheError as e:
                why = str(e)
        self.kept += 1
        if why:
            self.struck = True
            survey.strike(key, f"the call {key[1]} is not kept: {why}")
        return copy.deepcopy(again) if not why else again
