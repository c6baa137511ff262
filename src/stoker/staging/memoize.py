"""Calls that are pure in their arguments, answered from memory: ``self.load_image(j)``, ``cv2.imread(path)``.

This reaches what a cut cannot: samples that draw first and load afterwards (mosaic, mixup, pairs). A survey runs
samples in which each call reports its small arguments, its time, and whether it moved a generator. Kept are the
outermost calls that did not, and that give other objects with the same bits when they are repeated.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .compare import equal_bits
from .plan import Callee, Compiled, callee_of, key_of
from .recompile import rebound
from .rewrite_calls import memoised
from .store.decode import stored_copy
from .store.encode import CacheError, take
from .store.memory import Memory

SMALL = (int, float, str, bytes, bool, type(None), np.generic, pathlib.PurePath)
LONGEST = 1024  # characters of an argument, or items of a tuple of arguments
COMPARE_SHARE = 200  # of the time, one part is spent on making again what is served, to compare
FIRST_COMPARE_S = 1.0  # not in a worker's first second


def is_small(value: Any) -> bool:
    """Whether a value can be part of a key."""
    if isinstance(value, tuple):
        return len(value) <= LONGEST and all(map(is_small, value))
    return isinstance(value, SMALL) and not (isinstance(value, (str, bytes)) and len(value) > LONGEST)


@dataclass
class MemoNode(Compiled[types.FunctionType]):
    """A function some of whose calls are answered from memory.

    Attributes:
        kept: numbers of calls that are known by the local variables that they mention.
        by_args: numbers of calls that are known by their function and arguments.
        entered: nodes of functions that it calls and in which calls are kept, by number and ``key_of``.
        shown: what is kept, for reports: "train.py:31 self.load_image(j)".
    """

    kept: set[int] = field(default_factory=set)
    by_args: set[int] = field(default_factory=set)
    entered: dict[tuple[int, str], MemoNode] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)

    def run(self, memo: Memo, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function with calls of it answered from memory."""
        callee = callee_of(called)
        assert callee is not None

        def make() -> types.FunctionType:
            entered = {n for n, _ in self.entered}
            return memoised(callee.fn, callee.is_method, self.kept, self.by_args, entered)

        fn = self.compile(callee, make, lambda known: rebound(known, callee.fn, True))
        return fn(*callee.first, *args, _stoker=_Helper(self, memo, callee), **kwargs)

    def all_shown(self) -> list[str]:
        """What is kept, here and in the functions that are called."""
        return self.shown + [line for node in self.entered.values() for line in node.all_shown()]


