"""Runs a few samples of a dataset, and verifies that a plan's two parts give what the whole gives."""

from __future__ import annotations

import copy
import datetime
import enum
import io
import itertools
import pathlib
import re
import time
import types
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from ..core.fingerprint import Fingerprint
from ..core.object_tree import walk
from ..sampling.generators import find_generators
from .compare import IDENTICAL, equal_bits
from .executed_code import Executed
from .isolate import output_size
from .plan import Plan, Unplanned, callee_of, globals_now
from .random_state import RandomStates, seed_all
from .store.decode import Layout, stored_copy
from .store.encode import CacheError, take

SAMPLES = 3  # whose parts are compared with the whole
ATTEMPTS = 12  # samples that are tried until so many could be loaded
READS = 3  # of what is kept, of which the fastest counts
NAMES = 16  # attributes of which it is tried whether they are written before they are read
REPEATS = 4  # of a second part that might write to what it is given
CHANGES = "what comes before the cut changes what outlives a sample"
GLOBAL = {"torch", "random", "numpy"}  # as ``RandomStates.moved`` calls the process' generators
SEED = 1000  # of the samples that are made as a whole
IMMUTABLE: tuple[type, ...] = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type,
    range,
    np.generic,
    np.dtype,
    torch.dtype,
)
IMMUTABLE += (torch.device, pathlib.PurePath, enum.Enum, types.ModuleType, datetime.date, datetime.timedelta)


class Whole(NamedTuple):
    """A sample as the dataset makes it.

    Attributes:
        value: the sample.
        states: of all generators afterwards.
    """

    value: Any
    states: Any


