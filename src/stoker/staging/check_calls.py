"""What a survey of calls learns about a function, and substitutes for ``Memo`` to verify calls (see ``pure_calls``)."""

from __future__ import annotations

import copy
import os
import re
import types
from collections.abc import Callable, Collection, Iterator

import numpy as np

from ..core.compare import equal_bits
from ..core.fingerprint import Fingerprint
from ..core.packages import libraries
from ..core.random_state import RandomState
from .aliases import refuse_aliases, share_memory
from .callee import Call, Callee, Thunk, Value, callee_of
from .containers import items_of
from .executed_code import PRINTS, Executed, is_closed
from .isolate import output_size
from .memoize import LONGEST, CallKey, MemoKey, SiteKey, is_small, names_of
from .plan import PlanNode, Unplanned
from .rewrite_calls import rewritten, sites_of
from .samples import TrialSamples
from .source import rebound
from .store.encode import CacheError
from .syntax import ANY_NAME
from .verify import Kept, changed_name, file_positions

SECOND_CALL_SEED = 90
FEW_VALUES = 4  # drawn arguments with at most this many values: the results for all of them are cached


class SurveyedFunction:
    """What is known about the calls of one function."""

    def __init__(self, callee: Callee) -> None:
        self.callee = callee  # the function
        self.sites = sites_of(callee.fn, callee.is_method)  # its calls, by number
        self.seconds: dict[int, list[float]] = {}  # durations of calls, by number, without their arguments
        self.seconds_with_args: dict[int, list[float]] = {}  # the same, including evaluation of its arguments
        self.not_by_args: set[int] = set()  # numbers of calls that draw, or whose arguments are not all small values
        self.drew: set[int] = set()  # numbers of calls that draw, themselves or in evaluating their arguments
        self.draws_itself: set[int] = set()  # numbers of calls that themselves draw
        self.large: dict[int, set[str]] = {}  # by call number, its local variables that are not small values
        self.calls: dict[int, Call] = {}  # by number, the first such call with arguments that are not small values
        self.prefixes: dict[int, PlanNode | None] = {}  # how to make calls in two parts, by number; None: impossible
        self.cheap: set[int] = set()  # numbers of frequent calls that take no time
        self.struck: set[int] = set()  # numbers of calls that must not be cached
        self.inner: dict[tuple[int, str], SurveyedFunction] = {}  # that it calls, by number and ``key_of``
        self._copy: types.FunctionType | None = None

    def copied(self) -> types.FunctionType:
        """Returns a copy that reports its calls. Made once, because a sample may call it often. See ``rewritten``."""
        fn, known = self.callee.fn, self._copy
        self._copy = rewritten(fn, self.callee.is_method) if known is None else rebound(known.__code__, fn, True)
        return self._copy

    def note_large(self, number: int, mentioned: tuple[object, ...] | None) -> None:
        """Records which local variables in a call are not small values."""
        names = self.sites[number].mentioned
        if names and mentioned is not None:
            large = {name for name, value in zip(names, mentioned, strict=True) if not is_small(value)}
            self.large.setdefault(number, set()).update(large)

    def has_small_variables(self, number: int) -> bool:
        """Whether the local variables in a call are all known and small."""
        return self.sites[number].mentioned is not None and not self.large.get(number)

    def arguments_draw(self, number: int) -> bool:
        """Whether evaluating a call's arguments draws random numbers."""
        return any(number in site.around and n in self.drew for n, site in self.sites.items())

    def all(self) -> Iterator[SurveyedFunction]:
        yield self
        for function in self.inner.values():
            yield from function.all()


def may_be_cut(call: Call) -> bool:
    """Whether a call may have a first part: it runs a container of transforms, or a user's Python function."""
    callee = callee_of(call.function)
    return items_of(call.function) is not None or (callee is not None and not is_closed(callee.fn, libraries()))


class SeenKeys:
    """Collects keys of calls that the same samples make under several random states.

    A call with a drawn index recurs (``self.load_image(j)``). One with a drawn angle does not, nor one that combines a
    sample with a drawn place in it."""

    def __init__(self) -> None:
        self._sample = self._run = 0
        self._keys: dict[tuple[object, ...], list[tuple[int, int, MemoKey, list[object]]]] = {}

    def begin(self, sample: int, run: int) -> None:
        """Call before making a sample. ``run``: number of the random state."""
        self._sample, self._run = sample, run

    def add(self, key: MemoKey) -> None:
        """Records a call of the current sample."""
        values = list(_flat(key.values if isinstance(key, SiteKey) else (key.owner, key.args, *key.kwargs)))
        self._keys.setdefault((*key[:3], len(values)), []).append((self._sample, self._run, key, values))

    def drawn_anew(self) -> Iterator[MemoKey]:
        """Yields one key of each call that does not recur."""
        for found in self._keys.values():
            columns = list(zip(*(values for *_, values in found), strict=True))
            drawn = [self._is_drawn(found, n) for n in range(len(columns))]
            of_sample = any(not d and len(set(column)) > 1 for d, column in zip(drawn, columns, strict=True))
            for d, column in zip(drawn, columns, strict=True):
                many = len(set(column)) > FEW_VALUES
                is_continuous = many and any(map(_is_one_of_many, column))
                if d and (is_continuous or (many and of_sample)):
                    yield found[0][2]
                    break

    @staticmethod
    def _is_drawn(found: list[tuple[int, int, MemoKey, list[object]]], column: int) -> bool:
        """Whether a value depends on the random state."""
        seen: dict[int, dict[int, set[object]]] = {}
        for sample, run, _, values in found:
            seen.setdefault(sample, {}).setdefault(run, set()).add(values[column])
        return any(len({frozenset(x) for x in runs.values()}) > 1 for runs in seen.values())


