"""Finds the calls of a dataset that can be answered from memory (see ``memoize``). It runs where ``trial`` runs.

1. Samples are made with every call reported: how long it took, and whether it moved a generator (``Survey``).
2. The outermost calls that did not, and that took long enough, are selected.
3. Each selected call is made twice, under other random states, and must give the same bits (``Checker``). One that
   does not is struck out, and the selection is made anew.
4. With calls answered from memory, samples must have the bits, and leave the random states, that they have without.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import types
from collections.abc import Collection
from dataclasses import dataclass, field

from ..core.compare import equal_bits
from ..core.errors import one_line
from ..core.packages import libraries
from .callee import AnyCallable, Call, Thunk, Value, Values, call_of, callee_of, key_of
from .check_calls import Checker, Replay, SeenKeys
from .executed_code import globals_named, is_closed
from .isolate import classes_unpickled
from .memoize import MemoKey, MemoNode, SiteKey, call_key, names_of, values_of
from .plan import PlanNode, SliceNode, Unplanned
from .samples import SAMPLES, TrialSamples
from .search import PlanSearch
from .source import NoSource
from .stages import cut_of
from .surveyed_function import SurveyedFunction, may_be_cut

WORTH_S = 100e-6  # a call that is kept takes at least so long
WORTH_SHARE = 0.02  # and, all times that a sample makes it, such a part of a sample
OFTEN = 32  # calls, after which one is made alone; if it takes under ``WORTH_S``, no more are surveyed
VISITS = 3000  # calls that one survey looks at; then the rest of the code runs as it is
DEPTH = 8  # a mosaic calls load_image in a container of containers
CHECKS = 3  # times that samples are made to see each selected call
ROUNDS = 6  # selections that are verified
PAYS = 0.8  # of a sample's time is left at most, or nothing is kept
SEED = 20  # of the first sample of a survey
CHECK_SEED, COMPARE_SEED = 40, 60


@dataclass
class MemoPlan:
    """Calls that are answered from memory."""

    root: MemoNode  # of ``dataset.__getitem__``
    reads: set[str] | None = None  # names of attributes and globals that the kept calls may read; None: any
    # module and name of each global variable that they read
    globals: list[tuple[str, str]] = field(default_factory=list)
    served_s: float = 0.0  # seconds of a sample when all calls are answered
    nbytes: float = 0.0  # bytes that are kept of a call
    pickled: str = ""  # a class of which an object is pickled in it; "" where none is
    sites: int = 0  # how many calls of the code are kept


class Survey:
    """Looks for calls that can be kept. ``changing``: attributes that the script changes in each epoch: the calls
    must not read them."""

    def __init__(self, samples: TrialSamples, changing: Collection[str] = ()) -> None:
        self.samples = samples
        self.changing = set(changing)
        self.reasons: list[str] = []
        self._names = names_of(samples.dataset)
        self._visits = 0
        self._asking_s = 0.0  # seconds that went into rewriting functions and comparing states, and not into calls
        self._least_s = 0.0  # of a sample
        self._plain_s = 0.0  # the same, of those that are compared
        self._samples = 1  # that were surveyed
        self._methods: set[str] = set()

    def run(self) -> MemoPlan | None:
        """Calls to be kept, verified; None where none pays."""
        samples = self.samples
        indices = samples.some()
        callee = callee_of(samples.call(indices[0]).function)
        if callee is None or is_closed(callee.fn, libraries()):
            return None
        self._root = SurveyedFunction(callee)
        times = [samples.sample_s]
        unseen = [samples.fresh.pop() for _ in samples.fresh[:SAMPLES]]  # a dataset may hold those it has seen
        for k, i in enumerate(unseen or indices):
            samples.seed(SEED + k)
            began = time.perf_counter() - self._asking_s
            try:
                with samples.emptied():
                    self._run_surveyed(self._root, samples.call(i), DEPTH)
            except NoSource as e:
                self.reasons.append(str(e))
                return None
            except Exception:  # the user's: a sample that cannot be loaded
                continue
            times.append(time.perf_counter() - self._asking_s - began)
        self._least_s, self._samples = WORTH_SHARE * min(times), max(1, len(times) - 1)
        for k in range(ROUNDS):
            self._methods.clear()
            node = self._select(self._root)
            if node is None:
                return None
            self._select_in_other_branches(node, self._root)
            plan = MemoPlan(node, sites=len(node.all_shown()))
            seen = SeenKeys()
            if self._check(plan, indices, CHECK_SEED + k, seen) and self._compare(plan, indices, seen):
                return plan if plan.served_s < PAYS * self._plain_s else None
        return None

    # -- what calls do

    def _run_surveyed(self, function: SurveyedFunction, call: Call, depth: int) -> Value:
        copied, first = function.copied(), function.callee.first
        return copied(*first, *call.args, _stoker=_Visitor(self, function, depth), **call.kwargs)

    def visit(self, function: SurveyedFunction, number: int, run: Thunk, values: Values | None) -> Value:
        """A call is made: what it costs, and whether it could be kept. One that is made often and takes no time, as in
        a loop over the letters of a text, is surveyed no more."""
        if number in function.cheap:
            return run()
        self._visits += 1
        if self._visits > VISITS:
            function.struck.add(number)
            return run()
        mentioned = None if values is None else values_of(values)
        out, moved = self._timed(function.seconds_with_args.setdefault(number, []), run)
        if moved:
            function.drew.add(number)
        function.note_large(number, mentioned)
        return out

    def call(self, function: SurveyedFunction, number: int, call: Call, depth: int) -> Value:
        """The call itself, its arguments being evaluated."""
        if number in function.cheap:
            return call.run()
        has_key = call_key(call, self._names) is not None
        if not has_key and number not in function.calls and may_be_cut(call):
            function.calls[number] = call.with_copied_arguments(self.samples.dataset)
        spent = function.seconds.setdefault(number, [])
        is_alone = len(spent) % OFTEN == OFTEN - 1  # its own calls are not surveyed, which takes time
        run = call.run if is_alone else functools.partial(self._run, function, number, call, depth)
        out, moved = self._timed(spent, run)
        if is_alone and spent[-1] < WORTH_S:
            function.cheap.add(number)
        if moved:
            function.draws_itself.add(number)
        if moved or not has_key:
            function.not_by_args.add(number)
        return out

    def _timed(self, seconds: list[float], run: Thunk) -> tuple[Value, bool]:
        """What a call returns, and whether it moved a generator. To ask for that does not count as a call's time."""
        began = time.perf_counter()
        before = self.samples.states()
        self._asking_s += time.perf_counter() - began
        began = time.perf_counter() - self._asking_s
        out = run()
        ended = time.perf_counter()
        seconds.append(ended - self._asking_s - began)
        moved = bool(before.moved())
        self._asking_s += time.perf_counter() - ended
        return out, moved

    def _run(self, function: SurveyedFunction, number: int, call: Call, depth: int) -> Value:
        """Makes a call. If it is one of a Python function, the calls in there are surveyed, too."""
        began = time.perf_counter()
        inner = self._inner(function, number, call) if depth > 1 and self._visits <= VISITS else None
        self._asking_s += time.perf_counter() - began
        return call.run() if inner is None else self._run_surveyed(inner, call, depth - 1)

    def _inner(self, function: SurveyedFunction, number: int, call: Call) -> SurveyedFunction | None:
        """The Python function of a call, whose own calls are surveyed; None where it is of a library, say."""
        callee = callee_of(call.function)
        if callee is None or is_closed(callee.fn, libraries()):
            return None
        key = number, key_of(call.function)
        with contextlib.suppress(NoSource):
            inner = function.inner.get(key) or SurveyedFunction(callee)
            inner.callee = callee
            inner.copied()
            function.inner[key] = inner
        return function.inner.get(key)

    # -- choosing

    def _select(self, function: SurveyedFunction) -> MemoNode | None:
        """The outermost calls that can be kept and take long enough; None where there are none."""
        node = MemoNode()
        sites = function.sites
        by_args = self._slow(function.seconds) - function.struck - function.not_by_args
        slow = self._slow(function.seconds_with_args) - function.struck - function.drew - by_args
        by_values = set(filter(function.has_small_variables, slow))
        prefixes = self._prefixes(function)
        fit = by_args | by_values | prefixes
        kept = {n for n in fit if not sites[n].around & fit}
        node.by_args, node.by_values = kept & by_args, kept & by_values
        for n in kept & prefixes:
            found = function.prefixes[n]
            assert found is not None
            node.prefixes[n] = {key_of(function.calls[n].function): found}
        file = os.path.basename(function.callee.fn.__code__.co_filename)
        node.shown = [f"{file}:{sites[n].line} {_shown(function, n, node)}" for n in sorted(kept)]
        if any("self." in sites[n].text for n in node.by_args):
            self._methods |= {sites[n].function for n in node.by_args}
        for (n, key), inner in function.inner.items():
            if n not in kept and not sites[n].around & kept:
                within = self._select(inner)
                if within is not None:
                    node.entered[n, key] = within
        return node if kept or node.entered else None

    def _prefixes(self, function: SurveyedFunction) -> set[int]:
        """Calls that draw and have a first part that can be kept."""
        out = set()
        for n, call in function.calls.items():
            if n not in function.draws_itself or n in function.struck or function.arguments_draw(n):
                continue
            if not function.has_small_variables(n):
                continue
            if n not in function.prefixes:
                function.prefixes[n] = self._prefix(call)
            if function.prefixes[n] is not None:
                out.add(n)
        return out

    def _prefix(self, call: Call) -> PlanNode | None:
        """How a call is made in two parts; None where the first one takes no time, or there is none."""
        found = PlanSearch(self.samples).prefix(call.with_copied_arguments(self.samples.dataset))
        if found is None:
            return None
        copied = call.with_copied_arguments(self.samples.dataset)
        began = time.perf_counter()
        try:
            found.head(copied)
        except (Exception, Unplanned):
            return None
        return found if time.perf_counter() - began > max(WORTH_S, self._least_s) else None

    def _slow(self, seconds: dict[int, list[float]]) -> set[int]:
        """Numbers of calls that take long enough to be kept."""
        typical = {n: _typical(spent) for n, spent in seconds.items()}
        least_s = self._least_s * self._samples
        return {n for n, s in typical.items() if s > WORTH_S and s * len(seconds[n]) > least_s}

    def _select_in_other_branches(self, node: MemoNode, function: SurveyedFunction) -> None:
        """Calls of the same methods in branches that no sample took are kept, too."""
        kept = node.by_values | node.by_args | set(node.prefixes)
        for n, site in function.sites.items():
            if site.function in self._methods and not site.around & kept:
                node.by_args.add(n)
        node.by_args -= node.by_values | {n for n, _ in node.entered}
        for key, inner in node.entered.items():
            self._select_in_other_branches(inner, function.inner[key])

    # -- verifying

    def _check(self, plan: MemoPlan, indices: list[int], seed: int, seen: SeenKeys) -> bool:
        """Whether each selected call is pure. One that is not is struck out, for the next selection. ``seed``: another
        one each time, for the dataset may hold what it has loaded for others."""
        samples = self.samples
        checker = Checker(samples, self.changing, self.strike, seen)
        for k, i in enumerate(indices * CHECKS):
            samples.seed(seed + 100 * k)
            seen.begin(k % len(indices), k)
            if k >= len(indices) and not self._unchecked(plan.root, self._root, _checked(plan.root, self._root)):
                break
            try:
                with samples.emptied():
                    plan.root.run(checker, samples.call(i))
            except Exception as e:
                self.reasons.append(f"with calls from memory sample {i} fails: {one_line(e)}")
                return False
        if checker.struck:
            return False
        unchecked = self._unchecked(plan.root, self._root, _checked(plan.root, self._root))
        for function, number in unchecked:  # what it reads is not known
            function.struck.add(number)
        if unchecked:
            return False
        plan.nbytes, plan.pickled = checker.nbytes / max(1, checker.checked), checker.pickled
        names, variables = _reads_in_calls(plan.root, self._root)
        around = _entered(plan.root, self._root)
        plan.reads = None if checker.looks_up_names else samples.may_read(checker.names_read | names, around)
        plan.globals = sorted(checker.variables | variables | classes_unpickled())
        return True

    def _unchecked(
        self, node: MemoNode, function: SurveyedFunction, checked: Collection[str]
    ) -> list[tuple[SurveyedFunction, int]]:
        """Selected calls that no check has made. ``checked``: functions that were checked, in this place or another."""
        selected = (node.by_values | node.by_args | set(node.prefixes)) - node.asked
        out = [(function, n) for n in selected if n not in node.by_args or function.sites[n].function not in checked]
        for key, inner in node.entered.items():
            out += self._unchecked(inner, function.inner[key], checked)
        return out

    def _compare(self, plan: MemoPlan, indices: list[int], seen: SeenKeys) -> bool:
        """Whether samples with calls from memory are those without, the first time and when all calls are answered; and
        whether those calls come again in other epochs."""
        samples = self.samples
        replay = Replay(samples, seen)
        shortest = [(float("inf"), float("inf"))] * len(indices)  # seconds of a sample, and with calls from memory
        for times_before in range(3):
            if times_before > 1 and self._pays(plan, shortest):
                break  # else the machine may have had other work
            for k, i in enumerate(indices):
                samples.seed(COMPARE_SEED + k)
                began = time.perf_counter()
                plain = samples.make(i)
                plain_s = time.perf_counter() - began
                states = samples.states().in_order()
                samples.seed(COMPARE_SEED + k)
                seen.begin(k, -1)
                began = time.perf_counter()
                with samples.emptied():
                    kept = plan.root.run(replay, samples.call(i))
                served_s = time.perf_counter() - began if times_before else float("inf")
                shortest[k] = min(shortest[k][0], plain_s), min(shortest[k][1], served_s)
                if not equal_bits(plain, kept) or samples.states().in_order() != states:
                    self.reasons.append(f"with calls from memory sample {i} is another")
                    return False
        drawn = list(seen.drawn_anew())
        for key in drawn:
            self.strike(key, "a call with other arguments each time is not kept")
        self._pays(plan, shortest)
        samples.sample_s = min(samples.sample_s, self._plain_s)
        return not drawn

    def _pays(self, plan: MemoPlan, shortest: list[tuple[float, float]]) -> bool:
        """Whether it takes less time with calls from memory; notes both times."""
        self._plain_s, plan.served_s = (sum(seconds) / len(shortest) for seconds in zip(*shortest, strict=True))
        return plan.served_s < PAYS * self._plain_s

    def strike(self, key: MemoKey, why: str) -> None:
        """Calls with such a key must not be kept."""
        for function in self._root.all():
            code = function.callee.fn.__code__
            if isinstance(key, SiteKey):
                if (key.file, key.function_line) == (code.co_filename, code.co_firstlineno):
                    function.struck.add(key.site)
            else:
                name = key.function.rpartition(".")[2]
                function.struck |= {n for n, site in function.sites.items() if site.function.endswith(name)}
        self.reasons.append(why)


