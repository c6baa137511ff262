"""Rewrites a function's syntax tree: a probed copy, or two functions that it is cut into.

A *position* is where in a function's body a statement stands: ``(3,)`` is the fourth statement, ``(3, "body", 1)`` the
second one inside it. Blocks that can be entered are ``if``, ``with`` and ``try``; loops are not. Everything keeps the
file name, function name and line numbers of the user's source, so tracebacks, warnings and breakpoints point there.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from .source import Function, NoSource, tree_of

Position = tuple[Any, ...]
HELPER = "_stoker"  # the name under which rewritten code finds the object that it reports to
STATE = "_stoker_state"
MISSING = "_stoker_missing"
TEMPORARY = "_stoker_t"
FRAME_READERS = {"super", "locals", "vars", "dir", "globals", "eval", "exec"}  # depend on the frame that calls them


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
        unsure: those of them that may be unbound.
        again: positions among the arguments of the call in which the cut continues, or their names, that the caller
            can pass again.
        line: of the first statement that runs every time.
    """

    head: types.FunctionType
    tail: types.FunctionType
    stored: tuple[str, ...]
    unsure: tuple[str, ...]
    again: tuple[int | str, ...]
    line: int


# -- walking


def blocks_of(statement: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The blocks of a statement in which a cut may lie."""
    if isinstance(statement, ast.If):
        yield "body", statement.body
        if statement.orelse:
            yield "orelse", statement.orelse
    elif isinstance(statement, ast.With) or (
        isinstance(statement, ast.Try) and not statement.orelse and not statement.finalbody
    ):
        yield "body", statement.body


def root_of(statement: ast.stmt) -> ast.expr | None:
    """The expression of a simple statement, inside which a cut may continue."""
    simple = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
    if not isinstance(statement, simple) or any(isinstance(x, ast.NamedExpr) for x in ast.walk(statement)):
        return None  # what := binds, an operand that is evaluated later than in the source would see
    return statement.value


def calls_in(node: ast.AST | None) -> Iterator[ast.Call | ast.Subscript]:
    """Calls and subscripts in order of evaluation, without those that are evaluated conditionally or repeatedly."""
    if isinstance(node, (ast.BoolOp, ast.IfExp)):
        yield from calls_in(node.values[0] if isinstance(node, ast.BoolOp) else node.test)
        return
    if node is None or isinstance(
        node,
        (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield),
    ):
        return
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        yield from calls_in(node.left)
        return
    for child in _evaluated(node):
        yield from calls_in(child)
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FRAME_READERS):
        yield node
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and not _slices(node.slice):
        yield node


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The operands of a node, in order of evaluation."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield from (x for x in (key, value) if x is not None)
    else:
        yield from (x for x in ast.iter_child_nodes(node) if not isinstance(x, (ast.expr_context, ast.operator)))


def _slices(node: ast.expr) -> bool:
    return any(isinstance(x, ast.Slice) for x in ast.walk(node))


def is_chain(node: ast.AST, plain: frozenset[tuple[int, int]] | None = None) -> bool:
    """A name, its attributes and items: ``self.rows[index]``, a constant, or a tuple of these. Nothing is called.

    Args:
        node: an expression.
        plain: line and column of subscripts that may be in it; None: of any.
    """
    if isinstance(node, (ast.Name, ast.Constant)):
        return True
    if isinstance(node, ast.Attribute):
        return is_chain(node.value, plain) or _is_super(node.value)
    if isinstance(node, ast.Subscript):
        known = plain is None or (node.lineno, node.col_offset) in plain
        return known and is_chain(node.value, plain) and is_chain(node.slice, plain)
    return isinstance(node, (ast.Tuple, ast.List)) and all(is_chain(x, plain) for x in node.elts)


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _is(node.func, "super") and not node.args


def _names(nodes: Any, *contexts: type) -> set[str]:
    """Names that are read in nodes, functions inside them included; or variables that they bind (``ast.Store``)."""
    found = set()
    for node in nodes:
        for x in _in_scope(node) if ast.Store in contexts else ast.walk(node):
            if isinstance(x, ast.Name) and isinstance(x.ctx, contexts):
                found.add(x.id)
            elif isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name) and ast.Load in contexts:
                found.add(x.target.id)
            elif isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.Store in contexts:
                found.add(x.name)
            elif isinstance(x, ast.alias) and ast.Store in contexts:
                found.add((x.asname or x.name).split(".")[0])
            elif (isinstance(x, ast.ExceptHandler) and x.name and ast.Store in contexts) or (
                isinstance(x, (ast.MatchAs, ast.MatchStar)) and x.name and ast.Store in contexts
            ):
                found.add(x.name)
    return found


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes whose names are of the scope that a node stands in: not those of functions, classes and comprehensions
    inside it, but ``:=`` in these."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        for x in ast.walk(node):
            if isinstance(x, ast.NamedExpr):
                yield x.target
        return
    for child in ast.iter_child_nodes(node):
        yield from _in_scope(child)


def names_bound(tree: ast.FunctionDef) -> set[str]:
    """Local variables of a function that are no parameters."""
    return _names(tree.body, ast.Store) - set(params_of(tree))


def read_before_bound(block: list[ast.stmt]) -> set[str]:
    """Variables that a block may read before it has bound them itself."""
    bound: set[str] = set()
    needed: set[str] = set()
    for statement in block:
        needed |= _names([statement], ast.Load, ast.Del) - bound
        if isinstance(statement, ast.Assign):
            bound |= {t.id for t in statement.targets if isinstance(t, ast.Name)}
    return needed


def _bound_once(body: list[ast.stmt], params: list[str]) -> set[str]:
    counts: dict[str, int] = dict.fromkeys(params, 1)
    for node in (x for statement in body for x in ast.walk(statement)):
        names = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            names = [node.id]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.alias)):
            names = list(_names([node], ast.Store)) if isinstance(node, ast.alias) else [node.name]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names = [node.name]
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    return {name for name, n in counts.items() if n == 1}


def params_of(tree: ast.FunctionDef) -> list[str]:
    """Names of all parameters, in the order of a code object's variables."""
    a = tree.args
    named = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return [*named, *(x.arg for x in (a.vararg, a.kwarg) if x is not None)]


def changes_state(statement: ast.stmt, locals_: set[str]) -> str:
    """What a statement itself assigns to that outlives the call: ``self.count``. "" where it does not.

    Args:
        statement: simple, or a loop with all that is in it.
        locals_: local variables that are no parameters.
    """
    for x in ast.walk(statement):
        if isinstance(x, (ast.Global, ast.Nonlocal)):
            return ", ".join(x.names)
        stored = isinstance(x, (ast.Attribute, ast.Subscript)) and isinstance(x.ctx, (ast.Store, ast.Del))
        if stored:
            root: Any = x
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if not (isinstance(root, ast.Name) and root.id in locals_):
                return ast.unparse(x)
    return ""


def is_setup(statement: ast.stmt, first: str) -> bool:
    """``if self.file is None: self.file = ...``: opens something when it is first needed. It is run in both parts."""
    if not isinstance(statement, ast.If) or statement.orelse or not first:
        return False
    tested = {x.attr for x in ast.walk(statement.test) if isinstance(x, ast.Attribute) and _is(x.value, first)}
    tested |= {x.value for x in ast.walk(statement.test) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    for x in statement.body:
        target = x.targets[0] if isinstance(x, ast.Assign) and len(x.targets) == 1 else None
        if not (isinstance(target, ast.Attribute) and _is(target.value, first)):
            return False
        tested |= {target.attr} if tested & {target.attr} else set()
    attributes = {x.targets[0].attr for x in statement.body}  # type: ignore[attr-defined]
    return bool(attributes & tested)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


# -- list comprehensions of one item


def tree_for(fn: types.FunctionType, unrolled: bool) -> Function:
    """A copy of a function's tree, on request with its list comprehensions unrolled.

    Raises:
        NoSource: see ``tree_of``.
    """
    function = tree_of(fn)
    tree = copy.deepcopy(function.tree)
    if unrolled:
        tree.body = unroll(tree.body)
    return function._replace(tree=tree)


def has_unrollable(fn: types.FunctionType) -> bool:
    """Whether ``unroll`` would change a function."""
    return any(_unrollable(x) for statement in tree_of(fn).tree.body for x in ast.walk(statement))


def _unrollable(node: ast.AST) -> bool:
    if not isinstance(node, ast.ListComp) or len(node.generators) != 1:
        return False
    loop = node.generators[0]
    return isinstance(loop.target, ast.Name) and not loop.ifs and not loop.is_async


def unroll(body: list[ast.stmt]) -> list[ast.stmt]:
    """``x = [f(i) for i in items]`` for one item: ``i = _stoker.only(items); v = f(i); x = [v]``.

    Transforms that are called with a batch of one sample are written so: a cut can then lie inside ``f``. Only in
    simple statements, and where nothing with a side effect is evaluated before the list.
    """
    out: list[ast.stmt] = []
    for statement in body:
        found = list(calls_and_lists(root_of(statement)))
        first = found[0] if found else None
        if first is None or not _unrollable(first):
            out.append(statement)
            continue
        assert isinstance(first, ast.ListComp)
        number = len(out)
        item, value = f"_stoker_item{number}", f"_stoker_value{number}"
        loop = first.generators[0]
        assert isinstance(loop.target, ast.Name)
        name = loop.target.id

        class Rename(ast.NodeTransformer):
            def __init__(self, old: str, new: str) -> None:
                self._old, self._new = old, new

            def visit_Name(self, node: ast.Name) -> ast.AST:
                return ast.copy_location(ast.Name(self._new, node.ctx), node) if node.id == self._old else node

        only = ast.Assign([ast.Name(item, ast.Store())], helper_call("only", loop.iter))
        made = ast.Assign([ast.Name(value, ast.Store())], Rename(name, item).visit(first.elt))
        changed = copy.copy(statement)
        one = ast.copy_location(ast.List([ast.Name(value, ast.Load())], ast.Load()), first)
        changed.value = _replaced(root_of(statement), first, one)  # type: ignore[attr-defined]
        out += [ast.copy_location(only, first), ast.copy_location(made, first), changed]
    return out


def calls_and_lists(node: ast.AST | None) -> Iterator[ast.AST]:
    """Calls and list comprehensions of an expression, in order of evaluation; those inside a list's are left out."""
    if node is None:
        return
    if isinstance(node, ast.ListComp):
        yield node
        return
    for child in _evaluated(node):
        yield from calls_and_lists(child)
    if isinstance(node, ast.Call):
        yield node


def _replaced(node: Any, old: ast.AST, new: ast.AST) -> Any:
    """A copy of an expression with one of its nodes replaced."""
    if node is old:
        return new
    out = copy.copy(node)
    for holder, key, child in _children(out):
        made = _replaced(child, old, new)
        if isinstance(holder, list):
            holder[key] = made
        else:
            setattr(holder, key, made)
    return out


# -- building


def helper_call(method: str, *args: ast.expr) -> ast.Call:
    """``_stoker.method(args)``."""
    called = ast.Attribute(ast.Name(HELPER, ast.Load()), method, ast.Load())
    return ast.Call(called, list(args), [])


def constant(value: Any) -> ast.expr:
    """A constant, or a tuple of them."""
    if isinstance(value, tuple):
        return ast.Tuple([constant(v) for v in value], ast.Load())
    return ast.Constant(value)


def first_param(tree: ast.FunctionDef, bound: bool) -> str:
    """``self``, if the function is called as a method; else ""."""
    named = [*tree.args.posonlyargs, *tree.args.args]
    return named[0].arg if bound and named else ""


def probed(fn: types.FunctionType, bound: bool, unrolled: bool = False) -> types.FunctionType:
    """A copy that reports: ``_stoker.at(position)`` before each statement, ``.call`` and ``.item`` in place of calls
    and subscripts, ``.context`` around what a ``with`` enters.

    Args:
        fn: any Python function.
        bound: it is called as a method.
        unrolled: with its list comprehensions unrolled.

    Raises:
        NoSource: see ``tree_of``; a generator or coroutine.
    """
    function = tree_for(fn, unrolled)
    tree = function.tree
    if any(isinstance(x, (ast.Yield, ast.YieldFrom, ast.Await)) for x in _own_nodes(tree)):
        raise NoSource(f"{tree.name} is a generator or a coroutine")
    tree.body = _probe_block(tree.body, (), first_param(tree, bound))
    (made,) = compiled_like(fn, function, [(tree, True)])
    return made


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)


def _probe_block(block: list[ast.stmt], at: Position, first: str) -> list[ast.stmt]:
    out: list[ast.stmt] = []
    for k, statement in enumerate(block):
        position = (*at, k)
        out.append(ast.copy_location(ast.Expr(helper_call("at", constant(position))), statement))
        if not is_setup(statement, first):
            for name, body in blocks_of(statement):
                setattr(statement, name, _probe_block(body, (*position, name), first))
            if isinstance(statement, ast.With):
                for item in statement.items:
                    item.context_expr = helper_call("context", constant(position), item.context_expr)
            _probe_calls(statement, position)
        out.append(statement)
    return out


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


def _probe_calls(statement: ast.stmt, position: Position) -> None:
    """Replaces the calls of a simple statement by calls of the helper."""
    numbers = {id(x): n for n, x in enumerate(calls_in(root_of(statement)))}
    if not numbers:
        return

    class Replace(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST:
            n = numbers.get(id(node))
            super().generic_visit(node)
            if n is None:
                return node
            where: list[ast.expr] = [constant(position), constant(n)]
            if isinstance(node, ast.Call):
                new = helper_call("call", *where, node.func, *node.args)
                new.keywords = node.keywords
            else:
                assert isinstance(node, ast.Subscript)
                place = constant((node.lineno, node.col_offset))
                new = helper_call("item", *where, place, node.value, node.slice)
            return ast.copy_location(new, node)

    root: Any = root_of(statement)
    statement.value = Replace().visit(root)  # type: ignore[attr-defined]


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
    locals_ = {*params, *_names(tree.body, ast.Store)}
    builder = _Cutter(where, locals_, {*params} | context, context, _bound_once(tree.body, params))
    head, rest = builder.block(tree.body, where.position)
    line = rest[0].lineno if rest else tree.body[-1].lineno
    again = builder.repeated(head, rest)
    needed = read_before_bound([*again, *rest])
    made_again = _names(again, ast.Store)
    assigned = {*params, *_names(head, ast.Store)}
    stored = tuple(sorted((assigned & needed) - context - made_again))
    unsure = tuple(name for name in stored if name not in {*params, *builder.surely_bound(head)})
    head_tree = _head_tree(tree, head)
    tail_tree = ast.copy_location(copy.copy(tree), tree)
    tail_tree.args = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(n) for n in ([first] if first else []) + [*where.given, *stored]],
        kwonlyargs=[ast.arg(HELPER), ast.arg(STATE), ast.arg(MISSING)],
        kw_defaults=[None, None, None],
        defaults=[],
    )
    unbound = [ast.copy_location(_unbind(name), (rest or tree.body)[0]) for name in unsure]
    tail_tree.body = [*unbound, *again, *rest] or [ast.Pass()]
    head_fn, tail_fn = compiled_like(fn, function, [(head_tree, True), (tail_tree, False)])
    return Parts(head_fn, tail_fn, stored, unsure, tuple(builder.again), line)


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

    def surely_bound(self, head: list[ast.stmt]) -> set[str]:
        """Variables that are bound whenever the cut is reached."""
        found: set[str] = set()
        for statement in head:
            if id(statement) in self._entered:
                found |= self.surely_bound(getattr(statement, self._entered[id(statement)]))
                if isinstance(statement, ast.With):
                    found |= _names(statement.items, ast.Store)
            elif not isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)):
                found |= {x.id for x in _targets(statement)}
                found |= _names([statement], ast.Store) if isinstance(statement, _BINDS) else set()
        return found - _names(head, ast.Del)

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
        for holder, key, child in _children(new):
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
            if is_chain(value, self._where.plain) and not constant and _names([value], ast.Load) <= self._context:
                self.again.append(key)
                passed.append(value)
        return helper_call("tail", callee, ast.Tuple(passed, ast.Load()), ast.Name(STATE, ast.Load()))

    def repeated(self, head: list[ast.stmt], rest: list[ast.stmt]) -> list[ast.stmt]:
        """Statements of the head that the tail runs again instead of keeping what they gave: look-ups without calls,
        imports, functions defined inside, files opened when first needed."""
        found: list[ast.stmt] = []
        self._collect(head, set(self._known), found)
        needed, out = _names(rest, ast.Load, ast.Del), []
        for statement in reversed(found):
            bound = _names([statement], ast.Store)
            if not bound or bound & needed:
                out.append(statement)
                needed |= _names([statement], ast.Load)
        return out[::-1]

    def _collect(self, block: list[ast.stmt], known: set[str], found: list[ast.stmt]) -> None:
        for statement in block:
            bound = _names([statement], ast.Store)
            if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
                repeats = bound <= self._once
            elif isinstance(statement, ast.Assign):
                flat = all(isinstance(t, (ast.Name, ast.Tuple)) for t in statement.targets)
                local = _names([statement.value], ast.Load) & self._locals
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


_BINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def _targets(statement: ast.stmt) -> Iterator[ast.Name]:
    """Variables that a simple statement assigns to."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign) or (isinstance(statement, ast.AnnAssign) and statement.value):
        targets = [statement.target]
    for target in targets:
        yield from (x for x in ast.walk(target) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))


def _passes_unplanned(statement: ast.stmt) -> ast.ExceptHandler:
    """``except _stoker.Unplanned: raise``: the user's own bare ``except`` must not see it."""
    kind = ast.Attribute(ast.Name(HELPER, ast.Load()), "Unplanned", ast.Load())
    return ast.copy_location(ast.ExceptHandler(kind, None, [ast.copy_location(ast.Raise(), statement)]), statement)


def _children(node: ast.AST) -> list[tuple[Any, Any, ast.AST]]:
    """The operands of a node in order of evaluation, each with the list or node that holds it and its place there.
    Lists are copied first."""
    found: list[tuple[Any, Any, ast.AST]] = []
    for name, value in list(ast.iter_fields(node)):
        if isinstance(value, list):
            items = list(value)
            setattr(node, name, items)
            found += [(items, i, x) for i, x in enumerate(items) if isinstance(x, ast.AST)]
        elif isinstance(value, ast.AST) and not isinstance(value, (ast.expr_context, ast.operator, ast.unaryop)):
            found.append((node, name, value))
    if isinstance(node, ast.Dict):  # a key, its value, the next key
        found.sort(key=lambda child: int(child[1]))
    return found