class Verifier:
    """Runs samples of a dataset.

    Args:
        dataset: map-style.

    Attributes:
        generators: all that can be reached from it, each with a path.
        loaded: indices of samples that were loaded.
        changes: attributes of the dataset that loading a sample changes, each time or for each sample once.
        draws: loading a sample moved a generator.
        sample_s: seconds that a sample takes.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.generators = find_generators(dataset)
        self.loaded: list[int] = []
        self.changes: list[str] = []
        self.draws = False
        self.sample_s = float("inf")
        self._seed = SEED
        self._variables: set[tuple[str, str]] = set()
        self._wholes: dict[int, Whole] = {}
        n = len(dataset)
        wanted: list[int] = [
            0,
            n - 1,
            n // 2,
            *(n * k // (ATTEMPTS + 1) for k in range(1, ATTEMPTS)),
            *range(min(n, ATTEMPTS)),
        ]
        self._fresh: list[int] = [i for i in dict.fromkeys(wanted) if 0 <= i < n]

    # -- running

    def seeded(self) -> RandomStates:
        """Other random states than ever before."""
        self._seed += 1
        return self.seeded_as(self._seed)

    def seeded_as(self, seed: int) -> RandomStates:
        """The random states of a seed."""
        seed_all(seed, self.generators)
        return RandomStates(self.generators)

    def samples(self) -> None:
        """Loads two samples. What the first changes, it opens; what the second one changes, each sample changes.

        Raises:
            CacheError: there are none that can be loaded.
        """
        self._next()
        self.generators = find_generators(self.dataset)  # some are made when they are first needed
        before = Fingerprint(self.dataset)
        try:
            self._next()
        except CacheError:
            self._whole(self.loaded[0])
        self.changes = before.changed(self.dataset)

    def more(self) -> list[int]:
        """Indices of some samples that can be loaded."""
        while len(self.loaded) < SAMPLES and self._fresh:
            try:
                self._next()
            except CacheError:
                break
        return self.loaded[:SAMPLES]

    def _next(self) -> int:
        """Loads a sample that was not loaded before."""
        error: Exception | None = None
        for _ in range(ATTEMPTS):
            if not self._fresh:
                break
            i: int = self._fresh.pop(0)
            try:
                began = time.perf_counter()
                self._wholes[i] = self._whole(i)
                self.sample_s = min(self.sample_s, time.perf_counter() - began)
                self.loaded.append(i)
                return i
            except Exception as e:
                error = e
        why = "it has no other samples" if error is None else f"{type(error).__name__}: {error}"
        raise CacheError(f"its samples cannot be loaded: {why}")

    def _whole(self, i: int) -> Whole:
        before = self.seeded_as(SEED - 1)
        value = self.dataset[i]
        self.draws |= bool(before.moved())
        states = RandomStates(self.generators).values()
        try:
            return Whole(copy.deepcopy(value), states)  # it may be memory that the next sample is written to
        except Exception:
            return Whole(value, states)

    def batches_differ(self) -> str:
        """Why samples must not be asked for one at a time; "" where they may be."""
        asked = self.dataset
        while type(asked) is Subset:
            asked = asked.dataset  # its __getitems__ asks that of the dataset inside, or for one at a time
        if not callable(getattr(asked, "__getitems__", None)):
            return ""
        indices = self.loaded
        self.seeded_as(5)
        together, after = list(self.dataset.__getitems__(indices)), RandomStates(self.generators).values()
        self.seeded_as(5)
        alone = [self.dataset[i] for i in indices]
        if equal_bits(together, alone) and RandomStates(self.generators).values() == after:
            return ""
        return "its __getitems__ makes other samples of a batch than __getitem__ does one at a time"

    def looked(self) -> tuple[Any, dict[str, Any]]:
        """What a look takes in: the dataset, and the global variables that its code names."""
        return self.dataset, globals_now(self._variables)

    # -- verifying

    def verify(self, plan: Plan) -> str:
        """Why a plan must not be used; "" if its parts give what the whole gives. Fills in the plan's figures.

        The last sample is one that was not loaded before: what the first part notes for each sample once is found so.
        """
        code = Executed(self.dataset)
        measured = []
        try:
            for i in self.loaded[:2]:
                measured.append(self._verify_sample(plan, i, code))
            plan.scratch = self._scratch(plan)
            while not self._verify_fresh(plan, code):
                pass
        except Unplanned:
            return "not all samples take the same way through the code"
        except CacheError as e:
            return str(e)
        except Exception as e:
            return f"in two parts a sample fails: {type(e).__name__}: {e}"
        if code.changes:
            return f"{CHANGES}: {code.changes}"
        if code.asks:
            return f"what comes before the cut asks {code.asks}, which answers something else each time"
        for path in self.changes:
            name = _attribute(path)
            if (name in code.names or not name) and not _lies_in(path, plan.scratch):
                return f"loading a sample changes what the part before the cut reads: {plainly(path)}"
        held = iterator_of(self.dataset, code)
        if held:
            return f"what comes before the cut may read an iterator: {held}"
        plan.globals = sorted(code.variables)
        unseen = callee_of(self.dataset.__getitem__) is None  # what native code reads, nobody knows
        plan.reads = None if code.looks_up_names or unseen else code.names
        # The shortest times: what else the machine does only adds to them.
        plan.head_s, plan.read_s, plan.tail_s = (min(x) for x in list(zip(*measured, strict=True))[:3])
        plan.nbytes = float(np.mean([row[3] for row in measured]))
        return ""

    def _verify_sample(
        self, plan: Plan, i: int, code: Executed, made: tuple[Any, ...] = ()
    ) -> tuple[float, float, float, float]:
        """Compares the parts of one sample with the whole. Seconds of head, reading and tail, and bytes.

        Args:
            plan: what is verified.
            i: the sample.
            code: sees the code of the first part.
            made: what the first part gave before, under other random states.

        Raises:
            CacheError: they differ, or the first part cannot be kept; the message says why.
        """
        whole = self._wholes.get(i) or self._whole(i)
        states = self.seeded()
        began = time.perf_counter()
        state = plan.head(self.dataset, i)
        head_s = time.perf_counter() - began
        moved = states.moved()
        refuse_aliases(state)
        words, leaves = take(state)
        leaves = [x.copy() for x in leaves]
        read_s = min(self._time_of_reading(words, leaves) for _ in range(READS))  # the first one maps new memory
        kept = Layout(words).put(leaves)
        self.seeded_as(SEED - 1)
        began = time.perf_counter()
        parts = plan.tail(self.dataset, kept)
        tail_s = time.perf_counter() - began
        after_parts = RandomStates(self.generators).values()
        self.seeded()
        again = made[0] if made else code.run(lambda: plan.head(self.dataset, i))
        words_again, leaves_again = take(again)
        if not equal_bits(Layout(words).put(leaves), Layout(words_again).put(leaves_again)):
            raise CacheError("what comes before the cut gives other bits on a repeat")
        if not plan.exact and shares_memory(state, again):
            self._verify_unwritten(plan, words, leaves)
        if not equal_bits(whole.value, parts):
            state = f", which may depend on {plainly(self.changes[0])}" if self.changes else ""
            raise CacheError(f"sample {i} in two parts is not what it is in one{state}")
        own = plan.slices and not GLOBAL & set(moved)
        if (moved and not own) or whole.states != after_parts:
            raise CacheError("what comes before the cut draws random numbers")
        plan.moves = sorted({*plan.moves, *moved})
        return head_s, read_s, tail_s, float(sum(x.nbytes for x in leaves))

    def _scratch(self, plan: Plan) -> set[str]:
        """Paths of attributes that loading a sample writes, and the first part does not read before: albumentations'
        and MONAI's transforms note on themselves what they did last. Tried by putting something there that cannot be
        used."""
        i = self.loaded[0]
        whole = Executed(self.dataset)
        self.seeded()
        whole.run(lambda: self.dataset[i])
        self.seeded()
        expected = stored_copy(plan.head(self.dataset, i))
        places = Fingerprint(self.looked()).places
        out: set[str] = set()
        stored = {
            name: [(x, x.__dict__[name]) for x in objects if id(x) in places and name in _own(x)]
            for name, objects in whole.stored.items()
        }
        for name, held in itertools.islice(((name, held) for name, held in stored.items() if held), NAMES):
            unusable = _Unusable()
            try:
                for x, _ in held:
                    x.__dict__[name] = unusable
                self.seeded()
                if equal_bits(stored_copy(plan.head(self.dataset, i)), expected):
                    out.update(f"{places[id(x)]}.{name}" for x, _ in held)
            except (Exception, Unplanned):
                pass  # it was read
            finally:
                for x, value in held:
                    x.__dict__[name] = value
        return out

    @staticmethod
    def _time_of_reading(words: str, leaves: list[Any]) -> float:
        began = time.perf_counter()
        Layout(words).put(leaves)
        return time.perf_counter() - began

    def _verify_unwritten(self, plan: Plan, words: str, leaves: list[Any]) -> None:
        """What the first part gives is memory of the dataset's own: the second part must not write to it."""
        for _ in range(REPEATS):
            kept = Layout(words).put(leaves)
            self.seeded()
            plan.tail(self.dataset, kept)
            if not equal_bits(kept, Layout(words).put(leaves)):
                raise CacheError("what comes after the cut writes to memory of the dataset's own")

    def _verify_fresh(self, plan: Plan, code: Executed) -> bool:
        """The first part of a sample that was never loaded must change nothing that can be seen. False where that
        sample cannot be loaded at all: then another one is to be tried."""
        known = self.loaded[-1]
        fresh = self._fresh.pop(0) if self._fresh else known
        try:
            self._verify_unseen(plan, fresh, code)
        except Exception as e:
            if isinstance(e, CacheError) or fresh == known:
                raise
            try:
                self._whole(fresh)
            except Exception:
                return False
            raise
        if fresh != known:
            self.loaded.append(fresh)
        return True

    def _verify_unseen(self, plan: Plan, fresh: int, code: Executed) -> None:
        self._variables |= code.variables
        looked = self.looked()
        before, written, printed = (
            Fingerprint(looked, skip=plan.scratch),
            positions(looked),
            output_size(),
        )  # a position wants a flush
        self.seeded()
        made = code.run(lambda: plan.head(self.dataset, fresh))
        words, leaves = take(made)
        made = Layout(words).put([x.copy() for x in leaves])  # before anything else writes to it
        changes = before.changed(self.looked())
        if changes:
            raise CacheError(f"{CHANGES}: {plainly(changes[0])}")
        if output_size() != printed:
            raise CacheError("what comes before the cut prints or logs something")
        if positions(looked) != written:
            raise CacheError("what comes before the cut writes to a file")
        before = Fingerprint(self.looked())
        self._verify_sample(plan, fresh, code, (made,))
        self.changes += before.changed(self.looked())


