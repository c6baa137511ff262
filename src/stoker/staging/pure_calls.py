"""Finds the calls of a dataset that can be answered from memory (see ``memoize``). It runs where ``trial`` runs.

1. Samples are made with every call reported: how long it took, and whether it moved a generator (``Survey``).
2. The outermost calls that did not, and that took long enough, are selected.
3. Each selected call is made twice, under other random states, and must give the same bits (``_Checker``). One that
   does not is struck out, and the selection is made anew.
4. With calls answered from memory, samples must have the bits, and leave the random states, that they have without.
"""

from __future__ import annotations

import copy
import os
import time
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..core.fingerprint import Fingerprint
from ..core.packages import libraries
from ..core.random_state import RandomState
from .aliases import share_memory
from .callee import Call, Callee, callee_of, key_of
from .compare import equal_bits
from .executed_code import Executed, is_closed
from .isolate import output_size
from .memoize import CallKey, Key, MemoNode, SiteKey, call_key, is_small, names_of
from .recompile import rebound
from .rewrite_calls import sites_of, surveyed
from .samples import TrialSamples
from .source import NoSource
from .store.encode import CacheError
from .verify import Kept, file_positions, mean_without_longest

WORTH_S = 100e-6  # a call that is kept takes at least so long
WORTH_SHARE = 0.02  # and, all times that a sample makes it, such a part of a sample
VISITS = 3000  # calls that one survey looks at; then the rest of the code runs as it is
DEPTH = 5
ROUNDS = 6  # selections that are verified
PAYS = 0.7  # of a sample's time is left at most, or nothing is kept
SEED = 20  # of the first sample of a survey
CHECK_SEED, SECOND_CALL_SEED, COMPARE_SEED = 40, 90, 60


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


class _SurveyedFunction:
    """What was seen of the calls of one function.

    Attributes:
        callee: the function.
        seconds: by number of a call: how long it took each time, without its arguments.
        seconds_with_args: the same, with what was evaluated for its arguments.
        not_by_args: numbers of calls that draw, or whose arguments are no small values.
        not_by_values: numbers of calls that draw, or for whose arguments something draws, or that mention local
            variables that are no small values.
        struck: numbers of calls that must not be kept.
        inner: what was seen of the functions that it calls, by number and ``key_of``.
    """

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self.seconds: dict[int, list[float]] = {}
        self.seconds_with_args: dict[int, list[float]] = {}
        self.not_by_args: set[int] = set()
        self.not_by_values: set[int] = set()
        self.struck: set[int] = set()
        self.inner: dict[tuple[int, str], _SurveyedFunction] = {}
        self._copy: types.FunctionType | None = None

    def copied(self) -> types.FunctionType:
        """A copy that reports its calls, made once: a sample may call it often. See ``surveyed``."""
        fn, known = self.callee.fn, self._copy
        self._copy = surveyed(fn, self.callee.is_method) if known is None else rebound(known, fn, True)
        return self._copy

    def all(self) -> Iterator[_SurveyedFunction]:
        """It, and those inside."""
        yield self
        for function in self.inner.values():
            yield from function.all()


