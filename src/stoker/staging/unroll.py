"""List comprehensions of one item, written as statements: a cut can then lie inside what they call."""

from __future__ import annotations

import ast
import copy
import types

from .recompile import helper_call
from .source import Function, tree_of
from .syntax import calls_and_lists, root_of


def tree_for(fn: types.FunctionType, unrolled: bool) -> Function:
    """A copy of a function's tree, on request with its list comprehensions unrolled.

    Raises:
        NoSource: see ``tree_of``.
    """
    function = tree_of(fn)
    tree = copy.deepcopy(function.tree)
    if unrolled:
        tree.body = [made for k, statement in enumerate(tree.body) for made in _unroll(statement, k)]
    return function._replace(tree=tree)


def has_unrollable(fn: types.FunctionType) -> bool:
    """Whether unrolling would change a function."""
    return any(_is_unrollable(x) for statement in tree_of(fn).tree.body for x in ast.walk(statement))


def _is_unrollable(node: ast.AST) -> bool:
    if not isinstance(node, ast.ListComp) or len(node.generators) != 1:
        return False
    loop = node.generators[0]
    return isinstance(loop.target, ast.Name) and not loop.ifs and not loop.is_async


def _unroll(statement: ast.stmt, number: int) -> list[ast.stmt]:
    """``x = [f(i) for i in items]`` for one item: ``i = _stoker.only(items); v = f(i); x = [v]``.

    Transforms that are called with a batch of one sample are written so: a cut can then lie inside ``f``. Only in
    simple statements, and where nothing with a side effect is evaluated before the list.
    """
    root = root_of(statement)
    loop = next(iter(calls_and_lists(root)), None)
    if not isinstance(loop, ast.ListComp) or not _is_unrollable(loop):
        return [statement]
    item, value = f"_stoker_item{number}", f"_stoker_value{number}"
    each = loop.generators[0]
    for x in ast.walk(loop.elt):
        if isinstance(x, ast.Name) and isinstance(each.target, ast.Name) and x.id == each.target.id:
            x.id = item
    only = ast.Assign([ast.Name(item, ast.Store())], helper_call("only", each.iter))
    made = ast.Assign([ast.Name(value, ast.Store())], loop.elt)

    class InPlace(ast.NodeTransformer):
        def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
            one = ast.List([ast.Name(value, ast.Load())], ast.Load())
            return ast.copy_location(one, node) if node is loop else node

    return [ast.copy_location(only, loop), ast.copy_location(made, loop), InPlace().visit(statement)]
