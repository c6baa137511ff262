"""Cuts a Python function in two: ``head``, everything before the first random statement, and ``tail``, the rest.

For a ``__getitem__`` that is cut before its last statement::

    def __getitem__(self, i):              def head(self, i, *, _stoker):
        row = self.rows[i]                     row = self.rows[i]
        image = read(row.path)                 image = read(row.path)
        return flip(image), row.label          return _stoker.pack(locals(), None)

                                           def tail(self, i, image, *, _stoker, _stoker_state, _stoker_missing):
                                               row = self.rows[i]
                                               return flip(image), row.label

The head packs what the tail reads, except what can be looked up again without a call (``row``). If the cut continues
inside a call, ``_stoker.head(function, args)`` makes the inner state, and ``_stoker.tail(function, repeated, state)``
replaces the call.

A *position* locates a statement in a function's body: ``(3,)`` is the fourth statement, ``(3, "body", 1)`` the second
one inside it. A cut may lie inside ``if``, ``with`` and ``try`` blocks, not inside loops.
"""

from __future__ import annotations

import ast
import copy
import itertools
import types
from typing import Any, NamedTuple

from . import syntax
from .callee import Callee
from .source import HELPER, compiled_like, helper_call
from .switches import scope_of, switched_on
from .unroll import SELF, as_in_source, is_first_of_list, tree_for

STATE = "_stoker_state"
MISSING = "_stoker_missing"
TEMPORARY = "_stoker_t"


class Cut(NamedTuple):
    """Where a function is cut."""

    position: syntax.Position  # first statement that runs every time
    # number of the first call in that statement, in order of evaluation, that runs every time; None: the cut lies
    # before the statement
    call: int | None = None
    inside: bool = False  # the cut continues inside that call; otherwise the whole call runs every time
    given: tuple[str, ...] = ()  # parameters that the caller passes again when running the tail
    plain: frozenset[tuple[int, int]] = frozenset()  # line and column of subscripts that the tail may look up again
    unrolled: bool = False  # the position counts statements after unrolling list comprehensions: see ``unroll``
    entered: frozenset[syntax.Position] = frozenset()  # ``with`` statements that the tail enters, too


class FunctionParts(NamedTuple):
    """A function in two parts."""

    head: types.FunctionType  # takes the function's own arguments and ``_stoker``
    # takes ``self`` if the function is a method, ``given``, then ``stored``; ``_stoker_state`` for the call in which
    # the cut continues; and ``_stoker_missing``, names of unbound variables
    tail: types.FunctionType
    stored: tuple[str, ...]  # names of the variables stored between the two
    repeatable: tuple[int | str, ...]  # arguments, by position or name, that the tail can pass again to the inner call
    line: int  # of the first statement that runs every time
    text: str  # of the head, without lines and columns


def earlier(position: syntax.Position) -> syntax.Position | None:
    """The preceding position: the statement before, or the enclosing statement."""
    *around, k = position
    if isinstance(k, int) and k:
        return (*around, k - 1)
    return tuple(around[:-1]) if around else None


def line_at(tree: ast.FunctionDef, position: syntax.Position) -> int:
    node: Any = tree.body
    for step in position:
        node = node[step] if isinstance(step, int) else getattr(node, step)
    return int(node.lineno)


def before_state_changes(callee: Callee, where: Cut) -> tuple[Cut, str]:
    """Moves a cut before the first statement that changes state which outlives the call; also returns what it changes.
    ``self.count += 1`` before the cut would run once per sample instead of once per sample and epoch."""
    tree = tree_for(callee.fn, where.unrolled).tree
    locals_, first = syntax.local_variables(tree), syntax.first_param(tree, callee.is_method)
    scope = scope_of(tree, callee.fn.__globals__, first, callee.bound)
    block: list[ast.stmt] = tree.body
    around: syntax.Position = ()
    in_context = False
    for depth in range(0, len(where.position), 2):
        last: Any = where.position[depth]
        for k, statement in enumerate(block[:last]):
            is_left = syntax.is_setup(statement, first) or syntax.is_reset(statement, first)
            on = switched_on(statement, scope)
            changed = "" if is_left else syntax.changes_state(_without_handlers(on), locals_, scope)
            changed = changed or (syntax.sets_something(on, locals_) if in_context else "")
            if changed:
                return where._replace(position=(*around, k), call=None, inside=False), changed
        if depth + 1 < len(where.position):
            entered: Any = block[last]
            if (*around, last) in where.entered:
                # settings made inside, such as ``warnings.simplefilter``, are undone before the tail enters it
                in_context = True
                locals_ = locals_ - syntax.names_bound([x.optional_vars for x in entered.items if x.optional_vars])
            name = where.position[depth + 1]
            block, around = getattr(entered, str(name)), (*around, last, name)
    return where, ""


