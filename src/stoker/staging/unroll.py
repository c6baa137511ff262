"""Rewrites loops over transforms, list comprehensions over one item, and decorators' ``*args``, so that a cut can lie
inside what they call."""

from __future__ import annotations

import ast
import copy
import re
import types

from .source import Function, helper_call, tree_of
from .syntax import FRAME_READERS, bound_once, calls_and_lists, params_of, root_of

SELF = "_stoker_self"


def tree_for(fn: types.FunctionType, unrolled: bool, named: bool = False) -> Function:
    """Copies a function's tree; on request, unrolls its loops over transforms and its list comprehensions. ``named``:
    gives ``self`` a name if it is only the first of ``*args``. Raises NoSource; see ``tree_of``."""
    function = tree_of(fn)
    tree = copy.deepcopy(function.tree)
    if named:
        _name_self(tree)
    if unrolled:
        _LoopsAsCalls(tree).visit(tree)
        tree.body = [made for k, statement in enumerate(tree.body) for made in _unroll(statement, k)]
    return function._replace(tree=tree)


def _name_self(tree: ast.FunctionDef) -> None:
    """Gives ``self`` a name: ``wrapper(*args): return fn(*args)`` takes and passes ``self, *args``."""
    name = "" if tree.args.vararg is None else tree.args.vararg.arg
    if tree.args.posonlyargs or tree.args.args or name not in bound_once(tree.body, params_of(tree)):
        return
    if any(isinstance(x, ast.Name) and x.id in FRAME_READERS for x in ast.walk(tree)):
        return

    class Named(ast.NodeTransformer):
        def visit_Starred(self, node: ast.Starred) -> ast.AST | list[ast.expr]:
            if not isinstance(node.value, ast.Name) or node.value.id != name:
                return self.generic_visit(node)
            return [ast.copy_location(ast.Name(SELF, ast.Load()), node), node]

        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id != name:
                return node
            first: list[ast.expr] = [ast.Name(SELF, ast.Load()), ast.Starred(node, ast.Load())]
            return ast.copy_location(ast.Tuple(first, ast.Load()), node)

    tree.body = [Named().visit(statement) for statement in tree.body]
    tree.args.args = [ast.arg(SELF)]


def has_unrollable(fn: types.FunctionType) -> bool:
    """Whether unrolling would change a function."""
    tree = tree_of(fn).tree
    return any(_is_unrollable(x) or _is_loop(x, tree) for statement in tree.body for x in ast.walk(statement))


def _is_loop(node: ast.AST, tree: ast.FunctionDef) -> bool:
    """Whether a statement is ``for t in transforms: x = t(x)`` or ``x, y = t(x, y)``, and ``t`` occurs only there."""
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name) or node.orelse or len(node.body) != 1:
        return False
    loop = node.target.id
    made, _, value = ast.unparse(node.body[0]).partition(" = ")
    names = made.strip("()")  # "x, y"; Python 3.10 unparses a tuple with parentheses
    if not re.fullmatch(r"\w+(, \w+)*", names) or value != f"{loop}({names})":
        return False
    return sum(isinstance(x, ast.Name) and x.id == loop for x in ast.walk(tree)) == 2


class _LoopsAsCalls(ast.NodeTransformer):
    """Turns ``for t in transforms: x = t(x)`` into ``x = _stoker.loop(transforms)(x)``."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        self._tree = tree
        self._loops = {id(x) for x in ast.walk(tree) if _is_loop(x, tree)}

    def visit_For(self, node: ast.For) -> ast.AST:
        if id(node) not in self._loops:
            return self.generic_visit(node)
        body = node.body[0]
        assert isinstance(body, ast.Assign)
        assert isinstance(body.value, ast.Call)
        body.source = (copy.deepcopy(node), 1)  # type: ignore[attr-defined]
        body.value.func = ast.copy_location(helper_call("loop", node.iter), body.value)
        return body

    def _leave(self, node: ast.AST) -> ast.AST:
        return node if node is not self._tree else self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _leave


def _is_unrollable(node: ast.AST) -> bool:
    if not isinstance(node, ast.ListComp) or len(node.generators) != 1:
        return False
    loop = node.generators[0]
    return isinstance(loop.target, ast.Name) and not loop.ifs and not loop.is_async


def _unroll(statement: ast.stmt, number: int) -> list[ast.stmt]:
    """Turns ``x = [f(i) for i in items]`` with one item into ``i = _stoker.only(items); v = f(i); x = [v]``. Calls of
    transforms on a batch of one sample look like this; a cut can then lie inside ``f``. Only in simple statements, and
    if nothing with a side effect is evaluated before the list."""
    root = root_of(statement)
    loop = next(iter(calls_and_lists(root)), None)
    if not isinstance(loop, ast.ListComp) or not _is_unrollable(loop):
        return [statement]
    source = copy.deepcopy(statement)
    item, value = f"_stoker_item{number}", f"_stoker_value{number}"
    each = loop.generators[0]
    for x in ast.walk(loop.elt):
        if isinstance(x, ast.Name) and isinstance(each.target, ast.Name) and x.id == each.target.id:
            x.id = item
    only = ast.Assign([ast.Name(item, ast.Store())], helper_call("only", each.iter))
    only.source = (source, 3)  # type: ignore[attr-defined]
    made = ast.Assign([ast.Name(value, ast.Store())], loop.elt)

    class InPlace(ast.NodeTransformer):
        def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
            one = ast.List([ast.Name(value, ast.Load())], ast.Load())
            return ast.copy_location(one, node) if node is loop else node

    return [ast.copy_location(only, loop), ast.copy_location(made, loop), InPlace().visit(statement)]


def is_first_of_list(statement: ast.stmt) -> bool:
    """Whether a statement fetches the item of an unrolled list."""
    return getattr(statement, "source", (None, 1))[1] > 1


def as_in_source(block: list[ast.stmt]) -> list[ast.stmt]:
    """Restores the loops in statements that are not cut inside. Lists of other samples may have more items, which the
    second part would discover too late to make the sample as a whole."""

    class Loops(ast.NodeTransformer):
        def visit_Assign(self, node: ast.Assign) -> object:
            return getattr(node, "source", (node, 1))[0]

    out: list[ast.stmt] = []
    skipped = 0
    for statement in block:
        if skipped:
            skipped -= 1
            continue
        if is_first_of_list(statement):
            statement, number = statement.source  # type: ignore[attr-defined]
            skipped = number - 1
        out.append(Loops().visit(statement))
    return out
