"""The syntax tree of a Python function, read from its file and checked against the code that runs; and functions from
changed trees, with the globals, closure, file, names and line numbers of the original, so that tracebacks, warnings and
breakpoints point to the user's source."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import linecache
import os
import types
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from ..core.garbage import no_collection
from ..core.marked_code import original
from .branches import SCOPE, compile_with_marks
from .users_code import codes_of

HELPER = "_stoker"  # name under which rewritten code finds the object that it reports to
Place: TypeAlias = tuple[str, int]  # a function's name and first line
Constant: TypeAlias = "str | int | tuple[Constant, ...] | None"


class NoSource(Exception):
    """A function cannot be rewritten: its source is missing, ambiguous, or differs from the code that runs."""


class Function(NamedTuple):
    """A function's syntax tree."""

    tree: ast.FunctionDef  # its definition, with the line numbers of its file
    owner: str  # name of the enclosing class, used to mangle private names; "" outside classes


def tree_of(fn: types.FunctionType) -> Function:
    """Returns the definition of a function. Raises NoSource: there is none, or the file changed since the import."""
    return tree_of_code(fn.__code__)


def tree_of_code(code: types.CodeType) -> Function:
    """Returns the definition from which a code object was compiled. See ``tree_of``."""
    code = original(code)
    return _tree_of(code, code.co_filename)  # keyed by file too: code of another file may be equal


def known_tree(code: types.CodeType) -> ast.FunctionDef | None:
    """``tree_of_code`` without the class; None if there is no source."""
    try:
        return tree_of_code(code).tree
    except NoSource:
        return None


def lambda_of(code: types.CodeType) -> ast.Lambda:
    """Returns the definition of a lambda. Raises NoSource as ``tree_of`` does."""
    lines = tuple(linecache.getlines(code.co_filename))
    _, codes = _parsed(code.co_filename, lines)
    where = f"a lambda ({code.co_filename}:{code.co_firstlineno})"
    if not any(equal_code(code, other) for other in codes.get((code.co_name, code.co_firstlineno), [])):
        raise NoSource(f"{where} has no source")
    with no_collection():
        module = ast.parse("".join(lines), code.co_filename)
    found = [x for x in ast.walk(module) if isinstance(x, ast.Lambda) and x.lineno == code.co_firstlineno]
    if len(found) > 1 and hasattr(code, "co_positions"):  # Python 3.11
        places = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
        found = [x for x in found if places and all(_lies_in(place, x.body) for place in places)]
    if len(found) != 1:
        raise NoSource(f"several lambdas begin on the line of {where}")
    return found[0]


def _as_definition(x: ast.Lambda, name: str) -> Function:
    """A function definition equivalent to a lambda."""
    body = ast.copy_location(ast.Return(x.body), x.body)
    return Function(ast.fix_missing_locations(ast.copy_location(ast.FunctionDef(name, x.args, [body], []), x)), "")


def _lies_in(place: tuple[int, int], x: ast.expr) -> bool:
    return (x.lineno, x.col_offset) <= place < (x.end_lineno or 0, x.end_col_offset or 0)


def parse_ahead(files: Iterable[str]) -> None:
    """Parses files in advance for processes forked later: 8 ms for a file of 1,000 lines."""
    for file in files:
        _parsed(file, tuple(linecache.getlines(file)))


@functools.lru_cache(maxsize=512)
def _tree_of(code: types.CodeType, file: str) -> Function:
    if code.co_name == "<lambda>":
        return _as_definition(lambda_of(code), code.co_name)
    defined, codes = _parsed(code.co_filename, tuple(linecache.getlines(code.co_filename)))
    key = code.co_name, code.co_firstlineno
    found = defined.get(key, [])
    where = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    if len(found) != 1:
        raise NoSource(f"{where} has no source" if not found else f"several functions begin at {where}")
    if not any(equal_code(code, other) for other in codes.get(key, [])):
        raise NoSource(
            f"the source of {where} differs from the code that runs: the file changed, or its code was rewritten"
        )
    return found[0]


@functools.lru_cache(maxsize=64)
def _parsed(name: str, lines: tuple[str, ...]) -> tuple[dict[Place, list[Function]], dict[Place, list[types.CodeType]]]:
    """All function definitions in a file and their code objects, by name and first line."""
    defined: dict[Place, list[Function]] = {}
    codes: dict[Place, list[types.CodeType]] = {}
    try:
        with no_collection():
            module = ast.parse("".join(lines), name)
            compiled = [compile(module, name, "exec", dont_inherit=True)]
            if not os.path.exists(name):
                # A notebook cell: IPython compiles each statement separately, and calls of names that the cell imports
                # then compile to different instructions.
                alone = (ast.Module([statement], []) for statement in module.body)
                compiled += [compile(each, name, "exec", dont_inherit=True) for each in alone]
    except (SyntaxError, ValueError):
        return defined, codes
    for tree, owner in _definitions(module, ""):
        first = min([tree.lineno, *(d.lineno for d in tree.decorator_list)])
        defined.setdefault((tree.name, first), []).append(Function(tree, owner))
    for code in itertools.chain.from_iterable(map(codes_of, compiled)):
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
    return defined, codes


def _definitions(node: ast.AST, owner: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue  # expressions contain no definitions, and most of a file is expressions
        if isinstance(child, ast.FunctionDef):
            yield child, owner
        yield from _definitions(child, child.name if isinstance(child, ast.ClassDef) else owner)


def equal_code(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether instructions, names and constants are the same."""
    if (a.co_code, a.co_names, a.co_varnames, a.co_freevars) != (b.co_code, b.co_names, b.co_varnames, b.co_freevars):
        return False
    if len(a.co_consts) != len(b.co_consts):
        return False
    pairs = zip(a.co_consts, b.co_consts, strict=True)
    return all(
        equal_code(x, y) if isinstance(x, types.CodeType) and isinstance(y, types.CodeType) else repr(x) == repr(y)
        for x, y in pairs
    )


# -- functions from trees


def helper_call(method: str, *args: ast.expr) -> ast.Call:
    """``_stoker.method(args)``."""
    called = ast.Attribute(ast.Name(HELPER, ast.Load()), method, ast.Load())
    return ast.Call(called, list(args), [])


def constant(value: Constant) -> ast.expr:
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
