"""Caches the results of calls that are pure in their arguments: ``self.load_image(j)``, ``cv2.imread(path)``.

This covers what a cut cannot: samples that draw first and load afterwards (mosaic, mixup, pairs). A survey runs samples
in which each call reports its small arguments, its time, and whether it advanced a generator. Cached are the outermost
calls that did not, and that return different objects with the same bits when repeated. A call with other arguments is
identified by the local variables that it mentions. For a call that draws, the part before the first draw is cached, as
a ``plan``.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import pathlib
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ..core.object_tree import parts
from ..core.random_state import RandomState, owns_global_generators
from ..core.types import Attributes, MapDataset
from .aliases import PLAIN, refuse_aliases
from .callee import AnyCallable, Arguments, Call, Callee, Compiled, Thunk, Value, Values, call_of, callee_of, key_of
from .change_watch import STALE, CheckSchedule
from .plan import PlanNode, PreparedState, Unplanned, nodes_in
from .rewrite_calls import ENTER, KEEP, KEEP_CALL, KEEP_PREFIX, rewritten
from .source import rebound
from .store.encode import CacheError, take_known
from .store.memory import MemoryTables
from .store.store import Gone, Store
from .users_code import is_library_class, token_of_code

NAMEDTUPLE = collections.__file__
SMALL = (np.generic, pathlib.PurePath)
FAILURES = 16  # of the first part of a call, in a row; then the call is made as a whole
MOST_NOT_KEPT = 100  # results of a call in a row that cannot be cached; then the call is only made
LONGEST = 1024  # items of a tuple of arguments; characters of a text that may be drawn
LONGEST_TEXT = 1 << 16  # characters of an argument, whose digest takes 0.2 ms


class SiteKey(NamedTuple):
    """Identifies a call's result by its place in the source and the local variables that it mentions."""

    file: str
    function_line: int  # of the enclosing function
    site: int
    owner: str  # the object to which that method is bound, by ``names_of``
    values: tuple[object, ...]


class CallKey(NamedTuple):
    """Identifies a call's result by function and arguments, wherever the call is made."""

    module: str
    function: str
    line: int  # where it is defined: several functions may share a name
    owner: str  # the object to which the method is bound, by ``names_of``; or a native function's module
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    defaults: tuple[object, ...] = ()  # of a function that is no attribute of its module, such as a lambda in a list


MemoKey = SiteKey | CallKey


class Answers(Protocol):
    """Answers cached calls: a ``Memo``, or a substitute that checks a selection of calls in a trial."""

    names: dict[int, str]

    def answer(self, key: MemoKey, call: Thunk) -> Value:
        """Returns the result of the call."""

    def states(self) -> RandomState:
        """Returns the states of the random generators."""


def is_small(value: object) -> bool:
    """Whether a value can be part of a key."""
    if type(value) is tuple or _is_namedtuple(value):
        return len(value) <= LONGEST and all(map(is_small, value))  # type: ignore[arg-type, call-overload]
    if type(value) not in PLAIN and not (isinstance(value, SMALL) and is_library_class(type(value))):
        return False
    if isinstance(value, np.void):
        return False  # its repr leaves out what is long
    return not (isinstance(value, (str, bytes)) and len(value) > LONGEST_TEXT)


def _is_namedtuple(value: object) -> bool:
    """Whether a value is a named tuple with the repr of one: keys are compared by their repr."""
    code = getattr(type(value).__repr__, "__code__", None)
    return isinstance(value, tuple) and hasattr(value, "_fields") and getattr(code, "co_filename", "") == NAMEDTUPLE


def values_of(values: Values) -> tuple[object, ...] | None:
    """Values of local variables; None if this branch left one of them unset."""
    try:
        return values()
    except NameError:
        return None


