"""Finds calls of a dataset that can be answered from memory (see ``memoize``). Runs inside a ``trial``.

1. Make samples with every call reported: its duration, and whether it advanced a generator (``Survey``).
2. Select the outermost calls that did not, and that took long enough.
3. Make each selected call twice, under different random states; it must give the same bits (``Checker``). If not,
   strike it out and select again.
4. With calls answered from memory, samples must have the same bits and leave the same random states as without.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ..core.compare import equal_bits
from ..core.errors import one_line
from ..core.packages import libraries
from .callee import AnyCallable, Call, Thunk, Value, Values, call_of, callee_of, key_of
from .check_calls import Checker, Replay, SeenKeys, SurveyedFunction, may_be_cut
from .containers import READ_OF_MODULES
from .executed_code import globals_named, is_closed
from .isolate import classes_unpickled
from .memoize import MemoKey, MemoNode, SiteKey, call_key, names_of, values_of
from .plan import PlanNode, SliceNode, Unplanned
from .samples import SAMPLES, TrialSamples
from .search import PlanSearch
from .source import NoSource
from .stages import cut_of

WORTH_S = 100e-6  # minimum duration of a cached call
WORTH_SHARE = 0.02  # and minimum share of a sample's time, over all its occurrences in the sample
# one in so many calls is timed without surveying its inner calls; if it takes less than ``WORTH_S``, the site is no
# longer surveyed
OFTEN = 32
VISITS = 3000  # calls that one survey inspects; after that, code runs unchanged
DEPTH = 8  # of nested calls: a mosaic calls load_image in a container of containers
CHECKS = 3  # passes over the samples to encounter each selected call
ROUNDS = 6  # maximum number of selections to verify
PAYS = 0.8  # a sample must take at most this share of its time, or nothing is cached
TIMED = 4  # further measurements of a sample whose calls are answered
BUSY_S = 0.2  # times that say that a cache does not pay are measured again for this long
SEED = 20  # for the first sample of a survey
CHECK_SEED, COMPARE_SEED = 40, 60
KnownFunction: TypeAlias = tuple[MemoNode, SurveyedFunction]  # which calls of a function are cached, and all its calls


@dataclass
class MemoPlan:
    """Calls to be answered from memory."""

    root: MemoNode  # of ``dataset.__getitem__``
    reads: set[str] | None = None  # names of attributes and globals that the cached calls may read; None: any
    globals: list[tuple[str, str]] = field(default_factory=list)  # module and name of each that they read
    served_s: float = 0.0  # seconds per sample if all calls are answered
    nbytes: float = 0.0  # bytes cached per call
    pickled: str = ""  # a class whose objects are pickled in it; "" if none
    sites: int = 0  # number of call sites that are cached


class Survey:
    """Looks for calls that can be cached, and do not read what the script changes in each epoch (``changing``)."""

    def __init__(self, samples: TrialSamples, changing: Collection[str] = ()) -> None:
        self.samples = samples
        self.changing = set(changing)
        self.reasons: list[str] = []
        self._names = names_of(samples.dataset)
        self._visits = 0
        self._asking_s = 0.0  # seconds spent on rewriting functions and comparing states rather than on calls
        self._least_s = 0.0  # minimum seconds per sample for a cached call
        self._plain_s = 0.0  # mean seconds of the compared samples, made without a cache
        self._samples = 1  # number of surveyed samples
        self._methods: set[str] = set()

    def run(self) -> MemoPlan | None:
        """Returns a verified selection of calls to cache; None if none pays off."""
        samples = self.samples
        indices = samples.some()
        callee = callee_of(samples.call(indices[0]).function)
        if callee is None or is_closed(callee.fn, libraries()):
            return None
        self._root = SurveyedFunction(callee)
        times = [samples.sample_s]
        # fresh samples, because a dataset may cache those it has loaded
        unseen = [samples.fresh.pop() for _ in samples.fresh[:SAMPLES]]
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
            self._select_in_other_branches(node)
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
        """Makes and surveys a call: its cost, and whether it can be cached. Frequent calls that take no time, as in a
        loop over the letters of a text, are no longer surveyed."""
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
        """Surveys the call itself, after its arguments were evaluated."""
        if number in function.cheap:
            return call.run()
        has_key = call_key(call, self._names) is not None
        if not has_key and number not in function.calls and may_be_cut(call):
            function.calls[number] = call.with_copied_arguments(self.samples.dataset)
        spent = function.seconds.setdefault(number, [])
        is_alone = len(spent) % OFTEN == OFTEN - 1  # without surveying its own calls, which takes time
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
        """Returns a call's result and whether it advanced a generator. Checking is not counted as the call's time."""
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
        """Makes a call. If it runs a Python function, the calls inside are surveyed too."""
        began = time.perf_counter()
        inner = self._inner(function, number, call) if depth > 1 and self._visits <= VISITS else None
        self._asking_s += time.perf_counter() - began
        return call.run() if inner is None else self._run_surveyed(inner, call, depth - 1)

    def _inner(self, function: SurveyedFunction, number: int, call: Call) -> SurveyedFunction | None:
        """The Python function of a call, to be surveyed; None if there is none, or it belongs to a library."""
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
        """Selects the outermost calls that can be cached and take long enough; None if there are none."""
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
        """Calls that draw but have a first part that can be cached."""
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
        """Finds how to make a call in two parts; None if that fails, or the first part takes no time."""
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
        """Numbers of calls that take long enough to be cached."""
        # a lower quartile of a call's times: other load on the machine only adds to them
        typical = {n: sorted(spent)[len(spent) // 4] for n, spent in seconds.items()}
        least_s = self._least_s * self._samples
        return {n for n, s in typical.items() if s > WORTH_S and s * len(seconds[n]) > least_s}

    def _select_in_other_branches(self, root: MemoNode) -> None:
        """Also selects calls of the same methods in branches that no sample took."""
        for node, function in _functions(root, self._root):
            kept = node.kept
            for n, site in function.sites.items():
                if site.function in self._methods and not site.around & kept:
                    node.by_args.add(n)
            node.by_args -= node.by_values | {n for n, _ in node.entered}

    # -- verifying

    def _check(self, plan: MemoPlan, indices: list[int], seed: int, seen: SeenKeys) -> bool:
        """Whether each selected call is pure; strikes out others for the next selection. ``seed``: different each time,
        because the dataset may cache what it loaded for others."""
        samples, functions = self.samples, list(_functions(plan.root, self._root))
        around = [function.callee.fn for _, function in functions]
        checker = Checker(samples, self.changing, self.strike, seen, around)
        for k, i in enumerate(indices * CHECKS):
            samples.seed(seed + 100 * k)
            seen.begin(k % len(indices), k)
            if k >= len(indices) and not _unchecked(functions):
                break
            try:
                with samples.emptied():
                    plan.root.run(checker, samples.call(i))
            except Exception as e:
                self.reasons.append(f"sample {i} fails when calls are served from the cache: {one_line(e)}")
                return False
        if checker.struck:
            return False
        unchecked = _unchecked(functions)
        for function, number in unchecked:  # it is unknown what these read
            function.struck.add(number)
        if unchecked:
            return False
        plan.nbytes, plan.pickled = checker.nbytes / max(1, checker.checked), checker.pickled
        names, variables = _reads_in_calls(functions)
        reads = samples.may_read(checker.names_read | names, around)
        made_from = samples.made_from(reads, without=around)
        is_unknown = checker.looks_up_names or made_from.looks_up_names
        plan.reads = None if is_unknown else reads | made_from.names | READ_OF_MODULES
        plan.globals = sorted(checker.variables | variables | made_from.variables | classes_unpickled())
        return True

    def _compare(self, plan: MemoPlan, indices: list[int], seen: SeenKeys) -> bool:
        """Whether samples with calls from memory equal those without, both at first and when all calls are answered;
        and whether those calls recur in other epochs."""
        samples = self.samples
        replay = Replay(samples, seen)
        # seconds of each sample without and with calls from memory
        shortest = [(float("inf"), float("inf"))] * len(indices)
        until = time.monotonic() + BUSY_S
        for times_before in range(50):
            if times_before > 1 and (self._pays(plan, shortest) or (times_before > 2 and time.monotonic() > until)):
                break  # otherwise the machine may have been busy
            for k, i in enumerate(indices):
                samples.seed(COMPARE_SEED + k)
                began = time.perf_counter()
                plain = samples.make(i)
                plain_s = time.perf_counter() - began
                states = samples.states().in_order()
                kept, served_s = self._served(plan, replay, k, i)
                if not times_before:
                    served_s = float("inf")
                elif served_s < plain_s / 2:  # short times are measured several times
                    served_s = min(served_s, *(self._served(plan, replay, k, i)[1] for _ in range(TIMED)))
                shortest[k] = min(shortest[k][0], plain_s), min(shortest[k][1], served_s)
                if not equal_bits(plain, kept) or samples.states().in_order() != states:
                    self.reasons.append(f"sample {i} differs when calls are served from the cache")
                    return False
        drawn = list(seen.drawn_anew())
        for key in drawn:
            self.strike(key, "a call whose arguments differ each time is not cached")
        self._pays(plan, shortest)
        samples.sample_s = min(samples.sample_s, self._plain_s)
        return not drawn

    def _served(self, plan: MemoPlan, replay: Replay, k: int, i: int) -> tuple[Value, float]:
        """Makes the k-th compared sample with calls from memory. Returns it and the seconds it took."""
        self.samples.seed(COMPARE_SEED + k)
        replay.seen.begin(k, -1)
        began = time.perf_counter()
        with self.samples.emptied():
            kept = plan.root.run(replay, self.samples.call(i))
        return kept, time.perf_counter() - began

    def _pays(self, plan: MemoPlan, shortest: list[tuple[float, float]]) -> bool:
        """Whether calls from memory save enough time; records both times."""
        self._plain_s, plan.served_s = (sum(seconds) / len(shortest) for seconds in zip(*shortest, strict=True))
        return plan.served_s < PAYS * self._plain_s

    def strike(self, key: MemoKey, why: str) -> None:
        """Excludes calls with such a key from caching."""
        for function in self._root.all():
            code = function.callee.fn.__code__
            if isinstance(key, SiteKey):
                if (key.file, key.function_line) == (code.co_filename, code.co_firstlineno):
                    function.struck.add(key.site)
            else:
                name = key.function.rpartition(".")[2]
                function.struck |= {n for n, site in function.sites.items() if site.function.endswith(name)}
        self.reasons.append(why)


def _functions(node: MemoNode, function: SurveyedFunction) -> Iterator[KnownFunction]:
    """Yields the functions in which calls are cached, but not the whole function."""
    yield node, function
    for key, inner in node.entered.items():
        yield from _functions(inner, function.inner[key])


def _unchecked(functions: Collection[KnownFunction]) -> list[tuple[SurveyedFunction, int]]:
    """Selected calls that no check has made. Calls by arguments count as made if any call of the function was."""
    checked = {function.sites[n].function for node, function in functions for n in node.asked & node.by_args}
    return [
        (function, n)
        for node, function in functions
        for n in node.kept - node.asked
        if n not in node.by_args or function.sites[n].function not in checked
    ]


def _reads_in_calls(functions: Collection[KnownFunction]) -> tuple[set[str], set[tuple[str, str]]]:
    """What the source reads before cached calls are made: names, and the global variables among them."""
    names, variables = set[str](), set[tuple[str, str]]()
    for node, function in functions:
        texts = [function.sites[n].function for n, _ in node.entered]
        texts += [function.sites[n].text for n in node.kept]
        found = set(re.findall(r"\w+", " ".join(texts)))
        names |= found
        variables |= globals_named(function.callee.fn, found)
    return names, variables


def _shown(function: SurveyedFunction, number: int, node: MemoNode) -> str:
    """Describes what is cached of a call, for reports."""
    text = function.sites[number].text
    for found in node.prefixes.get(number, {}).values():
        first = f"{found.kept} of {len(found.names)} transforms" if isinstance(found, SliceNode) else ""
        text += f": up to {cut_of(found) or first}"
    return text


class _Visitor:
    """The object that a surveyed function sees as ``_stoker``."""

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
