"""List comprehensions of one item, written as statements: a cut can then lie inside what they call."""

from __future__ import annotations

import ast
import copy
import types
from typing import Any

from .recompile import helper_call
from .source import Function, tree_of
from .syntax import calls_and_lists, places_of_operands, root_of


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


def _replaced(node: Any, old: ast.AST, new: ast.AST) -> Any:
    """A copy of an expression with one of its nodes replaced."""
    if node is old:
        return new
    out = copy.copy(node)
    for holder, key, child in places_of_operands(out):
        made = _replaced(child, old, new)
        if isinstance(holder, list):
            holder[key] = made
        else:
            setattr(holder, key, made)
    return out