def _without_handlers(statement: ast.stmt) -> ast.stmt:
    """Drops the ``except`` blocks of a statement: a sample that runs a state-changing one has no cacheable part."""
    if isinstance(statement, ast.Try):
        statement = copy.copy(statement)
        statement.handlers = []
    return statement


def cut(fn: types.FunctionType, is_method: bool, where: Cut) -> FunctionParts:
    """Cuts a function in two. Raises NoSource; see ``tree_of``."""
    function = tree_for(fn, where.unrolled, is_method or SELF in where.given)
    tree = function.tree
    params, first = syntax.params_of(tree), syntax.first_param(tree, is_method)
    passed = {first, *where.given} - {""}
    cutter = _Cutter(where, {*params, *syntax.names_bound(tree.body)}, passed, syntax.local_variables(tree))
    head, rest = cutter.block(tree.body, ())
    line = line_at(tree, where.position) if rest else tree.body[-1].lineno
    again = _looked_up_again(cutter, head, rest, syntax.bound_once(tree.body, params), set(params))
    if not any(isinstance(x, ast.Return) and not hasattr(x, "packs") for y in head for x in ast.walk(y)):
        head = [x for x in head if not syntax.is_reset(x, first)]  # the tail runs them each time
    assigned = {*params, *syntax.names_bound(head)} - passed - syntax.names_bound(again)
    stored = tuple(sorted(assigned & syntax.read_before_bound([*again, *rest])))
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
    text = ast.dump(head_tree)
    head_fn, tail_fn = compiled_like(fn, function, [(head_tree, True), (tail_tree, False)])
    return FunctionParts(head_fn, tail_fn, stored, tuple(cutter.repeatable), line, text)


def _unbind(name: str) -> ast.stmt:
    """``if name in _stoker_missing: del name``: the head left this variable unbound."""
    missing = ast.Compare(ast.Constant(name), [ast.In()], [ast.Name(MISSING, ast.Load())])
    return ast.If(missing, [ast.Delete([ast.Name(name, ast.Del())])], [])


def _head_tree(tree: ast.FunctionDef, head: list[ast.stmt]) -> ast.FunctionDef:
    """Builds the head's definition. ``return value`` becomes ``return _stoker.done(value)``."""

    class Returns(ast.NodeTransformer):
        def visit_Return(self, node: ast.Return) -> ast.AST:
            if getattr(node, "packs", False):
                return node
            return ast.copy_location(ast.Return(helper_call("done", node.value or ast.Constant(None))), node)

        def _leave(self, node: ast.AST) -> ast.AST:
            return node

        visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _leave

    out = ast.copy_location(copy.copy(tree), tree)
    out.body = [Returns().visit(statement) for statement in copy.deepcopy(head)]
    return out