@dataclass
class MemoNode(Compiled[types.FunctionType]):
    """A function with calls that are answered from memory."""

    by_values: set[int] = field(default_factory=set)  # calls identified by the local variables that they mention
    by_args: set[int] = field(default_factory=set)  # calls identified by function and arguments
    # by call number and ``key_of`` the callee: how to make the call in two parts, of which the first is cached and
    # identified by the local variables that it mentions
    prefixes: dict[int, dict[str, PlanNode]] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)  # of first parts, in a row, by number in ``prefixes``
    # nodes of functions that it calls and that contain cached calls, by number and ``key_of``
    entered: dict[tuple[int, str], MemoNode] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # numbers of calls answered so far, in this process
    shown: list[str] = field(default_factory=list)  # what is cached, for reports: "train.py:31 self.load_image(j)"

    def __getstate__(self) -> Attributes:
        return {**super().__getstate__(), "asked": set(), "failures": Counter()}  # both are per process

    def run(self, answers: Answers, call: Call) -> Value:
        """Calls a function, answering some of its calls from memory."""
        callee = callee_of(call.function)
        assert callee is not None

        def make() -> types.FunctionType:
            methods = dict.fromkeys((number for number, _ in self.entered), ENTER)
            methods |= dict.fromkeys(self.by_args, KEEP_CALL) | dict.fromkeys(self.by_values, KEEP)
            methods |= dict.fromkeys(self.prefixes, KEEP_PREFIX)
            return rewritten(callee.fn, callee.is_method, methods)

        fn = self.compile(callee, make, lambda known: rebound(known.__code__, callee.fn, True))
        return fn(*callee.first, *call.args, _stoker=_MemoHelper(self, answers, callee), **call.kwargs)

    @property
    def kept(self) -> set[int]:
        """Numbers of the calls that are cached, at least in part."""
        return self.by_values | self.by_args | set(self.prefixes)

    def nodes(self) -> Iterator[MemoNode | PlanNode]:
        """Yields this node and all nodes inside it."""
        yield self
        for found in self.prefixes.values():
            yield from itertools.chain.from_iterable(map(nodes_in, found.values()))
        for inner in self.entered.values():
            yield from inner.nodes()

    def all_shown(self) -> list[str]:
        """What is cached, here and in the called functions."""
        inside = [line for node in self.entered.values() for line in node.all_shown()]
        return list(dict.fromkeys(self.shown + inside))  # a function may be called in several places


class _MemoHelper:
    """The object that rewritten code sees as ``_stoker``."""

    __slots__ = ("_answers", "_callee", "_node")

    def __init__(self, node: MemoNode, answers: Answers, callee: Callee) -> None:
        self._node = node
        self._answers = answers
        self._callee = callee

    def keep(self, number: int, call: Thunk, values: Values) -> Value:
        """Answers a call identified by the local variables that it mentions."""
        return self._answer(number, self._key(number, values), call)

    def _answer(self, number: int, key: MemoKey | None, call: Thunk) -> Value:
        if key is None:
            return call()
        self._node.asked.add(number)
        return self._answers.answer(key, call)

    def _key(self, number: int, values: Values) -> SiteKey | None:
        mentioned = values_of(values)
        owner = self._answers.names.get(id(self._callee.bound), "")
        if mentioned is None or not is_small(mentioned) or (self._callee.is_method and not owner):
            return None  # includes methods of objects that are recreated for each sample
        code = self._callee.fn.__code__
        return SiteKey(code.co_filename, code.co_firstlineno, number, owner, mentioned)

    def keep_prefix(
        self, number: int, called: AnyCallable, arguments: Callable[[], Arguments], values: Values
    ) -> Value:
        """Answers a call whose first part may be cached."""
        key, node = self._key(number, values), self._node.prefixes[number].get(key_of(called))
        may_be_cut = self._node.failures[number] < FAILURES and owns_global_generators()
        if key is not None and node is not None and may_be_cut:
            with contextlib.suppress(Unplanned):
                self._node.asked.add(number)
                head = lambda: self._head(number, node, Call(called, *arguments()))  # noqa: E731
                state = self._answers.answer(key, head)
                return node.tail(called, (), state)
        return Call(called, *arguments()).run()

    def _head(self, number: int, node: PlanNode, call: Call) -> PreparedState:
        """Runs the first part of a call. If it fails, draws or takes another branch, restores the random states and
        raises Unplanned: the whole call must then be made."""
        before = self._answers.states()
        with contextlib.suppress(Exception, Unplanned):
            state = node.head(call.with_copied_arguments(self._callee.bound))  # on failure, it may have modified them
            if not before.moved():
                self._node.failures[number] = 0
                return state
        before.restore()
        self._node.failures[number] += 1
        raise Unplanned

    @staticmethod
    def arguments(*args: object, **kwargs: object) -> Arguments:
        return args, kwargs

    def keep_call(self, number: int, called: AnyCallable, /, *args: object, **kwargs: object) -> Value:
        """Answers a call identified by its arguments."""
        call = call_of(called, args, kwargs)
        return self._answer(number, call_key(call, self._answers.names), call.run)

    def enter(self, number: int, called: AnyCallable, /, *args: object, **kwargs: object) -> Value:
        """Calls a function that contains cached calls."""
        call = call_of(called, args, kwargs)
        node = self._node.entered.get((number, key_of(call.function)))
        return call.run() if node is None else node.run(self._answers, call)


