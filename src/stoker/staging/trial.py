"""Finds a plan for a dataset by running a few of its samples. Meant for ``isolate``: nothing is put back.

A function is run once as a probed copy: it is cut at the first statement, and in it at the first call, that moves a
random generator. If that call runs a Python function or a container of transforms, the search goes on inside it. The
plan is then verified: for several samples the two parts must give the bits, and leave the random states, of the whole,
with the first part run under other random states. A plan that fails is weakened, one statement at a time.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.fingerprint import Fingerprint
from ..core.packages import PACKAGE, in_stdlib, libraries
from .compare import equal_bits
from .executed_code import Executed
from .plan import (
    PART,
    CutNode,
    Node,
    Plan,
    SliceNode,
    Unplanned,
    WholeNode,
    callee_of,
    container_items,
    key_of,
    only,
    with_items,
)
from .pure_calls import MemoPlan, Survey
from .random_state import RandomStates
from .rewrite_cut import Cut, before_state_changes, earlier, line_of
from .rewrite_probe import probed
from .source import NoSource, tree_of
from .stages import Row, cut_of, place_of, rows_of
from .store.encode import CacheError, foreign, take
from .syntax import Position
from .unroll import has_unrollable, tree_for
from .verify import CHANGES, Verifier, of_dataset

DEPTH = 8  # calls inside calls that a cut may continue in
WORTH_S = 50e-6  # what a call must take before it draws, for the cut to continue inside it
WEAKER = 24  # plans that are verified, at most
CLOSED = {"torch", "numpy"}  # packages whose functions are not cut: what they draw, they draw as a whole
MEMO_SHARE = 0.3  # of a sample's time that a cut leaves: then calls that could be kept are looked for


def _is_closed(code: types.CodeType, module: str, also: tuple[str, ...] = ()) -> bool:
    """Code of Python's own library, of torch, NumPy or stoker; and of what lies in other folders."""
    file = code.co_filename
    package = module.partition(".")[0] in CLOSED and not module.startswith("torch.utils.data")  # Subset, ConcatDataset
    return in_stdlib(file) or file.startswith((PACKAGE, *also)) or package


class Found(NamedTuple):
    """What a trial found.

    Attributes:
        plan: None where nothing can be kept.
        rows: what is kept and what is not, in the order in which it runs.
        why_not: why not more, or why nothing; "" where everything is kept.
        sample_s: seconds that a sample takes.
        memo: calls that are kept instead, where that leaves less to do; ``plan`` is None then.
        changes: an attribute of the dataset that loading a sample changes; "" where none.
    """

    plan: Plan | None
    rows: list[Row]
    why_not: str
    sample_s: float = 0.0
    changes: str = ""
    memo: MemoPlan | None = None