def _is_one_of_many(value: object) -> bool:
    """Whether a drawn value will not recur: a number with a fraction, or a long text."""
    if isinstance(value, (str, bytes)):
        return len(value) > LONGEST
    return isinstance(value, (float, np.floating)) and bool(value % 1)


def _flat(values: object) -> Iterator[object]:
    if isinstance(values, tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values


class Replay:
    """Answers calls as ``Memo`` does, with copies of their first results, from its own storage."""

    def __init__(self, samples: TrialSamples, seen: SeenKeys) -> None:
        self.names = names_of(samples.dataset)
        self.states = samples.states
        self.seen = seen
        self._kept: dict[str, Kept] = {}

    def answer(self, key: MemoKey, call: Thunk) -> Value:
        self.seen.add(key)
        kept = self._kept.get(repr(key))
        if kept is not None:
            return kept.read()
        before = self.states()
        out = call()
        if not before.moved():
            self._kept[repr(key)] = Kept(out)
        return out


class Checker:
    """Substitute for ``Memo`` that makes each cached call twice, under different random states, and compares."""

    def __init__(
        self,
        samples: TrialSamples,
        changing: Collection[str],
        strike: Callable[[MemoKey, str], None],
        seen: SeenKeys,
        around: Collection[types.FunctionType] = (),
    ) -> None:
        self.names = names_of(samples.dataset)
        self.states = samples.states
        self.struck = False  # whether a call must not be cached
        self.checked = 0  # calls so far
        self.nbytes = 0.0  # of their results
        self.pickled = ""  # a class whose objects are pickled in them; "" if none
        self.names_read: set[str] = set()  # like ``Executed.names``, over all calls
        self.variables: set[tuple[str, str]] = set()  # like ``Executed.variables``
        self.looks_up_names = False  # like ``Executed.looks_up_names``
        self._samples = samples
        self._changing = changing  # attributes that the script changes in each epoch: the calls must not read them
        self._of_samples = samples.assigned | samples.stored | set(map(changed_name, samples.changes))  # nor these
        self._seen = seen
        self._around = around  # functions in which calls are cached, but not the whole function
        self._strike = strike  # called with each call that must not be cached, and the reason

    def answer(self, key: MemoKey, call: Thunk) -> Value:
        self._seen.add(key)
        samples, code = self._samples, Executed(self._samples.dataset)
        states = samples.states()
        fingerprint = Fingerprint(samples.dataset)
        written = file_positions(samples.dataset), output_size()
        samples.forget_results()
        try:
            first = code.run(call)
        except Unplanned:
            self.struck = True
            self._strike(key, "the first part of a call draws random numbers or fails")
            raise
        states_after = samples.states()
        samples.seed(SECOND_CALL_SEED + self.checked)
        second = call()
        states.restore()
        self.checked += 1
        self.variables |= code.variables
        self.looks_up_names |= code.looks_up_names
        named = code.names | set(re.findall(r"\w+", key.owner))  # and those on the path to the object
        self.names_read |= named
        why = self._why_not(code, named, states, states_after, fingerprint, first, second)
        if not why and (file_positions(samples.dataset), output_size()) != written:
            why = "it prints, logs or writes to a file"
        if not why:
            try:
                refuse_aliases(first, None)
                kept = Kept(first)
                self.nbytes, self.pickled = self.nbytes + kept.nbytes, self.pickled or kept.pickled
            except CacheError as e:
                why = str(e)
        if why:
            self.struck = True
            called = key.function if isinstance(key, CallKey) else f"{os.path.basename(key.file)}:{key.function_line}"
            self._strike(key, f"the call {called} is not cached: {why}")
            return second
        return copy.deepcopy(second)

    def _why_not(
        self,
        code: Executed,
        named: set[str],
        before: RandomState,
        after: RandomState,
        fingerprint: Fingerprint,
        first: object,
        second: object,
    ) -> str:
        changes = code.changes or next(iter(fingerprint.changed(self._samples.dataset)), "")
        if after.in_order() != before.in_order():
            return "it draws random numbers"
        if changes:
            return f"it changes {changes}"
        if code.asks:
            return "it prints, logs or writes to a file" if code.asks in PRINTS else f"it asks {code.asks}"
        made_from = self._samples.made_from(named, without=self._around).names if self._changing else set()
        for name in sorted((named | made_from) & set(self._changing)):
            return f"it reads {name}, which the script changes in each epoch"
        if ANY_NAME in self._of_samples:
            return "loading a sample sets attributes with computed names"
        for name in sorted(named & self._of_samples):
            return f"it reads {name}, which loading a sample may change"
        if share_memory(first, second):
            return "it returns the same object each time"
        return "" if equal_bits(first, second) else "it returns a different result when repeated"