class _Cutter:
    """Builds the statements of both parts."""

    def __init__(self, where: Cut, locals_: set[str], passed: set[str], own: set[str]) -> None:
        self.where = where
        self.locals = locals_  # all variables of the function
        self.passed = passed  # parameters that the caller passes to the tail again, such as ``self``
        self._own = own  # its variables that are not parameters
        self.entered: dict[int, str] = {}  # by id of a head statement with the cut inside: the block in which it lies
        self.repeatable: list[int | str] = []  # see ``FunctionParts``
        self._alive: list[ast.stmt] = []  # keeps nodes alive so that no id is reused

    def block(self, block: list[ast.stmt], around: syntax.Position) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Splits a block. ``around``: its position."""
        position = self.where.position[len(around) :]
        k: Any = position[0]
        before, statement, after = [self._leaving(x) for x in block[:k]], block[k], block[k + 1 :]
        if len(position) > 1:
            entered, rest = self._enter(statement, (*around, k), str(position[1]))
            return [*before, *entered], [*rest, *as_in_source(after)]
        if self.where.call is None or is_first_of_list(statement):
            return [*before, self._pack(statement, None)], as_in_source(block[k:])
        head, changed = self._inside(statement)
        return [*before, *head], [changed, *as_in_source(after)]

    def _enter(self, statement: ast.stmt, place: syntax.Position, name: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Splits a statement with the cut in one of its blocks. Returns its replacements in head and tail."""
        head, rest = self.block(getattr(statement, name), (*place, name))
        entered: Any = copy.copy(statement)
        self.entered[id(entered)] = name
        self._alive.append(entered)
        leave = _leave(statement)
        setattr(entered, name, head)
        if isinstance(statement, ast.If):
            setattr(entered, "orelse" if name == "body" else "body", [leave])
        elif isinstance(statement, ast.Try):
            again = copy.copy(statement)
            again.body = rest
            again.handlers = [_reraises_unplanned(statement), *statement.handlers]
            handlers = self._leaving(statement).handlers
            for handler in handlers:
                handler.body = [*handler.body, leave]
            entered.handlers = [_reraises_unplanned(statement), *handlers]
            rest = [again]
        elif isinstance(statement, ast.With):
            if place in self.where.entered:
                within = copy.copy(statement)
                within.body = rest
                rest = [within]
            return [entered, leave], rest  # the leave runs if the ``with`` swallowed an exception
        return [entered], rest

    def _leaving(self, statement: Any) -> Any:
        """Makes ``except`` blocks abandon the sample if they would change state that outlives the call."""
        if not isinstance(statement, ast.Try):
            return statement
        out = copy.copy(statement)
        out.handlers = [copy.copy(handler) for handler in statement.handlers]
        for handler in out.handlers:
            if any(syntax.changes_state(x, self._own) or syntax.sets_something(x, self._own) for x in handler.body):
                handler.body = [_leave(handler.body[0])]
        return out

    def _pack(self, at: ast.stmt, inner: ast.expr | None) -> ast.stmt:
        """``return _stoker.pack(locals(), inner)``"""
        values = ast.Call(ast.Name("locals", ast.Load()), [], [])
        out = ast.Return(helper_call("pack", values, inner or ast.Constant(None)))
        out.packs = True  # type: ignore[attr-defined]
        return ast.copy_location(out, at)

    def _inside(self, statement: ast.stmt) -> tuple[list[ast.stmt], ast.stmt]:
        """Cuts inside a statement: everything evaluated before the call goes into temporary variables."""
        root = syntax.root_of(statement)
        target = list(syntax.calls_in(root))[self.where.call or 0]
        hoisted: list[ast.stmt] = []
        changed: Any = copy.copy(statement)
        changed.value = self._hoist(root, target, hoisted)
        if not self.where.inside:
            return [*hoisted, self._pack(statement, None)], changed
        function, args, keywords = _as_call(target)
        inner = helper_call("head", function, *args)
        inner.keywords = keywords
        return [*hoisted, self._pack(statement, ast.copy_location(inner, target))], changed

    def _hoist(self, node: Any, target: ast.Call | ast.Subscript, hoisted: list[ast.stmt]) -> Any:
        """Copies an expression, moving everything evaluated before the target into temporary variables."""
        if node is target and self.where.inside:
            return ast.copy_location(self._in_place_of(target), target)
        new = syntax.shallow_copy(node)
        for holder, key, child in syntax.operand_places(new):
            holds_target = any(x is target for x in ast.walk(child))
            made = self._hoist(child, target, hoisted) if holds_target else self._temporary(child, hoisted)
            syntax.put(holder, key, made)
            if holds_target:
                break
        return new

    def _temporary(self, node: Any, hoisted: list[ast.stmt]) -> Any:
        """Returns the name of a new variable with the expression's value; leaves look-ups without calls unchanged."""
        is_method = isinstance(node, ast.Attribute) and not syntax.is_chain(node)  # the object it is bound to is stored
        if is_method or isinstance(node, (ast.keyword, ast.Starred, ast.FormattedValue)):
            new = copy.copy(node)
            new.value = self._temporary(node.value, hoisted)
            return new
        if not isinstance(node, ast.expr) or isinstance(node, ast.Slice) or syntax.is_chain(node, self.where.plain):
            return node
        name = f"{TEMPORARY}{len(hoisted)}"
        hoisted.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], node), node))
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def _in_place_of(self, target: ast.Call | ast.Subscript) -> ast.expr:
        """Replacement for the call in the tail: runs its rest, with the arguments that can be passed again."""
        function, args, keywords = _as_call(target)
        values: list[tuple[int | str, ast.expr]] = []
        if isinstance(target, ast.Call):
            values += enumerate(itertools.takewhile(lambda x: not isinstance(x, ast.Starred), args))
        values += [(k.arg, k.value) for k in keywords if k.arg is not None]
        passed = []
        for key, value in values:
            looked_up = syntax.is_chain(value, self.where.plain) and not isinstance(value, ast.Constant)
            if looked_up and syntax.names_read([value]) <= self.passed:
                self.repeatable.append(key)
                passed.append(value)
        return helper_call("tail", function, ast.Tuple(passed, ast.Load()), ast.Name(STATE, ast.Load()))


