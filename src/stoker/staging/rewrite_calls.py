"""Rewrites the calls of a function: each is reported, or some are answered from memory.

Unlike a cut, this reaches calls in loops, comprehensions and branches. A call is known by its number among all calls of
the function, in the order of the syntax tree.
"""

from __future__ import annotations

import ast
import copy
import types

from .recompile import compiled_like, constant, helper_call
from .source import NoSource, tree_of
from .syntax import FRAME_READERS, first_param, names_bound, params_of

SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
INLINE = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)  # must run in the function's own frame


def surveyed(fn: types.FunctionType, bound: bool) -> types.FunctionType:
    """A copy in which every call is ``_stoker.visit(number, lambda: _stoker.call(number, f, ...), names, values)``.

    ``names`` and ``values`` are of the local variables that the call mentions, without ``self``.

    Raises:
        NoSource: there is no source, or it is a generator or coroutine.
    """
    return _rewritten(fn, bound, None, {})


def memoised(
    fn: types.FunctionType, bound: bool, kept: set[int], by_args: set[int], entered: set[int]
) -> types.FunctionType:
    """A copy in which some calls are replaced.

    Args:
        fn: any Python function.
        bound: it is called as a method.
        kept: calls that become ``_stoker.keep(number, lambda: call, values)``, with the local variables they mention.
        by_args: calls that become ``_stoker.keep_call(f, ...)``.
        entered: calls that become ``_stoker.enter(number, f, ...)``: their functions are rewritten themselves.

    Raises:
        NoSource: as ``surveyed``.
    """
    return _rewritten(fn, bound, kept, dict.fromkeys(entered, "enter") | dict.fromkeys(by_args, "keep_call"))


def _rewritten(
    fn: types.FunctionType, bound: bool, kept: set[int] | None, called: dict[int, str]
) -> types.FunctionType:
    function = tree_of(fn)
    tree = copy.deepcopy(function.tree)
    if any(isinstance(x, (ast.Yield, ast.YieldFrom, ast.Await)) for x in ast.walk(tree)):
        raise NoSource(f"{tree.name} is a generator or a coroutine")
    numbers = {id(x): n for n, x in enumerate(x for x in ast.walk(tree) if isinstance(x, ast.Call))}
    locals_ = names_bound(tree) | set(params_of(tree)) | set(fn.__code__.co_freevars)
    locals_ -= {first_param(tree, bound), "__class__"}
    rewriter = _Rewriter(numbers, locals_, kept, called)
    tree.body = [rewriter.visit(statement) for statement in tree.body]
    (made,) = compiled_like(fn, function, [(tree, True)])
    return made


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self, numbers: dict[int, int], locals_: set[str], kept: set[int] | None, called: dict[int, str]
    ) -> None:
        self._numbers, self._locals, self._kept, self._called = numbers, locals_, kept, called

    def visit_Call(self, node: ast.Call) -> ast.AST:
        number = self._numbers[id(node)]
        names = self._mentioned(node)
        wanted = self._kept is None or number in self._kept or number in self._called
        frame = isinstance(node.func, ast.Name) and node.func.id in FRAME_READERS
        super_call = any(isinstance(x, ast.Name) and x.id in FRAME_READERS for x in ast.walk(node))
        inline = any(isinstance(x, INLINE) for x in ast.walk(node))
        self.generic_visit(node)
        if not wanted or frame or inline or super_call:
            return node
        if number in self._called:
            return ast.copy_location(_called(self._called[number], number, node), node)
        if names is None:
            return node if self._kept is not None else ast.copy_location(_called("call", number, node), node)
        made: ast.expr = node if self._kept is not None else ast.copy_location(_called("call", number, node), node)
        thunk = ast.Lambda(ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]), made)
        values = ast.Tuple([ast.Name(n, ast.Load()) for n in names], ast.Load())
        method = "visit" if self._kept is None else "keep"
        return ast.copy_location(helper_call(method, constant(number), thunk, values), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # its calls are its own

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def _mentioned(self, node: ast.Call) -> list[str] | None:
        """Local variables that a call reads; None where it binds variables of its own."""
        if any(isinstance(x, SCOPES) for x in ast.walk(node)):
            return None
        return sorted({x.id for x in ast.walk(node) if isinstance(x, ast.Name) and x.id in self._locals})


def _called(method: str, number: int, node: ast.Call) -> ast.Call:
    out = helper_call(method, constant(number), node.func, *node.args)
    out.keywords = node.keywords
    return out


def calls_around(fn: types.FunctionType) -> dict[int, tuple[set[int], str, int]]:
    """For each call of a function: the numbers of the calls around it, its source, and its line. For a call of
    ``self.load(j)`` the source begins with "self.load("."""
    tree = tree_of(fn).tree
    numbers = {id(x): n for n, x in enumerate(x for x in ast.walk(tree) if isinstance(x, ast.Call))}
    out: dict[int, tuple[set[int], str, int]] = {}

    def walk(node: ast.AST, around: set[int]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                number = numbers[id(child)]
                out[number] = around, ast.unparse(child), child.lineno
                walk(child, around | {number})
            else:
                walk(child, around)

    walk(tree, set())
    return out