class Table:
    """Maps keys to numbers, shared by all workers: a hash table with open addressing in shared memory. Stores 128 bits
    of each key's hash. A slot is claimed under the lock and never released."""

    def __init__(self, slots: int, memory: MemoryTables | None = None) -> None:
        self.slots = slots  # a power of two; at most three quarters are used
        self.memory = memory or MemoryTables(16 * slots + 4096)
        self._count = self.memory.table("count", np.int64, 1, 0)
        self._keys = self.memory.table("keys", np.int64, 2 * slots, 4096).reshape(slots, 2)

    def __reduce__(self) -> tuple[type[Table], tuple[int, MemoryTables]]:
        return Table, (self.slots, self.memory)

    def find(self, key: MemoKey, claim: bool) -> int:
        """Returns the number of a key; -1 if it has none and ``claim`` is False or the table is full."""
        digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        high, low = (int.from_bytes(digest[k : k + 8], "little", signed=True) for k in (0, 8))
        high = high or 1
        slot, free = self._look(high, low)
        if not free or not claim:
            return -1 if free else slot
        with self.memory.lock():
            slot, free = self._look(high, low)
            if free:
                if self._count[0] >= self.slots - self.slots // 4:
                    return -1
                self._count[0] += 1
                self._keys[slot, 1] = low
                self._keys[slot, 0] = high  # last: a reader that sees it sees both
        return slot

    def _look(self, high: int, low: int) -> tuple[int, bool]:
        slot = low & (self.slots - 1)
        while True:
            found = int(self._keys[slot, 0])
            if not found:
                return slot, True
            if found == high and int(self._keys[slot, 1]) == low:
                return slot, False
            slot = (slot + 1) & (self.slots - 1)


