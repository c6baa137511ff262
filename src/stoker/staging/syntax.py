"""Questions about the syntax tree of a function: what it binds and reads, which calls it makes in which order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

FRAME_READERS = {"super", "locals", "vars", "dir", "globals", "eval", "exec"}  # depend on the frame that calls them
Position = tuple[Any, ...]


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
    for child in operands(node):
        yield from calls_in(child)
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FRAME_READERS):
        yield node
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and not _slices(node.slice):
        yield node


def calls_and_lists(node: ast.AST | None) -> Iterator[ast.AST]:
    """Calls and list comprehensions of an expression, in order of evaluation; those inside a list's are left out."""
    if node is None:
        return
    if isinstance(node, ast.ListComp):
        yield node
        return
    for child in operands(node):
        yield from calls_and_lists(child)
    if isinstance(node, ast.Call):
        yield node


def operands(node: ast.AST) -> Iterator[ast.AST]:
    """The operands of a node, in order of evaluation."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield from (x for x in (key, value) if x is not None)
    else:
        yield from (x for x in ast.iter_child_nodes(node) if not isinstance(x, (ast.expr_context, ast.operator)))


def places_of_operands(node: ast.AST) -> list[tuple[Any, Any, ast.AST]]:
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
    return isinstance(node, ast.Call) and is_name(node.func, "super") and not node.args


def names_in(nodes: Any, *contexts: type) -> set[str]:
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
    return names_in(tree.body, ast.Store) - set(params_of(tree))


def read_before_bound(block: list[ast.stmt]) -> set[str]:
    """Variables that a block may read before it has bound them itself."""
    bound: set[str] = set()
    needed: set[str] = set()
    for statement in block:
        needed |= names_in([statement], ast.Load, ast.Del) - bound
        if isinstance(statement, ast.Assign):
            bound |= {t.id for t in statement.targets if isinstance(t, ast.Name)}
    return needed


def bound_once(body: list[ast.stmt], params: list[str]) -> set[str]:
    counts: dict[str, int] = dict.fromkeys(params, 1)
    for node in (x for statement in body for x in ast.walk(statement)):
        names = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            names = [node.id]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.alias)):
            names = list(names_in([node], ast.Store)) if isinstance(node, ast.alias) else [node.name]
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


def first_param(tree: ast.FunctionDef, bound: bool) -> str:
    """``self``, if the function is called as a method; else ""."""
    named = [*tree.args.posonlyargs, *tree.args.args]
    return named[0].arg if bound and named else ""


def own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from own_nodes(child)


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
    tested = {x.attr for x in ast.walk(statement.test) if isinstance(x, ast.Attribute) and is_name(x.value, first)}
    tested |= {x.value for x in ast.walk(statement.test) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    for x in statement.body:
        target = x.targets[0] if isinstance(x, ast.Assign) and len(x.targets) == 1 else None
        if not (isinstance(target, ast.Attribute) and is_name(target.value, first)):
            return False
        tested |= {target.attr} if tested & {target.attr} else set()
    attributes = {x.targets[0].attr for x in statement.body}  # type: ignore[attr-defined]
    return bool(attributes & tested)


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
