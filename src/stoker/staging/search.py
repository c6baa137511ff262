"""Searches for the point at which a call can be cut, by running probed copies of its functions.

A function is cut at the first statement, and in it at the first call, that advances a random generator (see ``probe``).
If that call runs a Python function or a container of transforms, the search continues inside it. The result is a guess,
which ``verify`` tests; ``weaker_plans`` are the next guesses, each of which caches less.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import types
from collections.abc import Callable, Iterator

from ..core.compare import equal_bits
from ..core.errors import one_line
from ..core.fingerprint import Fingerprint
from ..core.random_state import RandomState
from .callee import Call, Callee, callee_of, key_of
from .containers import Items, Transform, items_of, with_items
from .cut_function import Cut, before_state_changes, earlier, line_at
from .executed_code import is_closed
from .plan import CutNode, PlanNode, SliceNode, Unplanned, WholeNode
from .probe import Moved, Reached, Recorder, probed
from .samples import TrialSamples
from .source import NoSource, known_tree
from .stages import place_of
from .syntax import Position, first_param, is_name, local_variables, names_read, params_of
from .unroll import SELF, has_unrollable, tree_for
from .users_code import is_users_code

DEPTH = 8  # nesting depth of calls in which a cut may continue
WORTH_S = 50e-6  # minimum time before the first draw in a call for the cut to continue inside it
PROBE_SEED, SLICE_SEEDS = 1, (2, 3)
LONGEST_LABEL = 60  # characters of a transform's name in a report


class PlanSearch:
    """Searches for a plan."""

    def __init__(self, samples: TrialSamples, stop_at_changes: bool = False) -> None:
        self.reasons: list[str] = []  # why no more can be cached
        self._samples = samples
        self._stop_at_changes = stop_at_changes  # treat changes of the dataset like draws

    def find(self) -> PlanNode | None:
        """Returns a node for a sample of the dataset; None if no part of it can be cached."""
        return self._node(Call(self._samples.dataset.__getitem__, (self._samples.loaded[0],), {}), DEPTH)

    def prefix(self, call: Call) -> PlanNode | None:
        """Returns a node for any call that advances generators; None if no part of it can be cached."""
        try:
            found = self._node(call, DEPTH - 1)
        except (Exception, Unplanned) as e:  # the user's, for some random numbers
            self.reasons.append(f"{key_of(call.function)} cannot be cut: {one_line(e)}")
            return None
        return None if isinstance(found, WholeNode) else found

    def _has_moved(self, states: RandomState) -> Callable[[], bool]:
        """Returns a function: whether a generator has advanced since, or (on request) anything lasting has changed."""
        if not self._stop_at_changes:
            return lambda: bool(states.moved())
        before = Fingerprint(self._samples.readable())
        return lambda: bool(states.moved()) or bool(before.changed(self._samples.readable()))

    def _node(self, call: Call, depth: int, given: tuple[str, ...] = ()) -> PlanNode | None:
        """Returns a node for a call that draws; None if no part of it can be cached. ``given``: see ``Cut``."""
        if not depth:
            return None
        items = items_of(call.function)
        if items is not None:
            found = self._slice(call, items, depth)
            if found is not None:
                return found
        whole = WholeNode() if depth == DEPTH else None  # verification decides whether it is random
        callee = callee_of(call.function)
        if callee is None:
            return whole
        if is_closed(callee.fn):
            return None
        try:
            if has_unrollable(callee.fn):
                with contextlib.suppress(Unplanned):  # raised by lists of more than one item
                    return self._cut(call, callee, depth, Cut((0,), given=given, unrolled=True))
            return self._cut(call, callee, depth, Cut((0,), given=given))
        except NoSource as e:
            self.reasons.append(str(e))
            return whole

    # -- functions

    def _cut(self, call: Call, callee: Callee, depth: int, cut: Cut) -> PlanNode | None:
        """Returns a node for a Python function. ``cut``: properties of the cut, except its position."""
        fn, unrolled = callee.fn, cut.unrolled
        copied = probed(fn, callee.is_method, unrolled)
        seen = self._probe(copied, callee, call, None)
        changed = ""
        if seen.first is None:
            end = cut._replace(position=(len(tree_for(fn, unrolled).tree.body),))
            where, changed = before_state_changes(callee, end)
            if not changed:
                return WholeNode()
            seen.first = Moved(where.position, None)
        if depth < DEPTH and seen.elapsed < WORTH_S:
            return None  # it draws at once: almost nothing to cache
        position, number = seen.first
        for stack in sorted(seen.stacks):
            if position[: len(stack)] == stack and len(position) > len(stack):
                position, number = stack, None
        plain, entered = frozenset(seen.plain), frozenset(seen.contexts)
        where = cut._replace(position=position, call=number, plain=plain, entered=entered)
        where, earlier_change = before_state_changes(callee, where)
        changed = earlier_change or changed
        if changed:
            line = line_at(tree_for(fn, unrolled).tree, where.position)
            self.reasons.append(f"{place_of(fn.__code__.co_filename, line)} changes {changed}")
        if where.position == (0,) and where.call is None:
            return None
        node = CutNode(where)
        if where.call is not None:
            self._enter(node, copied, callee, call, depth)
        if node.where.position == (0,) and node.where.call == 0 and not node.where.inside:
            return None  # nothing is evaluated before the cut
        return node

    def _probe(self, copied: types.FunctionType, callee: Callee, call: Call, stop_at: Moved | None) -> Recorder:
        states = self._samples.seed(PROBE_SEED)
        call = call.with_copied_arguments(self._samples.dataset)
        seen = Recorder(self._has_moved(states), stop_at)
        copied(*callee.first, *call.args, _stoker=seen, **call.kwargs)
        seen.settle()
        return seen

    def _enter(self, node: CutNode, copied: types.FunctionType, callee: Callee, call: Call, depth: int) -> None:
        where = node.where
        try:
            self._probe(copied, callee, call, Moved(where.position, where.call))
        except Reached as reached:
            inner_call = reached.call
        else:
            return
        entered = CutNode(where._replace(inside=True))
        given = _parameter_names(inner_call.function, entered.parts(callee).repeatable)
        inner = self._node(inner_call, depth - 1, given)
        if inner is not None:
            node.where = entered.where
            node.inner[key_of(inner_call.function)] = inner

    # -- containers

    def _slice(self, call: Call, found: Items, depth: int) -> PlanNode | None:
        """Counts a container's deterministic transforms: runs each twice, with the container's own code."""
        leaves = _leaves_loop(call)
        if leaves is None:
            return None
        items, names = found.items, [_label(x) for x in found.items]
        kept = 0
        rest: Call | None = call
        for item, name in zip(items, names, strict=True):
            assert rest is not None
            try:
                out = self._deterministic_result(rest, found.attribute, item)
            except Exception as e:
                self.reasons.append(f"{name} cannot be run on its own: {one_line(e)}")
                return None
            if out is None:
                break
            kept, rest = kept + 1, _next_call(rest, out[0])
            if rest is None:
                break
        if kept == len(items):
            return None  # its parts are deterministic, but the whole is not
        inner = None if rest is None else self._node(rest._replace(function=items[kept]), depth - 1)
        if isinstance(inner, WholeNode):
            inner = None
        return SliceNode(kept, names, inner, leaves) if kept or inner is not None else None

    def _deterministic_result(self, call: Call, attribute: str, item: Transform) -> tuple[object] | None:
        """Runs a container with a single transform. Returns the result; None if it is random or changes the dataset."""
        samples = self._samples
        before = Fingerprint(samples.readable()) if self._stop_at_changes else None
        first, second = (self._run_items(call, attribute, [item], seed)[0] for seed in SLICE_SEEDS)
        if not equal_bits(first, second):
            return None
        _, states = self._run_items(call, attribute, [item], SLICE_SEEDS[0])
        try:  # the container itself may draw
            _, own_states = self._run_items(call, attribute, [], SLICE_SEEDS[0])
        except Exception:  # it must not be empty
            own_states = samples.seed(SLICE_SEEDS[0]).in_order()
        if states != own_states or (before is not None and before.changed(samples.readable())):
            return None
        return (first,)

    def _run_items(self, call: Call, attribute: str, items: list[Transform], seed: int) -> tuple[object, object]:
        """Returns the result of a container with these transforms, and the random states afterwards."""
        self._samples.seed(seed)
        part = with_items(call.function, attribute, items)
        out = call.with_copied_arguments(self._samples.dataset)._replace(function=part).run()
        return out, self._samples.states().in_order()


def _leaves_loop(call: Call) -> bool | None:
    """Whether a container may end its loop over its items early; None if it may make something else with its first
    items, and then with the others, than with all of them. A user's must be nothing but a loop like ``x = item(x)``."""
    callee = callee_of(call.function)
    tree = None if callee is None else known_tree(callee.fn.__code__)
    if callee is None or tree is None:
        return False
    loops = [x for x in ast.walk(tree) if isinstance(x, (ast.For, ast.While))]
    leaves = any(isinstance(x, (ast.Break, ast.Return)) for loop in loops for x in ast.walk(loop))
    if leaves and (len(call.args) != 1 or call.kwargs):
        return None
    if is_users_code(callee.fn.__code__) and not _only_loops(tree, first_param(tree, callee.is_method)):
        return None
    return leaves


