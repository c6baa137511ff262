"""Stand-ins for ``Memo`` with which a trial verifies a selection of calls (see ``pure_calls``)."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import types
from collections.abc import Callable, Collection, Iterator

from ..core.compare import equal_bits
from ..core.fingerprint import Fingerprint
from ..core.random_state import RandomState
from .aliases import share_memory
from .callee import Thunk, Value
from .executed_code import Executed
from .isolate import output_size
from .memoize import CallKey, Key, is_small, names_of
from .plan import Unplanned
from .recompile import HELPER
from .samples import TrialSamples
from .store.encode import CacheError
from .verify import Kept, changed_name, file_positions

SECOND_CALL_SEED = 90


class Replay:
    """Answers calls as a ``Memo`` does, with copies of what they returned first; what it keeps is its own."""

    def __init__(self, samples: TrialSamples) -> None:
        self.names = names_of(samples.dataset)
        self.states = samples.states
        self._kept: dict[str, Kept] = {}

    def answer(self, key: Key, call: Thunk, variables: Thunk | None = None) -> Value:
        kept = self._kept.get(repr(key))
        if kept is not None:
            return kept.read()
        before = self.states()
        out = call()
        if not before.moved():
            self._kept[repr(key)] = Kept(out)
        return out


class Checker:
    """Stands where ``Memo`` stands: makes each kept call twice, under other random states, and compares."""

    def __init__(self, samples: TrialSamples, changing: Collection[str], strike: Callable[[Key, str], None]) -> None:
        self.names = names_of(samples.dataset)
        self.states = samples.states
        self.struck = False  # a call must not be kept
        self.checked = 0  # calls so far
        self.nbytes = 0.0  # of what they returned
        self.names_read: set[str] = set()  # as ``Executed.names``, of all calls
        self.variables: set[tuple[str, str]] = set()  # as ``Executed.variables``
        self.looks_up_names = False  # as ``Executed.looks_up_names``
        self._samples = samples
        self._changing = changing  # attributes that the script changes in each epoch: the calls must not read them
        self._of_samples = samples.assigned | set(map(changed_name, samples.changes))  # nor these
        self._strike = strike  # is told of a call that must not be kept, and why

    def answer(self, key: Key, call: Thunk, variables: Thunk | None = None) -> Value:
        samples, code = self._samples, Executed(self._samples.dataset)
        states = samples.states()
        fingerprint = Fingerprint(samples.dataset)
        arguments = list(self._arguments(variables))
        written = file_positions(samples.dataset), output_size()
        try:
            first = code.run(call)
        except Unplanned:
            self.struck = True
            self._strike(key, "the first part of a call draws or fails")
            raise
        states_after = samples.states()
        samples.seed(SECOND_CALL_SEED + self.checked)
        second = call()
        states.restore()
        self.checked += 1
        self.names_read |= code.names | set(re.findall(r"\w+", key.owner))  # and those that lead to the object
        self.variables |= code.variables
        self.looks_up_names |= code.looks_up_names
        why = self._why_not(code, states, states_after, fingerprint, first, second)
        if not why and not all(equal_bits(value, copied) for value, copied in arguments):
            why = "it changes what it is called with"
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
            self._strike(key, f"the call {called} is not kept: {why}")
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
        changes = code.changes or next(iter(fingerprint.changed(self._samples.dataset)), "")
        if after.in_order() != before.in_order():
            return "it draws random numbers"
        if changes:
            return f"it changes {changes}"
        if code.asks:
            return f"it asks {code.asks}"
        for name in sorted(code.names & set(self._changing)):
            return f"it reads {name}, which the script changes in each epoch"
        for name in sorted(code.names & self._of_samples):
            return f"it reads {name}, which loading a sample may change"
        if share_memory(first, second):
            return "its results are one and the same object"
        return "" if equal_bits(first, second) else "it gives other bits on a repeat"

    def _arguments(self, variables: Thunk | None) -> Iterator[tuple[object, object]]:
        """The values of the local variables that a call reads, each with a copy, so far as they can be copied."""
        if not isinstance(variables, types.FunctionType):
            return
        for name, cell in zip(variables.__code__.co_freevars, variables.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # this branch did not set it
                continue
            if name != HELPER and not is_small(value) and id(value) not in self.names:
                with contextlib.suppress(Exception):
                    yield value, copy.deepcopy(value)
