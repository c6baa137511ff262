"""Expressions of a function's second part that the first part can evaluate, so that what they read is not kept::

    record = self.file[self.keys[i]]     # a handle, which cannot be kept
    x = smooth(record[:])
    x = crop(x, random.random())         # the cut
    return x, record.attrs["label"]      # evaluated before the cut, where nothing else after it reads ``record``

Another order of evaluation: ``verify`` says whether samples are the same.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection

from .syntax import COMPREHENSIONS, names_bound, names_read, operand_places, shallow_copy

HOISTED = "_stoker_h"  # begins the names of variables that hold their values
_ROOTED = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_STAYS = (ast.Lambda, *COMPREHENSIONS, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Starred, ast.Slice)


def hoist(
    head: list[ast.stmt], rest: list[ast.stmt], stored: Collection[str], known: Collection[str]
) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Both parts, with expressions of ``rest`` put into ``head``, which ends with a statement that packs variables
    (``packs``). ``stored``: variables that would be kept. ``known``: others that both parts have."""
    wanted = set(stored) - names_bound(rest) - set(known)
    while wanted:
        mover = _Mover(wanted, {*wanted, *known}, {*stored, *names_bound(head), *names_bound(rest)})
        changed = [mover.statement(x) for x in rest]
        left = names_read(changed) & wanted
        if not left:
            return _before_pack(head, mover.moved), changed
        wanted -= left
    return head, rest


class _Mover:
    """Moves expressions that read ``wanted`` variables, and of ``locals_`` none but the ``allowed``."""

    def __init__(self, wanted: set[str], allowed: set[str], locals_: set[str]) -> None:
        self.moved: list[ast.stmt] = []
        self._wanted, self._others = wanted, locals_ - allowed

    def statement(self, statement: ast.stmt) -> ast.stmt:
        if not isinstance(statement, _ROOTED) or statement.value is None:
            return statement
        new = copy.copy(statement)
        new.value = self._expression(statement.value)
        return new

    def _expression(self, node: ast.expr) -> ast.expr:
        read = names_read([node])
        if isinstance(node, (ast.Name, *_STAYS)) or not read & self._wanted:
            return node
        if not read & self._others and not any(isinstance(x, _STAYS[:-2]) for x in ast.walk(node)):
            name = f"{HOISTED}{len(self.moved)}"
            self.moved.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], node), node))
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        if isinstance(node, (ast.BoolOp, ast.IfExp)):
            return node  # of which parts are evaluated now and then
        new = shallow_copy(node)
        for holder, key, child in operand_places(new):
            made = self._operand(child)
            if isinstance(holder, list):
                holder[key] = made
            else:
                setattr(holder, key, made)
        return new

    def _operand(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.keyword, ast.FormattedValue)):
            new = copy.copy(node)
            new.value = self._expression(node.value)
            return new
        return self._expression(node) if isinstance(node, ast.expr) else node


def _before_pack(block: list[ast.stmt], moved: list[ast.stmt]) -> list[ast.stmt]:
    """A block with statements in front of the one in it that packs, wherever it stands."""
    out: list[ast.stmt] = []
    for statement in block:
        if getattr(statement, "packs", False):
            out += moved
        new = copy.copy(statement)
        for name in ("body", "orelse", "finalbody"):
            if getattr(statement, name, None) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                setattr(new, name, _before_pack(getattr(statement, name), moved))
        out.append(new)
    return out
