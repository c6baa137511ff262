"""Branches that a setting disables, such as ``if self.use_cache: self.images[i] = image`` while that is False.

A *setting* is an attribute or global variable that holds a number, a string or None, and that no method but
``__init__`` assigns to. The cached code names it, so a cache starts over when it changes (see ``change_watch``).
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import inspect
import types
from collections.abc import Mapping
from typing import TypeAlias

from .syntax import local_variables, params_of
from .users_code import codes_of

Scope: TypeAlias = Mapping[str, object]  # values of the names in a function: ``self``, and global variables
SETTING = (bool, int, float, str, type(None))
CONSTRUCTORS = ("__init__", "__new__", "__setstate__")
STORE_ATTR = dis.opmap["STORE_ATTR"]
_UNKNOWN = object()


def scope_of(tree: ast.FunctionDef, variables: Scope, first: str, bound: object) -> Scope:
    """Values of names in a function: of ``variables``, the global ones; of ``first`` (``self``; or ""), ``bound``."""
    own = {*params_of(tree), *local_variables(tree)}
    return {k: v for k, v in variables.items() if k not in own} | ({first: bound} if first else {})


def switched_on(statement: ast.stmt, scope: Scope) -> ast.stmt:
    """A statement without its branches that settings currently disable."""
    if not any(isinstance(x, ast.If) for x in ast.walk(statement)):
        return statement
    out = _Branches(scope).visit(copy.deepcopy(statement))
    assert isinstance(out, ast.stmt)
    return out


class _Branches(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def visit_If(self, node: ast.If) -> ast.AST:
        is_on = _truth(node.test, self._scope)
        if is_on is not None:
            off = "orelse" if is_on else "body"
            setattr(node, off, [] if is_on else [ast.copy_location(ast.Pass(), node)])
        return self.generic_visit(node)


def _truth(test: ast.expr, scope: Scope) -> bool | None:
    """Value of a condition if settings alone decide it; else None."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, scope)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        decides = isinstance(test.op, ast.Or)  # a True one decides ``or``, a False one ``and``
        found = [_truth(x, scope) for x in test.values]
        return decides if decides in found else None if None in found else not decides
    if isinstance(test, ast.Compare):
        return _compared(test, scope)
    value = _setting(test, scope)
    return bool(value) if isinstance(value, SETTING) else None


def _compared(test: ast.Compare, scope: Scope) -> bool | None:
    if len(test.ops) > 1:
        return None
    left, right = _setting(test.left, scope), _setting(test.comparators[0], scope)
    if not isinstance(left, SETTING) or not isinstance(right, SETTING):
        return None
    if isinstance(test.ops[0], (ast.Is, ast.Eq)):
        return left == right
    return left != right if isinstance(test.ops[0], (ast.IsNot, ast.NotEq)) else None


def _setting(node: ast.expr, scope: Scope) -> object:
    """Value of a constant, a name, or a chain of attributes, without running user code."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _UNKNOWN if _is_rebound(node.id, scope) else scope.get(node.id, _UNKNOWN)
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    holder = _setting(node.value, scope)
    if holder is _UNKNOWN or _is_assigned(holder, node.attr):
        return _UNKNOWN
    value = inspect.getattr_static(holder, node.attr, _UNKNOWN)
    return _UNKNOWN if hasattr(type(value), "__get__") else value


def _is_rebound(name: str, scope: Scope) -> bool:
    """Whether another function in the module assigns to a global variable."""
    functions = (x for x in scope.values() if isinstance(x, types.FunctionType))
    return any(
        op.opname == "STORE_GLOBAL" and op.argval == name
        for fn in functions
        if name in fn.__code__.co_names
        for op in dis.get_instructions(fn.__code__)
    )


def _is_assigned(holder: object, name: str) -> bool:
    """Whether a method other than the constructor assigns to an attribute of an object."""
    methods = ((key, fn) for c in type(holder).__mro__ for key, fn in vars(c).items())
    functions = (fn for key, fn in methods if isinstance(fn, types.FunctionType) and key not in CONSTRUCTORS)
    return any(name in names_stored(code) for fn in functions for code in codes_of(fn.__code__))


@functools.lru_cache(maxsize=4096)
def names_stored(code: types.CodeType) -> frozenset[str]:
    """Names of attributes that a function assigns to."""
    if STORE_ATTR not in code.co_code[::2]:  # disassembling takes 0.1 ms per function
        return frozenset()
    return frozenset(op.argval for op in dis.get_instructions(code) if op.opname == "STORE_ATTR")
