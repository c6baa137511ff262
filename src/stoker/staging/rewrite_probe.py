"""A copy of a function that reports each of its statements and calls to the object that it finds as ``_stoker``."""

from __future__ import annotations

import ast
import types
from typing import Any

from .recompile import compiled_like, constant, helper_call
from .source import NoSource
from .syntax import Position, blocks_of, calls_in, first_param, is_setup, own_nodes, root_of
from .unroll import tree_for


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
    if any(isinstance(x, (ast.Yield, ast.YieldFrom, ast.Await)) for x in own_nodes(tree)):
        raise NoSource(f"{tree.name} is a generator or a coroutine")
    tree.body = _probe_block(tree.body, (), first_param(tree, bound))
    (made,) = compiled_like(fn, function, [(tree, True)])
    return made


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
