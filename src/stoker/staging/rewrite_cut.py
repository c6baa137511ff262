"""Cuts a function in two: what is the same each time, and the rest.

A *position* is where in a function's body a statement stands: ``(3,)`` is the fourth statement, ``(3, "body", 1)`` the
second one inside it. Blocks that can be entered are ``if``, ``with`` and ``try``; loops are not.
"""

from __future__ import annotations

import ast
import copy
import types
from typing import Any, NamedTuple

from .recompile import HELPER, compiled_like, helper_call
from .syntax import (
    Position,
    bound_once,
    calls_in,
    changes_state,
    first_param,
    is_chain,
    is_setup,
    names_bound,
    names_in,
    params_of,
    places_of_operands,
    read_before_bound,
    root_of,
)
from .unroll import tree_for

STATE = "_stoker_state"
MISSING = "_stoker_missing"
TEMPORARY = "_stoker_t"


class Cut(NamedTuple):
    """Where a function is cut.

    Attributes:
        position: the first statement that runs every time.
        call: the number of the first call in that statement, in order of evaluation, that runs every time; None: the
            cut lies before the statement.
        inside: the cut continues inside that call; else the call as a whole runs every time.
        given: parameters that the caller passes again when it runs the second part.
        plain: line and column of subscripts of lists, dicts and arrays: what they give is looked up again, not kept.
        again: variables that are made again in the second part, by the statement that made them in the first.
        unrolled: the position is one in the function with its list comprehensions unrolled: see ``unroll``.
    """

    position: Position
    call: int | None = None
    inside: bool = False
    given: tuple[str, ...] = ()
    plain: frozenset[tuple[int, int]] = frozenset()
    again: frozenset[str] = frozenset()
    unrolled: bool = False


class Parts(NamedTuple):
    """A function in two parts.

    Attributes:
        head: takes the function's own arguments and ``_stoker``.
        tail: takes ``self`` if the function is a method, ``given``, then ``stored``; ``_stoker_state`` of the call in
            which the cut continues; and ``_stoker_missing``, names of variables that are unbound.
        stored: names of the variables that are kept between the two.
        again: positions among the arguments of the call in which the cut continues, or their names, that the caller
            can pass again.
        line: of the first statement that runs every time.
    """

    head: types.FunctionType
    tail: types.FunctionType
    stored: tuple[str, ...]
    again: tuple[int | str, ...]
    line: int


def earlier(position: Position) -> Position | None:
    """The position before this one: of the statement before it, or of that around it."""
    *around, k = position
    if k:
        return (*around, k - 1)
    return tuple(around[:-1]) if around else None


def line_of(fn: types.FunctionType, where: Cut) -> int:
    """The line of the statement at a position."""
    block: Any = tree_for(fn, where.unrolled).tree.body
    for step in where.position[:-1]:
        block = block[step] if isinstance(step, int) else getattr(block, step)
    return int(block[where.position[-1]].lineno)


def before_state_changes(fn: types.FunctionType, bound: bool, where: Cut) -> tuple[Cut, str]:
    """A cut no later than the first statement that changes what outlives the call, and what that statement changes.

    ``self.count += 1`` before the cut would run once for each sample, and not once for each epoch.
    """
    tree = tree_for(fn, where.unrolled).tree
    locals_, first = names_bound(tree), first_param(tree, bound)
    block, reached = tree.body, ()
    position = where.position
    while True:
        for k, statement in enumerate(block[: position[0]]):
            changed = "" if is_setup(statement, first) else changes_state(statement, locals_)
            if changed:
                return where._replace(position=(*reached, k), call=None, inside=False), changed
        if len(position) == 1:
            return where, ""
        block, reached = getattr(block[position[0]], position[1]), (*reached, *position[:2])
        position = position[2:]


def cut(fn: types.FunctionType, bound: bool, where: Cut) -> Parts:
    """Cuts a function in two.

    ``head(*args, _stoker=h, **kwargs)`` runs what comes before the cut and returns ``h.pack(variables, inner)`` or,
    where the function returned early, ``h.done(value)``; ``h.head(callee, *args, **kwargs)`` makes ``inner`` where the
    cut continues in a call. ``tail(...)`` runs the rest; ``h.tail(callee, again, inner)`` stands in that call's place.

    Raises:
        NoSource: see ``tree_of``.
    """
    function = tree_for(fn, where.unrolled)
    tree = function.tree
    params, first = params_of(tree), first_param(tree, bound)
    context = {first, *where.given} - {""}
    locals_ = {*params, *names_in(tree.body, ast.Store)}
    builder = _Cutter(where, locals_, {*params} | context, context, bound_once(tree.body, params))
    head, rest = builder.block(tree.body, where.position)
    line = rest[0].lineno if rest else tree.body[-1].lineno
    again = builder.repeated(head, rest)
    needed = read_before_bound([*again, *rest])
    made_again = names_in(again, ast.Store)
    assigned = {*params, *names_in(head, ast.Store)}
    stored = tuple(sorted((assigned & needed) - context - made_again))
    head_tree = _head_tree(tree, head)
    tail_tree = ast.copy_location(copy.copy(tree), tree)
    tail_tree.args = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(n) for n in ([first] if first else []) + [*where.given, *stored]],
        kwonlyargs=[ast.arg(HELPER), ast.arg(STATE), ast.arg(MISSING)],
        kw_defaults=[None, None, None],
        defaults=[],
    )
    unbound = [ast.copy_location(_unbind(name), (rest or tree.body)[0]) for name in stored if name not in params]
    tail_tree.body = [*unbound, *again, *rest] or [ast.Pass()]
    head_fn, tail_fn = compiled_like(fn, function, [(head_tree, True), (tail_tree, False)])
    return Parts(head_fn, tail_fn, stored, tuple(builder.again), line)