def _leave(at: ast.stmt) -> ast.stmt:
    """``_stoker.unplanned()``"""
    return ast.copy_location(ast.Expr(helper_call("unplanned")), at)


def _as_call(target: ast.Call | ast.Subscript) -> tuple[ast.expr, list[ast.expr], list[ast.keyword]]:
    """Function, arguments and keywords of a call; ``x[i]`` is ``x.__getitem__(i)``."""
    if isinstance(target, ast.Call):
        return target.func, target.args, target.keywords
    return ast.Attribute(target.value, "__getitem__", ast.Load()), [target.slice], []


def _looked_up_again(
    cutter: _Cutter, head: list[ast.stmt], rest: list[ast.stmt], once: set[str], params: set[str]
) -> list[ast.stmt]:
    """Head statements that the tail repeats instead of storing their results: look-ups without calls, imports, nested
    function definitions, files opened on first use. ``once``: variables bound once."""
    where, known, found = cutter.where, cutter.passed | (once & params), []

    def is_repeated(statement: ast.stmt) -> bool:
        bound = syntax.names_bound([statement])
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
            return bound <= once
        if any(syntax.is_setup(statement, first) or syntax.is_reset(statement, first) for first in cutter.passed):
            return True
        if not isinstance(statement, ast.Assign):
            return False
        if not bound <= once or not all(isinstance(t, (ast.Name, ast.Tuple)) for t in statement.targets):
            return False
        looks_up = syntax.is_chain(statement.value, where.plain) and not isinstance(statement.value, ast.Constant)
        return looks_up and syntax.names_read([statement.value]) & cutter.locals <= known

    def collect(block: list[ast.stmt]) -> None:
        for statement in block:
            if is_repeated(statement):
                found.append(copy.deepcopy(statement))
                known.update(syntax.names_bound([statement]))
            elif id(statement) in cutter.entered:
                collect(getattr(statement, cutter.entered[id(statement)]))

    collect(head)
    needed, out = syntax.names_read(rest), []
    for statement in reversed(found):
        bound = syntax.names_bound([statement])
        if not bound or bound & needed:
            out.append(statement)
            needed |= syntax.names_read([statement])
    return out[::-1]


def _reraises_unplanned(statement: ast.stmt) -> ast.ExceptHandler:
    """``except _stoker.Unplanned: raise``, because the user's bare ``except`` must not catch it."""
    kind = ast.Attribute(ast.Name(HELPER, ast.Load()), "Unplanned", ast.Load())
    return ast.copy_location(ast.ExceptHandler(kind, None, [ast.copy_location(ast.Raise(), statement)]), statement)