class Memo:
    """Answers calls from a store that all workers share."""

    def __init__(
        self,
        dataset: MapDataset,
        store: Store,
        table: Table,
        save_random: Callable[[], RandomState],
        on_problem: Callable[..., None],
        vetted: Callable[[Thunk], tuple[Value, bool]],
        kinds: Set[str],
    ) -> None:
        self._kinds = kinds  # of values in results that may be stored: see ``take_known``
        self._vetted = vetted  # makes a call, and says whether its result may be cached
        self.names = names_of(dataset)
        self._store = store  # by number of key
        self._table = table  # maps keys to numbers
        self.states = save_random  # saves the random states
        self._on_problem = on_problem  # called with the reason why nothing may be answered from memory any more
        self._comparison = CheckSchedule()
        self._not_kept = Counter[tuple[object, ...]]()  # results in a row that were not cached, by place of the call

    def answer(self, key: MemoKey, call: Thunk) -> Value:
        """Returns the result of a call: a copy of a cached one, or a new one, which is then cached."""
        store, place = self._store, key[:3]
        if self._not_kept[place] >= MOST_NOT_KEPT:
            return call()
        number = self._table.find(key, claim=False) if store.usable else -1
        at = store.location(number) if number >= 0 else 0
        if at:
            if self._comparison.is_due() and self._differs(key, call, at):
                return call()
            with contextlib.suppress(Gone):
                return store.read(at)
        self._not_kept[place] += 1
        cpu = time.thread_time_ns()
        before = self.states()
        keep_ns = time.thread_time_ns() - cpu
        out, may_be_kept = self._vetted(call)
        cpu = time.thread_time_ns()
        if not store.usable or not may_be_kept or before.moved():
            return out  # it draws random numbers after all, so it is never cached
        try:
            refuse_aliases(out, None)
        except Exception:  # CacheError, or whatever the user's objects raise
            return out
        try:
            taken = take_known(out, self._kinds, pickles=store.medium.pickles)
        except CacheError as e:
            self._on_problem(str(e))
            return out
        number = -1 if taken is None else self._table.find(key, claim=True)
        if number >= 0 and taken is not None:
            store.admit({number: taken}, keep_ns + time.thread_time_ns() - cpu)
            del self._not_kept[place]
        return out

    def _differs(self, key: MemoKey, call: Thunk, at: int) -> bool:
        """Makes a call and compares its result with the cached one. A difference disables the cache."""
        differs = self._comparison.differs(self.states, call, lambda: self._store.read(at))
        if differs:
            self._on_problem(f"the result of a call {STALE}: {key!r}", stale=True)
        self._store.count_compared(self._comparison.take_same())
        return differs


def call_key(call: Call, names: dict[int, str]) -> CallKey | None:
    """Identifies a call by its arguments; None if they are not small, or the object is unknown."""
    called, args, kwargs = call
    if not is_small(args) or not is_small(tuple(kwargs.values())):
        return None
    name = ""
    if isinstance(called, types.MethodType):
        name = names.get(id(called.__self__), "")
        if not name:
            return None
    elif isinstance(called, types.BuiltinFunctionType):
        owner = called.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            return None
        name = getattr(owner, "__name__", "")
    elif not isinstance(called, types.FunctionType):
        return None
    if getattr(called, "__closure__", None):
        return None  # it may refer to a different variable each time
    code = getattr(called, "__code__", None)
    line = 0 if code is None else code.co_firstlineno
    more: tuple[object, ...] = ()
    if isinstance(called, types.FunctionType):
        more = (*(called.__defaults__ or ()), *sorted((called.__kwdefaults__ or {}).items()))
        if not is_small(more):
            if getattr(sys.modules.get(called.__module__), called.__qualname__, None) is not called:
                return None  # it may be one of several that a loop defines
            more = ()
        if "<" in called.__qualname__:  # a line may hold several lambdas
            more = (*more, token_of_code(called.__code__))
    return CallKey(called.__module__, called.__qualname__, line, name, args, tuple(sorted(kwargs.items())), more)


def names_of(dataset: MapDataset) -> dict[int, str]:
    """By id: the dataset, and objects of user classes in it. Results of their methods may be cached."""
    out: dict[int, str] = {}
    waiting: list[tuple[str, object]] = [("dataset", dataset)]
    while waiting:
        path, x = waiting.pop()
        if isinstance(x, types.MethodType):
            path, x = f"{path}.__self__", x.__self__
        if id(x) in out or not hasattr(x, "__dict__") or isinstance(x, (type, types.FunctionType, types.ModuleType)):
            continue
        if is_library_class(type(x)) and not hasattr(type(x), "__getitem__"):
            continue
        out[id(x)] = path
        for name, value in vars(x).items():
            waiting.append((f"{path}.{name}", value))
            waiting += [(f"{path}.{name}{step}", item) for step, item in parts(value)]
    return out


def table_for(samples: int, sites: int, memory: MemoryTables | None = None) -> Table:
    """Makes a table with room for every distinct call of ``samples`` samples at ``sites`` call sites."""
    return Table(1 << max(10, (2 * samples * max(1, sites)).bit_length()), memory)