def _only_loops(tree: ast.FunctionDef, first: str) -> bool:
    """Whether a function only passes a value through the items of a loop. ``first``: its name for ``self``."""
    body = [x for x in tree.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    values = {*params_of(tree), *local_variables(tree)} - {first}
    if not body or not isinstance(body[-1], ast.Return) or not isinstance(body[-1].value, (ast.Name, ast.Tuple)):
        return False
    around = body[:-1]
    while len(around) == 1 and isinstance(around[0], ast.If) and not around[0].orelse:
        if not values.isdisjoint(names_read([around[0].test])):
            return False
        around = around[0].body
    if len(around) != 1 or not isinstance(loop := around[0], ast.For):
        return False
    if not isinstance(loop.target, ast.Name) or loop.orelse or not values.isdisjoint(names_read([loop.iter])):
        return False
    return all(_only_calls(x, loop.target.id, values) for x in loop.body)


def _only_calls(statement: ast.stmt, item: str, values: set[str]) -> bool:
    """Whether a statement is ``x = item(x)``, under a condition that does not depend on ``x``, or ends the loop if
    there is no value."""
    if isinstance(statement, ast.If):
        if re.fullmatch(r"\w+ is None", ast.unparse(statement.test)):
            return not statement.orelse and all(isinstance(x, (ast.Return, ast.Break)) for x in statement.body)
        depends = not (values - {item}).isdisjoint(names_read([statement.test]))
        return not depends and all(_only_calls(x, item, values) for x in (*statement.body, *statement.orelse))
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Assign) and isinstance(value, ast.Call) and is_name(value.func, item)