def _lies_in(change: str, places: set[str]) -> bool:
    """Whether a change of the dataset that a look found lies at, or below, one of some paths."""
    found = change.removeprefix("dataset[0]").removeprefix("dataset")
    return any(re.match(re.escape(place.removeprefix("dataset[0]")) + r"[ .\[]", found + " ") for place in places)


class _Unusable:
    """Stands where a value was that nobody is expected to read."""

    def _used(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an attribute is read before it is written")

    __getattr__ = __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __int__ = __float__ = __index__ = _used
    __hash__ = __lt__ = __gt__ = __le__ = __ge__ = __ne__ = __mod__ = __setitem__ = __repr__ = _used


def _own(x: Any) -> dict[str, Any]:
    return getattr(x, "__dict__", None) or {}


def plainly(change: str) -> str:
    """A change that a look found, without the looked-at tuple's own index."""
    return change.removeprefix("dataset[0]").removeprefix("dataset[1]").removeprefix(".")


def _attribute(path: str) -> str:
    """The name of the attribute or variable that changed: "count" of "dataset.inner.count['a'] was 0 and is 1"."""
    variable = re.match(r"dataset\[1\]\['[^']*?(\w+)'\]", path)
    path = re.sub(r"\[(?:'[^']*'|\"[^\"]*\")\]", "[]", path)
    found = re.match(r".*?(?= was | is |$)", path)
    names = re.findall(r"\.([^\W\d]\w*)", found[0] if found else "")
    return names[-1] if names else variable[1] if variable else ""


def of_dataset(path: str) -> str:
    """The attribute of the dataset itself that a change concerns: "count" of "dataset.count was 0 and is 1"."""
    found = re.match(r"dataset(?:\[0\])?\.(\w+)(?:\[[^.]*\])*(?: |$)", path)
    return found[1] if found else ""


def positions(roots: Any) -> list[int]:
    """Where each file stands that is open to be written to."""
    out = []
    for _, x in walk(roots):
        if isinstance(x, io.IOBase) and not x.closed and x.writable() and x.seekable():
            out.append(x.tell())
    return out


def iterator_of(dataset: Any, code: Executed) -> str:
    """The path of an iterator that code may read, which gives something else each time; "" where there is none."""
    looked = dataset, globals_now(code.variables)
    for path, x in walk(looked, None if code.looks_up_names else code.names):
        if hasattr(type(x), "__next__") and type(x).__module__ in ("builtins", "itertools"):
            return plainly(path)
    return ""


def shares_memory(a: Any, b: Any) -> bool:
    """Whether two states of the same sample lie in the same memory: it is not theirs, then."""
    if isinstance(a, (torch.Tensor, np.ndarray)) and type(a) is type(b):
        one, two = _range_of(a), _range_of(b)
        return bool(one and two) and one[0][0] < two[0][1] and two[0][0] < one[0][1]
    if isinstance(a, dict) and isinstance(b, dict):
        return a is b or any(shares_memory(a[k], b.get(k)) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return (a is b and isinstance(a, list)) or any(map(shares_memory, a, b))
    return a is b and not isinstance(a, (*IMMUTABLE, *IDENTICAL))


def refuse_aliases(state: Any) -> None:
    """Variables that are one and the same object, or share memory, must stay so: what is kept would be copies.

    Raises:
        CacheError: two of them do.
    """
    seen: dict[int, Any] = {}
    ranges: list[tuple[int, int]] = []
    waiting = [state]
    while waiting:
        x = waiting.pop()
        if isinstance(x, IMMUTABLE) or callable(x):
            continue
        if id(x) in seen and not isinstance(x, (tuple, frozenset)):
            raise CacheError("two variables before the cut are one object")
        seen[id(x)] = x
        if isinstance(x, (tuple, list, set, frozenset)):
            waiting += x
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, (torch.Tensor, np.ndarray)):
            ranges += _range_of(x)
        else:
            waiting += getattr(x, "__dict__", {}).values()
    ranges.sort()
    for (_, end), (start, _) in itertools.pairwise(ranges):
        if start < end:
            raise CacheError("two variables before the cut share memory")


def _range_of(x: Any) -> list[tuple[int, int]]:
    """Where an array or tensor begins and ends in memory."""
    if isinstance(x, np.ndarray):
        first = int(x.__array_interface__["data"][0])
        steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        return [(first + low, first + high + x.itemsize)] if x.size else []
    if x.layout is not torch.strided or not x.numel():
        return []
    first = x.data_ptr()
    last = first + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) * x.element_size()
    return [(first, last + x.element_size())]