def _typical(spent: list[float]) -> float:
    """One of the shorter times of a call: what else the machine does only adds to them."""
    return sorted(spent)[len(spent) // 4]


def _checked(node: MemoNode, function: SurveyedFunction) -> set[str]:
    """The functions of calls that were made in a check and are known by their arguments, as the source names them."""
    found = {function.sites[n].function for n in node.asked & node.by_args}
    return found.union(*(_checked(inner, function.inner[key]) for key, inner in node.entered.items()))


def _reads_in_calls(node: MemoNode, function: SurveyedFunction) -> tuple[set[str], set[tuple[str, str]]]:
    """What the source of kept calls reads before they are made: names, and the global variables among them."""
    texts = [function.sites[n].function for n, _ in node.entered]
    for n in node.by_values | node.by_args | set(node.prefixes):
        texts.append(function.sites[n].text)
    names = set(re.findall(r"\w+", " ".join(texts)))
    variables = globals_named(function.callee.fn, names)
    for key, inner in node.entered.items():
        more = _reads_in_calls(inner, function.inner[key])
        names |= more[0]
        variables |= more[1]
    return names, variables


def _entered(node: MemoNode, function: SurveyedFunction) -> list[types.FunctionType]:
    """Functions of which calls are kept, and not the whole."""
    out = []
    for key, inner in node.entered.items():
        out += [function.inner[key].callee.fn, *_entered(inner, function.inner[key])]
    return out


def _shown(function: SurveyedFunction, number: int, node: MemoNode) -> str:
    """What is kept of a call, for reports."""
    text = function.sites[number].text
    for found in node.prefixes.get(number, {}).values():
        first = f"{found.kept} of {len(found.names)} transforms" if isinstance(found, SliceNode) else ""
        text += f": up to {cut_of(found) or first}"
    return text


class _Visitor:
    """What a surveyed function finds as ``_stoker``."""

    def __init__(self, survey: Survey, function: SurveyedFunction, depth: int) -> None:
        self._survey = survey
        self._function = function
        self._depth = depth

    def visit(self, number: int, run: Thunk, values: Values | None) -> Value:
        return self._survey.visit(self._function, number, run, values)

    def call(self, number: int, called: AnyCallable, /, *args: object, **kwargs: object) -> Value:
        return self._survey.call(self._function, number, call_of(called, args, kwargs), self._depth)

    def item(self, number: int, value: Value, index: object, values: Values | None) -> Value:
        getter: Value = getattr(value, "__getitem__", None)
        if callee_of(getter) is None:
            self._function.note_large(number, None if values is None else values_of(values))
            return value[index]
        return self.visit(number, lambda: self.call(number, getter, index), values)