class _Reached(BaseException):
    """The call that was looked for is about to be made."""

    def __init__(self, called: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.call = called, args, kwargs


class _Recorder:
    """What a probed function reports to.

    Attributes:
        first: position, and number of a call or None, of the first thing that moved a generator.
        plain: subscripts of lists, dicts and arrays.
        contexts: ``with`` statements whose context is more than a resource to be closed.
        elapsed: seconds until then, those of asking left out.
    """

    def __init__(self, moved: Callable[[], bool], stop_at: tuple[Position, int] | None = None) -> None:
        self._asks, self._stop_at = moved, stop_at
        self._began, self._asking_s = time.perf_counter(), 0.0
        self.elapsed = 0.0
        self.first: tuple[Position, int | None] | None = None
        self.last: Position = (0,)
        self.plain: set[tuple[int, int]] = set()
        self.contexts: set[Position] = set()

    def begin(self) -> None:
        """The function is called next."""
        self._began = time.perf_counter()

    def at(self, position: Position) -> None:
        """The statement at a position is next."""
        self.settle()
        self.last = position

    def _moved(self) -> bool:
        began = time.perf_counter()
        moved = self._asks()
        self._asking_s += time.perf_counter() - began
        if moved:
            self.elapsed = began - self._began - self._asking_s
        return moved

    def settle(self) -> None:
        """What moved since the last report, the last statement has done."""
        if self.first is None and self._moved():
            self.first = self.last, None

    only = staticmethod(only)

    def context(self, position: Position, value: Any) -> Any:
        """A ``with`` statement enters a value."""
        if not hasattr(value, "close"):
            self.contexts.add(position)
        return value

    def call(self, position: Position, number: int, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call inside the statement at a position."""
        if self._stop_at == (position, number):
            raise _Reached(called, args, kwargs)
        self.settle()
        out = called(*args, **kwargs)
        if self.first is None and self._moved():
            self.first = position, number
        return out

    def item(self, position: Position, number: int, place: tuple[int, int], value: Any, index: Any) -> Any:
        """A subscript."""
        if isinstance(value, (list, tuple, dict, np.ndarray, torch.Tensor)):
            self.plain.add(place)
        return self.call(position, number, value.__getitem__ if callee_of(_getter(value)) else _subscript(value), index)


def _getter(value: Any) -> Any:
    return getattr(value, "__getitem__", None)


def _subscript(value: Any) -> Callable[[Any], Any]:
    return lambda index: value[index]


class Finder(Verifier):
    """Looks for a plan.

    Args:
        dataset: map-style.
        limit_s: seconds that it may take; the best plan verified until then is taken.
    """

    def __init__(self, dataset: Any, limit_s: float) -> None:
        super().__init__(dataset)
        self.until = time.monotonic() + limit_s
        self.reasons: list[str] = []
        self.watches = False  # what the dataset changes counts as what it draws

    def _watch(self, states: RandomStates) -> Callable[[], bool]:
        """Says whether a generator was moved since, or, on request, something that outlives a call was changed."""
        if not self.watches:
            return lambda: bool(states.moved())
        look = Fingerprint(self.looked())
        return lambda: bool(states.moved()) or bool(look.changed(self.looked()))

    # -- finding

    def node(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = DEPTH) -> Node | None:
        """A node for a call that moves generators; None where no part of it can be kept."""
        if not depth:
            return None
        if container_items(called) is not None:
            found = self._slice(called, args, kwargs, depth)
            if found is not None:
                return found
        callee = callee_of(called)
        if callee is None or _is_closed(callee.fn.__code__, callee.fn.__module__ or ""):
            return WholeNode() if callee is None and depth == DEPTH else None  # verifying says whether it is random
        try:
            if has_unrollable(callee.fn):
                with contextlib.suppress(Unplanned):  # lists of more than one item
                    return self._cut(called, args, kwargs, depth, True)
            return self._cut(called, args, kwargs, depth, False)
        except NoSource as e:
            self.reasons.append(str(e))
            return WholeNode() if depth == DEPTH else None

    def _cut(
        self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int, unrolled: bool
    ) -> Node | None:
        callee = callee_of(called)
        assert callee is not None
        fn = callee.fn
        copied = probed(fn, callee.is_method, unrolled)
        seen = self._probe(copied, callee.first, args, kwargs, None)
        changed = ""
        if seen.first is None:
            end = Cut((len(tree_for(fn, unrolled).tree.body),), unrolled=unrolled)
            where, changed = before_state_changes(fn, callee.is_method, end)
            if not changed:
                return WholeNode()
            seen.first = where.position, None
        if depth < DEPTH and seen.elapsed < WORTH_S:
            return None  # it draws at once: there is next to nothing to be kept
        position, number = seen.first
        for k in range(1, len(position), 2):
            if position[:k] in seen.contexts and position[k] == "body":
                position, number = position[:k], None
                break
        where = Cut(position, number, False, (), frozenset(seen.plain), unrolled=unrolled)
        where, earlier_change = before_state_changes(fn, callee.is_method, where)
        changed, code = earlier_change or changed, fn.__code__
        if changed:
            self.reasons.append(f"{place_of(code.co_filename, line_of(fn, where))} changes {changed}")
        if where.position == (0,) and where.call is None:
            return None
        out = CutNode(where)
        if where.call is not None:
            self._enter(out, copied, called, args, kwargs, depth)
        if out.where.position == (0,) and out.where.call == 0 and not out.where.inside:
            return None  # nothing is evaluated before
        self._run_again(out, called, args, kwargs)
        return out

    def _run_again(self, node: CutNode, called: Any, args: Any, kwargs: Any) -> None:
        """Variables that are no data (a formatter, a parser) are made again in the second part, if possible."""
        callee = callee_of(called)
        assert callee is not None
        try:
            parts = node.parts(callee)
            self.seeded_as(1)
            values, keywords = _copies((args, kwargs))
            state = node.head(called, values, keywords)
            names = {
                n for n, value in zip(parts.stored, state[3:], strict=False) if state[0] == PART and _no_data(value)
            }
        except (Exception, Unplanned):
            return  # verifying says why
        if names:
            node.where = node.where._replace(again=frozenset(names))
            node.made = {}

    def _probe(self, copied: Any, bound: Any, args: Any, kwargs: Any, stop_at: Any) -> _Recorder:
        states = self.seeded_as(1)
        seen = _Recorder(self._watch(states), stop_at)
        values, keywords = _copies((args, kwargs))
        seen.begin()
        copied(*bound, *values, _stoker=seen, **keywords)
        seen.settle()
        return seen

    def _enter(self, out: CutNode, copied: Any, called: Any, args: Any, kwargs: Any, depth: int) -> None:
        """Looks inside the call that moves generators."""
        callee = callee_of(called)
        assert callee is not None
        where = out.where
        try:
            self._probe(copied, callee.first, args, kwargs, (where.position, where.call))
        except _Reached as reached:
            inner_called, inner_args, inner_kwargs = reached.call
        else:
            return
        inner = self.node(inner_called, inner_args, inner_kwargs, depth - 1)
        if inner is None:
            return
        out.where = where._replace(inside=True)
        if isinstance(inner, CutNode):
            again = out.parts(callee).again
            names = _bound_names(inner_called, again)
            inner.where = inner.where._replace(given=names)
        out.inner[key_of(inner_called)] = inner

    def _slice(self, called: Any, args: Any, kwargs: Any, depth: int) -> Node | None:
        """How many of a container's transforms are deterministic: each is run twice, by the container's own code."""
        found = container_items(called)
        assert found is not None
        attribute, items = found
        names = [_label(x) for x in items]
        values: Any = (args, kwargs)
        kept = 0
        for k, item in enumerate(items):
            try:
                look = Fingerprint(self.looked()) if self.watches else None
                outs = [self._run_items(called, attribute, [item], values, seed)[0] for seed in (2, 3)]
                same = equal_bits(*outs) and not self._draws(called, attribute, item, values)
                same = same and not (look is not None and look.changed(self.looked()))
            except Exception as e:
                self.reasons.append(f"{names[k]} cannot be run alone: {type(e).__name__}: {e}")
                return None
            if not same:
                break
            kept, values = k + 1, _handed_on(outs[0], values)
            if values is None:
                break
        if kept == len(items):
            return None  # its parts are deterministic, but the whole is not
        inner = None if values is None else self.node(items[kept], values[0], values[1], depth - 1)
        if isinstance(inner, WholeNode):
            inner = None
        return SliceNode(kept, names, inner) if kept or inner is not None else None

    def _run_items(self, called: Any, attribute: str, items: list[Any], values: Any, seed: int) -> tuple[Any, Any]:
        """What a container with these transforms returns, and the random states that it leaves."""
        self.seeded_as(seed)
        args, kwargs = _copies(values)
        out = with_items(called, attribute, items)(*args, **kwargs)
        return out, RandomStates(self.generators).values()

    def _draws(self, called: Any, attribute: str, item: Any, values: Any) -> bool:
        """Whether a transform draws, beside what its container draws for itself."""
        _, after = self._run_items(called, attribute, [item], values, 2)
        try:
            return bool(self._run_items(called, attribute, [], values, 2)[1] != after)
        except Exception:  # a container that cannot be empty
            return bool(self.seeded_as(2).values() != after)

    def candidates(self, node: Node) -> Iterator[Node]:
        """A plan, and others that keep less and less."""
        yield node
        yield from self.weaker_whole() if isinstance(node, WholeNode) else self.weaker(node)

    def weaker(self, node: Node) -> Iterator[Node]:
        """Plans that keep less and less."""
        if isinstance(node, SliceNode):
            if node.inner is not None:
                yield SliceNode(node.kept, node.names, None) if node.kept else node
            for k in range(node.kept - 1, 0, -1):
                yield SliceNode(k, node.names)
        elif isinstance(node, CutNode):
            for key, inner in node.inner.items():
                for other in self.weaker(inner):
                    yield CutNode(node.where, {key: other})
            where: Cut = node.where
            if where.inside:
                where = where._replace(inside=False)
                yield CutNode(where)
            if where.call is not None:
                yield CutNode(where._replace(call=None))
            position = earlier(where.position)
            while position is not None and position != (0,):
                yield CutNode(where._replace(position=position, call=None))
                position = earlier(position)

    def weaker_whole(self) -> Iterator[Node]:
        """Plans for code that moves no generator, and yet cannot be kept as a whole."""
        callee = callee_of(self.dataset.__getitem__)
        position: Position | None = None
        with contextlib.suppress(NoSource):
            position = None if callee is None else (len(tree_of(callee.fn).tree.body) - 1,)
        while position is not None and position != (0,):
            yield CutNode(Cut(position))
            position = earlier(position)


def _no_data(value: Any) -> bool:
    """Whether a value could only be kept as a pickle, or not at all."""
    try:
        return foreign(take(value)[0]) is not None
    except CacheError:
        return True


def _copies(values: Any) -> Any:
    try:
        return copy.deepcopy(values)
    except Exception:
        return values


def _handed_on(out: Any, values: Any) -> Any:
    args, kwargs = values
    if kwargs:
        return ((), out) if not args and isinstance(out, dict) else None
    if len(args) == 1:
        return (out,), {}
    return (out, {}) if isinstance(out, tuple) else None


def _bound_names(called: Any, again: tuple[int | str, ...]) -> tuple[str, ...]:
    """The parameters for which a caller passes arguments again; () unless all are known."""
    callee = callee_of(called)
    if callee is None:
        return ()
    code = callee.fn.__code__
    names = code.co_varnames[: code.co_argcount][1 if callee.is_method else 0 :]
    if any(isinstance(key, int) and key >= len(names) for key in again):
        return ()
    out = tuple(names[key] if isinstance(key, int) else key for key in again)
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return out if all(name in known for name in out) else ()


def _label(item: Any) -> str:
    """What a transform is called in a report."""
    text = " ".join(repr(item).split())
    shown = text.startswith(type(item).__name__) and len(text) <= 60 and " at 0x" not in text
    return text if shown else str(getattr(item, "__name__", None) or type(item).__name__)


def find_plan(dataset: Any, limit_s: float = 30.0) -> Found:
    """Looks for what can be kept of a dataset's samples. Run it in a process of its own: see ``isolate``.

    Args:
        dataset: map-style.
        limit_s: seconds after which the search ends.
    """
    finder = Finder(dataset, limit_s)
    try:
        finder.samples()
        reason = finder.batches_differ()
        found = Found(None, [], reason) if reason else _find(finder)
    except CacheError as e:
        reason = str(e)
        found = Found(None, [], reason)
    except Exception as e:  # the user's, for some random numbers
        reason = f"a sample that could be loaded fails when it is loaded again: {type(e).__name__}: {e}"
        found = Found(None, [], reason)
    if not reason and (found.plan is None or found.plan.tail_s > MEMO_SHARE * finder.sample_s):
        found = _with_memo(finder, found)
    changes = next(filter(None, map(of_dataset, finder.changes)), "")
    return found._replace(sample_s=finder.sample_s, changes=changes)


def _with_memo(finder: Finder, found: Found) -> Found:
    """The same, or calls that are kept instead of a first part, if that leaves less to do."""
    survey = Survey(
        finder.dataset,
        finder.seeded_as,
        lambda: RandomStates(finder.generators),
        lambda callee: _is_closed(callee.fn.__code__, callee.fn.__module__ or "", libraries()),
        lambda: Executed(finder.dataset),
    )
    memo = survey.run(finder.more(), finder.sample_s)
    if memo is None:
        why = "; ".join(dict.fromkeys([found.why_not, *survey.reasons]))
        return found if found.plan is not None else found._replace(why_not=why.removeprefix("; "))
    plan = found.plan
    if plan is not None and plan.tail_s + plan.read_s < memo.served_s:
        return found
    lines = [line.partition(" ") for line in memo.root.all_shown()]
    rows = [Row(where, name, True, "kept by its arguments") for where, _, name in lines]
    return found._replace(plan=None, memo=memo, rows=rows, why_not="")


def _find(finder: Finder) -> Found:
    called = finder.dataset.__getitem__
    name = f"{type(finder.dataset).__name__}.__getitem__"
    if not finder.draws:  # then no source has to be parsed: 0.1 s for a file of 7,000 lines
        plan = Plan(WholeNode())
        if not finder.verify(plan):
            plan.shown = cut_of(plan.root)
            return Found(plan, rows_of(plan.root, name), "")
    node = finder.node(called, (finder.loaded[0],), {})
    if node is None:
        return Found(None, [], "; ".join(finder.reasons) or f"{name} draws before anything else")
    candidates = finder.candidates(node)
    for _ in range(WEAKER):
        candidate = next(candidates, None)
        if candidate is None:
            break
        plan = Plan(candidate)
        why = finder.verify(plan)
        if not why:
            plan.shown = cut_of(candidate)
            return Found(plan, rows_of(candidate, name), "; ".join(dict.fromkeys(finder.reasons)))
        finder.reasons.append(why)
        if time.monotonic() > finder.until:
            finder.reasons.append("the search took too long")
            break
        if why.startswith(CHANGES) and not finder.watches:
            finder.watches = True
            again = finder.node(called, (finder.loaded[0],), {})
            candidates = candidates if again is None else itertools.chain(finder.candidates(again), candidates)
    return Found(None, [], "; ".join(dict.fromkeys(finder.reasons)))