def _unbind(name: str) -> ast.stmt:
    """``if name in _stoker_missing: del name``: the first part left this variable unbound."""
    missing = ast.Compare(ast.Constant(name), [ast.In()], [ast.Name(MISSING, ast.Load())])
    return ast.If(missing, [ast.Delete([ast.Name(name, ast.Del())])], [])


def _head_tree(tree: ast.FunctionDef, head: list[ast.stmt]) -> ast.FunctionDef:
    out = ast.copy_location(copy.copy(tree), tree)

    class Returns(ast.NodeTransformer):
        def visit_Return(self, node: ast.Return) -> ast.AST:
            if getattr(node, "packs", False):
                return node
            value = node.value or ast.Constant(None)
            return ast.copy_location(ast.Return(helper_call("done", value)), node)

        def _skip(self, node: ast.AST) -> ast.AST:
            return node

        visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _skip

    out.body = [Returns().visit(statement) for statement in copy.deepcopy(head)]
    return out


class _Cutter:
    """Builds the statements of both parts.

    Args:
        where: the cut.
        locals_: all variables of the function.
        params: its parameters.
        context: parameters that the caller passes to the second part again; ``self`` is one.
        once: variables that are bound by one statement only.
    """

    def __init__(self, where: Cut, locals_: set[str], params: set[str], context: set[str], once: set[str]) -> None:
        self._where, self._locals, self._context, self._once = where, locals_, context, once
        self._known = context | (once & params)
        self._alive: list[ast.stmt] = []
        self._entered: dict[int, str] = {}  # statements that the cut lies in, by id, and in which block of theirs
        self.again: list[int | str] = []

    def block(self, block: list[ast.stmt], position: Position) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """The two parts of a block."""
        k, *deeper = position
        before, statement, after = block[:k], block[k], block[k + 1 :]
        if not deeper:
            if self._where.call is None:
                return [*before, self._pack(statement, None)], block[k:]
            head, changed = self._inside(statement)
            return [*before, *head], [changed, *after]
        name = deeper[0]
        head, rest = self.block(getattr(statement, name), tuple(deeper[1:]))
        entered = copy.copy(statement)
        self._entered[id(entered)] = name
        self._alive.append(entered)
        leave = ast.copy_location(ast.Expr(helper_call("unplanned")), statement)
        if isinstance(entered, ast.If):
            other = "orelse" if name == "body" else "body"
            setattr(entered, name, head)
            setattr(entered, other, [leave])
        else:
            entered.body = head  # type: ignore[attr-defined]
        if isinstance(entered, ast.Try):
            assert isinstance(statement, ast.Try)
            again = copy.copy(statement)
            again.body = rest
            again.handlers = [_passes_unplanned(statement), *statement.handlers]
            entered.handlers = [copy.copy(h) for h in statement.handlers]
            for handler in entered.handlers:
                handler.body = [*handler.body, leave]
            entered.handlers.insert(0, _passes_unplanned(statement))
            rest = [again]
        return [*before, entered], [*rest, *after]

    def _pack(self, at: ast.stmt, inner: ast.expr | None) -> ast.stmt:
        values = ast.Call(ast.Name("locals", ast.Load()), [], [])
        out = ast.Return(helper_call("pack", values, inner or ast.Constant(None)))
        out.packs = True  # type: ignore[attr-defined]
        return ast.copy_location(out, at)

    def _inside(self, statement: ast.stmt) -> tuple[list[ast.stmt], ast.stmt]:
        """Cuts inside a statement: what is evaluated before the call goes into temporary variables."""
        root = root_of(statement)
        target = list(calls_in(root))[self._where.call or 0]
        hoisted: list[ast.stmt] = []
        changed = copy.copy(statement)
        changed.value = self._hoist(root, target, hoisted)  # type: ignore[attr-defined]
        if not self._where.inside:
            return [*hoisted, self._pack(statement, None)], changed
        if isinstance(target, ast.Call):
            inner = helper_call("head", target.func, *target.args)
            inner.keywords = target.keywords
        else:
            assert isinstance(target, ast.Subscript)
            inner = helper_call("head", ast.Attribute(target.value, "__getitem__", ast.Load()), target.slice)
        return [*hoisted, self._pack(statement, ast.copy_location(inner, target))], changed

    def _hoist(self, node: Any, target: ast.AST, hoisted: list[ast.stmt]) -> Any:
        """A copy of an expression in which what is evaluated before the target stands in temporary variables."""
        if node is target and self._where.inside:
            return ast.copy_location(self._hole(target), target)
        new = copy.copy(node)
        for holder, key, child in places_of_operands(new):
            last = any(x is target for x in ast.walk(child))
            made = self._hoist(child, target, hoisted) if last else self._temporary(child, hoisted)
            if isinstance(holder, list):
                holder[key] = made
            else:
                setattr(holder, key, made)
            if last:
                break
        return new

    def _temporary(self, node: Any, hoisted: list[ast.stmt]) -> Any:
        """The name of a new variable that holds what an expression gives; look-ups without calls stay as they are."""
        if isinstance(node, (ast.keyword, ast.Starred, ast.FormattedValue)):
            new: Any = copy.copy(node)
            new.value = self._temporary(node.value, hoisted)
            return new
        if isinstance(node, ast.Attribute) and not is_chain(node):  # a method: what it is bound to is kept
            new = copy.copy(node)
            new.value = self._temporary(node.value, hoisted)
            return new
        if not isinstance(node, ast.expr) or isinstance(node, ast.Slice) or is_chain(node):
            return node
        name = f"{TEMPORARY}{len(hoisted)}"
        hoisted.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], node), node))
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def _hole(self, target: ast.AST) -> ast.expr:
        """What stands for the call in the second part: the rest of it, with the arguments that can be passed again."""
        if isinstance(target, ast.Subscript):
            callee: ast.expr = ast.Attribute(target.value, "__getitem__", ast.Load())
            args: list[tuple[int | str, ast.expr]] = []
        else:
            assert isinstance(target, ast.Call)
            callee = target.func
            args = [(i, x) for i, x in enumerate(target.args)]
            if any(isinstance(x, ast.Starred) for x in target.args):
                args = []
            args += [(k.arg, k.value) for k in target.keywords if k.arg is not None]
        passed = []
        for key, value in args:
            constant = isinstance(value, ast.Constant)
            if is_chain(value, self._where.plain) and not constant and names_in([value], ast.Load) <= self._context:
                self.again.append(key)
                passed.append(value)
        return helper_call("tail", callee, ast.Tuple(passed, ast.Load()), ast.Name(STATE, ast.Load()))

    def repeated(self, head: list[ast.stmt], rest: list[ast.stmt]) -> list[ast.stmt]:
        """Statements of the head that the tail runs again instead of keeping what they gave: look-ups without calls,
        imports, functions defined inside, files opened when first needed."""
        found: list[ast.stmt] = []
        self._collect(head, set(self._known), found)
        needed, out = names_in(rest, ast.Load, ast.Del), []
        for statement in reversed(found):
            bound = names_in([statement], ast.Store)
            if not bound or bound & needed:
                out.append(statement)
                needed |= names_in([statement], ast.Load)
        return out[::-1]

    def _collect(self, block: list[ast.stmt], known: set[str], found: list[ast.stmt]) -> None:
        for statement in block:
            bound = names_in([statement], ast.Store)
            if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
                repeats = bound <= self._once
            elif isinstance(statement, ast.Assign):
                flat = all(isinstance(t, (ast.Name, ast.Tuple)) for t in statement.targets)
                local = names_in([statement.value], ast.Load) & self._locals
                chain = is_chain(statement.value, self._where.plain) or bool(bound & self._where.again)
                repeats = flat and chain and bound <= self._once
                repeats = repeats and not isinstance(statement.value, ast.Constant) and local <= known
            else:
                repeats = any(is_setup(statement, first) for first in self._context)
            if repeats:
                found.append(copy.deepcopy(statement))
                known |= bound
            elif id(statement) in self._entered:
                self._collect(getattr(statement, self._entered[id(statement)]), known, found)


def _passes_unplanned(statement: ast.stmt) -> ast.ExceptHandler:
    """``except _stoker.Unplanned: raise``: the user's own bare ``except`` must not see it."""
    kind = ast.Attribute(ast.Name(HELPER, ast.Load()), "Unplanned", ast.Load())
    return ast.copy_location(ast.ExceptHandler(kind, None, [ast.copy_location(ast.Raise(), statement)]), statement)