def _next_call(call: Call, out: object) -> Call | None:
    """The call of a container's next transform; None if it is unknown how the container makes it."""
    if call.kwargs:
        return call._replace(kwargs=out) if not call.args and isinstance(out, dict) else None
    if len(call.args) == 1:
        return call._replace(args=(out,))
    return call._replace(args=out) if isinstance(out, tuple) else None


def _parameter_names(called: object, repeatable: tuple[int | str, ...]) -> tuple[str, ...]:
    """Parameters for which a caller passes arguments again; () unless all are known."""
    callee = callee_of(called)
    if callee is None:
        return ()
    code = callee.fn.__code__
    names = code.co_varnames[: code.co_argcount][1 if callee.is_method else 0 :]
    if not code.co_argcount and not callee.is_method and code.co_flags & inspect.CO_VARARGS and repeatable == (0,):
        return (SELF,)
    if any(isinstance(key, int) and key >= len(names) for key in repeatable):
        return ()
    out = tuple(names[key] if isinstance(key, int) else key for key in repeatable)
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return out if all(name in known for name in out) else ()


def _label(item: object) -> str:
    """Name of a transform in reports."""
    text = " ".join(repr(item).split())
    is_short = len(text) <= LONGEST_LABEL and " at 0x" not in text
    if text.startswith(type(item).__name__) and is_short:
        return text
    return str(getattr(item, "__name__", None) or type(item).__name__)


# -- the next guesses


def weaker_plans(node: PlanNode, called: object) -> Iterator[PlanNode]:
    """Yields plans that cache less and less."""
    if not isinstance(node, WholeNode):
        yield from _weaker(node)
        return
    # The code advances no generator, yet it cannot be cached as a whole.
    callee = callee_of(called)
    tree = None if callee is None else known_tree(callee.fn.__code__)
    yield from () if tree is None else _cuts_before(Cut((len(tree.body) - 1,)))


def _weaker(node: PlanNode) -> Iterator[PlanNode]:
    if isinstance(node, SliceNode):
        if node.inner is not None and node.kept:
            yield SliceNode(node.kept, node.names, leaves=node.leaves)
        for k in range(node.kept - 1, 0, -1):
            yield SliceNode(k, node.names, leaves=node.leaves)
    elif isinstance(node, CutNode):
        for key, inner in node.inner.items():
            for other in _weaker(inner):
                yield CutNode(node.where, {key: other})
        where = node.where._replace(inside=False)
        if node.where.inside:
            yield CutNode(where)
        where = where._replace(call=None)
        if node.where.call is not None:
            yield CutNode(where)
        before = earlier(where.position)
        if before is not None:
            yield from _cuts_before(where._replace(position=before))


def _cuts_before(where: Cut) -> Iterator[PlanNode]:
    """Yields the cut before a statement, and those before earlier ones."""
    position: Position | None = where.position
    while position is not None and position != (0,):
        yield CutNode(where._replace(position=position))
        position = earlier(position)