def compiled_like(
    fn: types.FunctionType, function: Function, trees: list[tuple[ast.FunctionDef, bool]]
) -> list[types.FunctionType]:
    """Functions from trees, with the globals, closure, file and names of the original.

    Args:
        fn: the original.
        function: its tree.
        trees: new definitions; with True one keeps the parameters and defaults, and takes ``_stoker`` besides.
    """
    bodies: list[ast.stmt] = []
    for tree, keeps in trees:
        tree.decorator_list, tree.returns = [], None
        if keeps:
            tree.args = copy.deepcopy(tree.args)
            tree.args.kwonlyargs = [*tree.args.kwonlyargs, ast.arg(HELPER)]
            tree.args.kw_defaults = [*tree.args.kw_defaults, None]
            tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
            tree.args.kw_defaults = [None if d is None else ast.Constant(None) for d in tree.args.kw_defaults]
        bodies.append(tree)
    free = [name for name in fn.__code__.co_freevars if name != "__class__"]
    if function.owner:
        bodies = [ast.ClassDef(function.owner, [], [], bodies, [])]
        if function.owner not in free:  # methods that mention their class mean the global name
            bodies.insert(0, ast.Global([function.owner]))
    outer = ast.FunctionDef(
        "_stoker_scope",
        ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in free], kwonlyargs=[], kw_defaults=[], defaults=[]),
        [*bodies, ast.Pass()],
        [],
    )
    module = ast.Module([outer], [])
    for node in ast.walk(module):
        node.__dict__.pop("packs", None)
    ast.fix_missing_locations(module)
    flags = fn.__code__.co_flags & _FUTURE
    compiled = compile(module, fn.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    codes = [c for c in _nested(compiled) if c.co_name == fn.__code__.co_name and c.co_name != "_stoker_scope"]
    out = []
    for code, (_, keeps) in zip(codes, trees, strict=False):
        empty = tuple(types.CellType() for _ in code.co_freevars)
        out.append(rebound(types.FunctionType(code, fn.__globals__, None, None, empty), fn, keeps))
    return out


def rebound(made: types.FunctionType, fn: types.FunctionType, keeps: bool) -> types.FunctionType:
    """A function made by ``compiled_like``, for another function of the same code: with its closure and globals.

    Args:
        made: what was made.
        fn: the other function.
        keeps: it has the parameters and defaults of the original.
    """
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in made.__code__.co_freevars)
    new = types.FunctionType(made.__code__, fn.__globals__, fn.__name__, fn.__defaults__ if keeps else None, closure)
    new.__kwdefaults__ = dict(fn.__kwdefaults__ or {}) if keeps else None
    new.__qualname__, new.__module__ = fn.__qualname__, fn.__module__
    return new


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Functions of the scope, and of the class in it; not those inside them."""
    for scope in (c for c in code.co_consts if isinstance(c, types.CodeType)):
        inside = [c for c in scope.co_consts if isinstance(c, types.CodeType)]
        for c in inside:
            if c.co_flags & _OPTIMIZED:
                yield c
            else:  # a class body
                yield from (d for d in c.co_consts if isinstance(d, types.CodeType))


_OPTIMIZED = 0x1  # a function's code, and not a class body's (inspect.CO_OPTIMIZED)
_FUTURE = 0x1000000  # from __future__ import annotations (__future__.annotations.compiler_flag)