class _Helper:
    """What rewritten code finds as ``_stoker``."""

    __slots__ = ("_callee", "_memo", "_node")

    def __init__(self, node: MemoNode, memo: Memo, callee: Callee) -> None:
        self._node, self._memo, self._callee = node, memo, callee

    def keep(self, number: int, call: Callable[[], Any], values: tuple[Any, ...]) -> Any:
        """A call that may be answered from memory."""
        if not is_small(values):
            return call()
        code = self._callee.fn.__code__
        bound = self._memo.names.get(id(self._callee.bound), "")
        if self._callee.is_method and not bound:
            return call()  # a method of an object that is made anew
        return self._memo.answer((code.co_filename, code.co_firstlineno, number, bound, values), call)

    def keep_call(self, number: int, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call that may be answered from memory, whatever code makes it."""
        key = call_key(called, args, kwargs, self._memo.names)
        if key is None:
            return called(*args, **kwargs)
        return self._memo.answer(key, lambda: called(*args, **kwargs))

    def enter(self, number: int, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call of a function in which calls are kept."""
        node = self._node.entered.get((number, key_of(called)))
        return called(*args, **kwargs) if node is None else node.run(self._memo, called, args, kwargs)


class Table:
    """Numbers of keys, shared by all workers: a hash table with open addressing in shared memory.

    A key is known by 128 bits of its hash. A slot is claimed under the lock and never given back.

    Args:
        slots: most keys, a power of two; a quarter stays free.
    """

    def __init__(self, slots: int, memory: Memory | None = None) -> None:
        self.slots = slots
        self.memory = memory or Memory(16 * slots + 4096)
        self._count = self.memory.table("count", np.int64, 1, 0)
        self._keys = self.memory.table("keys", np.int64, 2 * slots, 4096).reshape(slots, 2)

    def __reduce__(self) -> Any:
        return Table, (self.slots, self.memory)

    def find(self, key: Any, claim: bool) -> int:
        """The number of a key; -1 where it has none, and there is no room or none is wanted."""
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
    """Answers of calls, in a store that all workers share.

    Args:
        dataset: whose methods are called.
        store: by number of key; ``cache.tiers.TieredStore``.
        table: numbers of keys.
        save_random: saves the random states; what it returns has ``moved`` and ``restore``.
        tell: told why nothing is answered from memory any more.
    """

    def __init__(
        self, dataset: Any, store: Any, table: Table, save_random: Callable[[], Any], tell: Callable[[str], None]
    ) -> None:
        self.names = names_of(dataset)
        self._store, self._table, self._save_random, self._tell = store, table, save_random, tell
        self._next_compare = 0.0
        self._process = os.getpid()

    def answer(self, key: Any, call: Callable[[], Any]) -> Any:
        """What a call returns: a copy of what it returned before, or its result, which is kept."""
        store = self._store
        number = self._table.find(key, claim=False) if store.usable else -1
        if number >= 0:
            at = int(store.where(np.array([number]))[0])
            if at:
                if time.monotonic() > self._next_compare:
                    self._compare(key, call, at)
                return store.read(at)
        cpu = time.thread_time_ns()
        before = self._save_random()
        keep_ns = time.thread_time_ns() - cpu
        began = time.perf_counter_ns()
        out = call()
        spent = time.perf_counter_ns() - began
        cpu = time.thread_time_ns()
        if not store.usable or before.moved():
            return out  # it draws after all: it is never kept
        number = self._table.find(key, claim=True)
        if number >= 0:
            try:
                taken = take(out)
                store.admit({number: taken}, spent, keep_ns + time.thread_time_ns() - cpu)
            except CacheError as e:
                self._tell(str(e))
        return out

    def _compare(self, key: Any, call: Callable[[], Any], at: int) -> None:
        """Now and then: makes again what is served. What differs ends the cache."""
        began = time.monotonic()
        if not self._next_compare or self._process != os.getpid():
            self._process, self._next_compare = os.getpid(), began + FIRST_COMPARE_S
            return
        states = self._save_random()
        try:
            same = equal_bits(stored_copy(call()), stored_copy(self._store.read(at)))
        except Exception:
            same = True  # what fails now was right when it was kept
        states.restore()
        now = time.monotonic()
        self._next_compare = now + COMPARE_SHARE * (now - began)
        if not same:
            self._tell(f"a call that was kept returns something else now: {key!r}")


def call_key(called: Any, args: Any, kwargs: dict[str, Any], names: dict[int, str]) -> Any:
    """What a call is known by: its function, the object it is a method of, and its arguments. None where these are not
    small, or the object is not known."""
    if not is_small(args) or not is_small(tuple(kwargs.values())):
        return None
    owner = getattr(called, "__self__", None)
    if isinstance(called, types.MethodType):
        if id(owner) not in names:
            return None
        called, owner = called.__func__, names[id(owner)]
    elif isinstance(called, types.BuiltinFunctionType):
        if owner is not None and not isinstance(owner, types.ModuleType):
            return None
        owner = getattr(owner, "__name__", "")
    elif not isinstance(called, types.FunctionType):
        return None
    if getattr(called, "__closure__", None):
        return None  # it may mean another variable each time
    return called.__module__, called.__qualname__, owner, args, sorted(kwargs.items())


def names_of(dataset: Any) -> dict[int, str]:
    """The dataset and those inside it, by id: objects whose methods' answers may be kept."""
    out: dict[int, str] = {}
    waiting = [("dataset", dataset)]
    while waiting:
        path, x = waiting.pop()
        if id(x) in out or not (hasattr(type(x), "__getitem__") and hasattr(x, "__dict__")):
            continue
        out[id(x)] = path
        waiting += [(f"{path}.{k}", v) for k, v in vars(x).items()]
        for k, v in list(vars(x).items()):
            if isinstance(v, (list, tuple)) and len(v) <= 64:
                waiting += [(f"{path}.{k}[{n}]", item) for n, item in enumerate(v)]
    return out


def table_for(samples: int, sites: int, memory: Memory | None = None) -> Table:
    """A table for so many different calls."""
    return Table(1 << max(10, (2 * samples * max(1, sites)).bit_length()), memory)