class Survey:
    """Looks for calls that can be kept.

    Args:
        samples: of the dataset.
        changing: attributes that the script changes in each epoch: the calls must not read them.
    """

    def __init__(self, samples: TrialSamples, changing: Collection[str] = ()) -> None:
        self.samples = samples
        self.changing = set(changing)
        self.reasons: list[str] = []
        self._names = names_of(samples.dataset)
        self._visits = 0
        self._asking_s = 0.0  # seconds that went into rewriting functions, and not into calls
        self._least_s = 0.0  # of all samples together
        self._methods: set[str] = set()

    def run(self) -> MemoPlan | None:
        """Calls to be kept, verified; None where none pays."""
        samples = self.samples
        indices = samples.some()
        callee = callee_of(samples.dataset.__getitem__)
        if callee is None or is_closed(callee.fn, libraries()):
            return None
        self._root = _SurveyedFunction(callee)
        self._least_s = WORTH_SHARE * samples.sample_s * len(indices)
        try:
            for k, i in enumerate(indices):
                samples.seed(SEED + k)
                self._run_surveyed(self._root, Call(samples.dataset.__getitem__, (i,), {}), DEPTH)
        except NoSource as e:
            self.reasons.append(str(e))
            return None
        for _ in range(ROUNDS):
            self._methods.clear()
            node = self._select(self._root)
            if node is None:
                return None
            self._select_in_other_branches(node, self._root)
            plan = MemoPlan(node, sites=len(node.all_shown()))
            if self._check(plan, indices) and self._compare(plan, indices):
                return plan if plan.served_s < PAYS * max(1e-9, samples.sample_s) else None
        return None

    # -- what calls do

    def _run_surveyed(self, function: _SurveyedFunction, call: Call, depth: int) -> Any:
        copied, first = function.copied(), function.callee.first
        return copied(*first, *call.args, _stoker=_Visitor(self, function, depth), **call.kwargs)

    def visit(
        self, function: _SurveyedFunction, number: int, run: Callable[[], Any], values: tuple[object, ...] | None
    ) -> Any:
        """A call is made: what it costs, and whether it could be kept."""
        self._visits += 1
        if self._visits > VISITS:
            function.struck.add(number)
            return run()
        before, began = self.samples.states(), time.perf_counter() - self._asking_s
        out = run()
        function.seconds_with_args.setdefault(number, []).append(time.perf_counter() - self._asking_s - began)
        if values is None or not is_small(values) or before.moved():
            function.not_by_values.add(number)
        return out

    def call(self, function: _SurveyedFunction, number: int, call: Call, depth: int) -> Any:
        """The call itself, its arguments being evaluated."""
        before, began = self.samples.states(), time.perf_counter() - self._asking_s
        out = self._run(function, number, call, depth)
        function.seconds.setdefault(number, []).append(time.perf_counter() - self._asking_s - began)
        if call_key(call, self._names) is None or before.moved():
            function.not_by_args.add(number)
        return out

    def _run(self, function: _SurveyedFunction, number: int, call: Call, depth: int) -> Any:
        """Makes a call. If it is one of a Python function, the calls in there are surveyed, too."""
        callee = callee_of(call.function)
        if callee is None or depth <= 1 or self._visits > VISITS or is_closed(callee.fn, libraries()):
            return call.run()
        began, key = time.perf_counter(), (number, key_of(call.function))
        inner = function.inner.get(key) or _SurveyedFunction(callee)
        inner.callee = callee
        try:
            inner.copied()
        except NoSource:
            return call.run()
        finally:
            self._asking_s += time.perf_counter() - began
        function.inner[key] = inner
        return self._run_surveyed(inner, call, depth - 1)

    # -- choosing

    def _select(self, function: _SurveyedFunction) -> MemoNode | None:
        """The outermost calls that can be kept and take long enough; None where there are none."""
        node = MemoNode()
        sites = sites_of(function.callee.fn)
        file = os.path.basename(function.callee.fn.__code__.co_filename)
        by_args = self._slow(function.seconds) - function.struck - function.not_by_args
        fit = by_args | (self._slow(function.seconds_with_args) - function.struck - function.not_by_values)
        for n in sorted(fit):
            site = sites[n]
            if not site.around & fit:
                (node.by_args if n in by_args else node.by_values).add(n)
                node.shown.append(f"{file}:{site.line} {site.text}")
        if any("self." in sites[n].text for n in node.by_args):
            self._methods |= {sites[n].function for n in node.by_args}
        kept = node.by_values | node.by_args
        for (n, key), inner in function.inner.items():
            if n not in kept and not sites[n].around & kept:
                found = self._select(inner)
                if found is not None:
                    node.entered[n, key] = found
        return node if kept or node.entered else None

    def _slow(self, seconds: dict[int, list[float]]) -> set[int]:
        """Numbers of calls that take long enough to be kept."""
        typical = {n: sorted(spent)[len(spent) // 2] for n, spent in seconds.items()}
        return {n for n, s in typical.items() if s > WORTH_S and s * len(seconds[n]) > self._least_s}

    def _select_in_other_branches(self, node: MemoNode, function: _SurveyedFunction) -> None:
        """Calls of the same methods in branches that no sample took are kept, too."""
        for n, site in sites_of(function.callee.fn).items():
            if site.function in self._methods and not site.around & (node.by_values | node.by_args):
                node.by_args.add(n)
        node.by_args -= node.by_values | {n for n, _ in node.entered}
        for key, inner in node.entered.items():
            self._select_in_other_branches(inner, function.inner[key])

    # -- verifying

    def _check(self, plan: MemoPlan, indices: list[int]) -> bool:
        """Whether each selected call is pure. One that is not is struck out, for the next selection."""
        samples = self.samples
        checker = _Checker(self)
        for i in indices:
            samples.seed(CHECK_SEED)
            try:
                plan.root.run(checker, Call(samples.dataset.__getitem__, (i,), {}))
            except Exception as e:
                self.reasons.append(f"with calls from memory sample {i} fails: {type(e).__name__}: {e}")
                return False
        if checker.struck:
            return False
        plan.nbytes = checker.nbytes / max(1, checker.checked)
        plan.reads = None if checker.looks_up_names else checker.names_read
        plan.globals = sorted(checker.variables)
        return True

    def _compare(self, plan: MemoPlan, indices: list[int]) -> bool:
        """Whether samples with calls from memory are those without, the first time and when all calls are answered."""
        samples = self.samples
        replay = _Replay(samples)
        served: list[float] = []
        for from_memory in (False, True):
            for k, i in enumerate(indices):
                samples.seed(COMPARE_SEED + k)
                plain = samples.dataset[i]
                states = samples.states().in_order()
                samples.seed(COMPARE_SEED + k)
                began = time.perf_counter()
                kept = plan.root.run(replay, Call(samples.dataset.__getitem__, (i,), {}))
                if from_memory:
                    served.append(time.perf_counter() - began)
                if not equal_bits(plain, kept) or samples.states().in_order() != states:
                    self.reasons.append(f"with calls from memory sample {i} is another")
                    return False
        plan.served_s = mean_without_longest(served)
        return True

    def strike(self, key: Key, why: str) -> None:
        """Calls with such a key must not be kept."""
        for function in self._root.all():
            code = function.callee.fn.__code__
            if isinstance(key, SiteKey):
                if (key.file, key.function_line) == (code.co_filename, code.co_firstlineno):
                    function.struck.add(key.site)
            else:
                name = key.function.rpartition(".")[2]
                sites = sites_of(function.callee.fn)
                function.struck |= {n for n, site in sites.items() if site.function.endswith(name)}
        self.reasons.append(why)


class _Visitor:
    """What a surveyed function finds as ``_stoker``."""

    def __init__(self, survey: Survey, function: _SurveyedFunction, depth: int) -> None:
        self._survey = survey
        self._function = function
        self._depth = depth

    def visit(self, number: int, run: Callable[[], Any], values: tuple[object, ...] | None) -> Any:
        return self._survey.visit(self._function, number, run, values)

    def call(self, number: int, called: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        return self._survey.call(self._function, number, Call(called, args, kwargs), self._depth)

    def item(self, number: int, value: Any, index: object, values: tuple[object, ...] | None) -> Any:
        getter: Any = getattr(value, "__getitem__", None)
        if callee_of(getter) is None:
            return value[index]
        return self.visit(number, lambda: self.call(number, getter, index), values)


class _Replay:
    """Answers calls as a ``Memo`` does, with copies of what they returned first; what it keeps is its own."""

    def __init__(self, samples: TrialSamples) -> None:
        self.names = names_of(samples.dataset)
        self._samples = samples
        self._kept: dict[str, Kept] = {}

    def answer(self, key: Key, call: Callable[[], Any]) -> Any:
        kept = self._kept.get(repr(key))
        if kept is not None:
            return kept.read()
        before = self._samples.states()
        out = call()
        if not before.moved():
            self._kept[repr(key)] = Kept(out)
        return out


class _Checker:
    """Stands where ``Memo`` stands: makes each kept call twice, under other random states, and compares.

    Attributes:
        struck: a call must not be kept.
        checked: calls so far.
        nbytes: of what they returned.
        names_read: as ``Executed.names``, of all calls.
        variables: as ``Executed.variables``.
        looks_up_names: as ``Executed.looks_up_names``.
    """

    def __init__(self, survey: Survey) -> None:
        self.names = names_of(survey.samples.dataset)
        self.struck = False
        self.checked = 0
        self.nbytes = 0.0
        self.names_read: set[str] = set()
        self.variables: set[tuple[str, str]] = set()
        self.looks_up_names = False
        self._survey = survey

    def answer(self, key: Key, call: Callable[[], Any]) -> Any:
        samples, code = self._survey.samples, Executed(self._survey.samples.dataset)
        states = samples.states()
        fingerprint = Fingerprint(samples.dataset)
        written = file_positions(samples.dataset), output_size()
        first = code.run(call)
        states_after = samples.states()
        samples.seed(SECOND_CALL_SEED + self.checked)
        second = call()
        states.restore()
        self.checked += 1
        self.names_read |= code.names
        self.variables |= code.variables
        self.looks_up_names |= code.looks_up_names
        why = self._why_not(code, states, states_after, fingerprint, first, second)
        if not why and (file_positions(samples.dataset), output_size()) != written:
            why = "it prints, logs or writes to a file"
        if not why:
            try:
                self.nbytes += Kept(first).nbytes
            except CacheError as e:
                why = str(e)
        if why:
            self.struck = True
            called = key.function if isinstance(key, CallKey) else f"{os.path.basename(key.file)}:{key.function_line}"
            self._survey.strike(key, f"the call {called} is not kept: {why}")
            return second
        return copy.deepcopy(second)

    def _why_not(
        self,
        code: Executed,
        before: RandomState,
        after: RandomState,
        fingerprint: Fingerprint,
        first: object,
        second: object,
    ) -> str:
        changes = code.changes or next(iter(fingerprint.changed(self._survey.samples.dataset)), "")
        if after.in_order() != before.in_order():
            return "it draws random numbers"
        if changes:
            return f"it changes {changes}"
        if code.asks:
            return f"it asks {code.asks}"
        for name in sorted(code.names & self._survey.changing):
            return f"it reads {name}, which the script changes in each epoch"
        if share_memory(first, second):
            return "its results are one and the same object"
        return "" if equal_bits(first, second) else "it gives other bits on a repeat"
