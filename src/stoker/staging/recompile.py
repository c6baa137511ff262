"""Compiles functions from changed syntax trees, with the globals, closure, file, names and line numbers of the
original, so that tracebacks, warnings and breakpoints point to the user's source."""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator
from typing import Any

from ..core.garbage import no_collection
from .branches import SCOPE, compile_with_marks
from .source import Function, lambda_of

HELPER = "_stoker"  # name under which rewritten code finds the object that it reports to


def helper_call(method: str, *args: ast.expr) -> ast.Call:
    """``_stoker.method(args)``."""
    called = ast.Attribute(ast.Name(HELPER, ast.Load()), method, ast.Load())
    return ast.Call(called, list(args), [])


def constant(value: Any) -> ast.expr:
    if isinstance(value, tuple):
        return ast.Tuple([constant(v) for v in value], ast.Load())
    return ast.Constant(value)


def compiled_like(
    fn: types.FunctionType, function: Function, trees: list[tuple[ast.FunctionDef, bool]]
) -> list[types.FunctionType]:
    """Compiles functions from trees, with the globals, closure, file and names of the original. ``trees``: definitions,
    each with whether the function keeps its parameters and defaults, and takes ``_stoker``, too."""
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
    outside = function.owner or function.tree.name
    if outside not in free:  # methods that mention their class, and recursive functions, refer to the global name
        bodies.insert(0, ast.Global([outside]))
    outer = ast.FunctionDef(
        SCOPE,
        ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in free], kwonlyargs=[], kw_defaults=[], defaults=[]),
        [*bodies, ast.Pass()],
        [],
    )
    module = ast.Module([outer], [])
    for node in ast.walk(module):
        node.__dict__.pop("packs", None)
    ast.fix_missing_locations(module)
    flags = fn.__code__.co_flags & _FUTURE
    with no_collection():
        compiled = compile_with_marks(module, fn.__code__.co_filename, flags)
    codes = [c for c in _nested(compiled) if c.co_name == fn.__code__.co_name and c.co_name != SCOPE]
    return [rebound(code, fn, keeps) for code, (_, keeps) in zip(codes, trees, strict=False)]


def marked_lambda(code: types.CodeType) -> types.CodeType:
    """Instruments a lambda's code (see ``branches``). Raises NoSource if the lambda is not found in its file."""
    names = [ast.arg(name) for name in code.co_freevars]
    around = ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])
    outer = ast.FunctionDef(SCOPE, around, [ast.Return(copy.deepcopy(lambda_of(code)))], [])
    module = ast.fix_missing_locations(ast.Module([outer], []))
    with no_collection():
        compiled = compile_with_marks(module, code.co_filename, code.co_flags & _FUTURE)
    scope = next(c for c in compiled.co_consts if isinstance(c, types.CodeType))
    return next(c for c in scope.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name)


def rebound(code: types.CodeType, fn: types.FunctionType, keeps: bool) -> types.FunctionType:
    """Returns a function with code made by ``compiled_like``, and the closure and globals of ``fn``. ``keeps``: it has
    the original's parameters and defaults."""
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    new = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__ if keeps else None, closure)
    new.__kwdefaults__ = dict(fn.__kwdefaults__ or {}) if keeps else None
    new.__qualname__, new.__module__ = fn.__qualname__, fn.__module__
    return new


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Functions defined directly in the scope, or in its class."""
    for scope in (c for c in code.co_consts if isinstance(c, types.CodeType)):
        inside = [c for c in scope.co_consts if isinstance(c, types.CodeType)]
        for c in inside:
            if c.co_flags & _OPTIMIZED:
                yield c
            else:  # a class body
                yield from (d for d in c.co_consts if isinstance(d, types.CodeType))


_OPTIMIZED = 0x1  # marks a function's code, as opposed to a class body's (inspect.CO_OPTIMIZED)
_FUTURE = 0x1000000  # from __future__ import annotations (__future__.annotations.compiler_flag)
