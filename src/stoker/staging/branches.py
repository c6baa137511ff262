"""Records which branches of the user's code a sample takes.

A trial makes only a few samples, but a dataset may treat one class in a hundred differently. So the user's functions
are instrumented: each branch records that it ran. A sample that took an unvetted branch is made again under different
conditions (see ``Filler``) before it may be stored.

::

    if label == 7:                       if label == 7:
        x = self.noise(x)                    mark(12)
                                             x = self.noise(x)

Such a call may take as long as the rest of a loop's body. So a branch within a loop sets a local variable, and the
function marks it when it ends::

    _stoker_12 = False
    try:
        for end in range(n, start, -1):
            _stoker_12 = True
            ...
    finally:
        if _stoker_12:
            mark(12)

A generator expression cannot set a local variable. Its first condition runs as soon as there is an item, so the
first item is marked::

    "".join(c for c in text if category(c) != "Mn")
    "".join(c for c in marks_first(12, text) if category(c) != "Mn")

Data decide without a branch where they hold what is called, or a seed that may be None::

    self.makers[kind](path)              marks_callee(13, self.makers[kind])(path)
    np.random.default_rng(self.seed[i])  np.random.default_rng(marks_none(14, self.seed[i]))

A function's code is replaced in place (``fn.__code__``): the function object stays the same, and tracebacks show the
same lines. Library functions are not instrumented.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import itertools
import mmap
import random
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch

from .library_objects import Held

T = TypeVar("T", bound=ast.AST)
Comprehension = TypeVar("Comprehension", bound=ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)

MOST = 1 << 14  # branches of all functions together
# Numbers of what data choose to call. It may be called first in any process, so its number is a hash of its name.
CALLEES, MOST_CALLEES = MOST + 2, 1 << 20

_ran: set[int] = set()  # numbers of the branches that ran since ``begin``
_numbers: dict[tuple[object, ...], int] = {}  # branch number by place in the source
# A placeholder for ``_ran.add``, the fastest call that there is: a tokenizer in Python takes a branch for each letter.
_MARK = "\0stoker-mark"
_FIRST = "\0stoker-first"  # placeholders for ``_marks_first``, ``_marks_callee`` and ``_marks_none``
_CALLEE, _NONE = "\0stoker-callee", "\0stoker-none"
# what takes system entropy where its seed is None
SEEDED = {"default_rng", "Random", "RandomState", "SeedSequence", "seed"}
SEEDED |= {"PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"}
KINDS: tuple[type, ...] = (int, np.int64, np.int32, str, torch.Tensor, tuple, list)  # index types
SCOPE = "_stoker_scope"  # function around the code to be compiled
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
FLAG = "_stoker_branch_"  # local variables of these names tell which branches within loops ran
# a function that mentions one of these might see the flags
LOOKS_AT_LOCALS = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}
YIELDS = (ast.Yield, ast.YieldFrom, ast.Await)


def begin() -> None:
    """Marks all branches as not run."""
    _ran.clear()


def taken() -> frozenset[int]:
    """Numbers of the branches that ran since ``begin``."""
    return frozenset(_ran)


def restore(numbers: frozenset[int]) -> None:
    """Adds branches that ran."""
    _ran.update(numbers)


class Vetted:
    """Branches vetted for one dataset; shared with forked workers."""

    UNKNOWN, SAME, DIFFERS = range(3)

    def __init__(self) -> None:
        self._made = mmap.mmap(-1, CALLEES + MOST_CALLEES)

    def __reduce__(self) -> tuple[type[Vetted], tuple[()]]:
        return Vetted, ()  # branch numbers differ in a process that was not forked

    def is_kind(self, indices: Iterable[object]) -> bool:
        """Whether all indices have the one type for which samples are cached: ``dataset[np.int64(3)]`` may differ from
        ``dataset[3]``. The first batch decides."""
        kinds = set(map(type, indices))
        if not kinds:
            return True
        if len(kinds) > 1:
            return False
        kind = KINDS.index(kinds.pop()) + 1 if next(iter(kinds)) in KINDS else len(KINDS) + 1
        if not self._made[MOST]:
            self._made[MOST] = kind
        return self._made[MOST] == kind

    @property
    def has_effects(self) -> bool:
        """Whether a branch was found that changes what other samples may read, so that their order counts."""
        return bool(self._made[MOST + 1])

    def note_effects(self) -> None:
        self._made[MOST + 1] = 1

    def new(self, numbers: frozenset[int]) -> list[int]:
        """Numbers of branches that ran but were not vetted, or must not be taken."""
        return [k for k in numbers if self._made[k] != self.SAME]

    def may_not(self, numbers: Iterable[int]) -> bool:
        """Whether samples that take one of these branches must never be cached."""
        return any(self._made[k] == self.DIFFERS for k in numbers)

    def note(self, numbers: Iterable[int], is_same: bool) -> None:
        for k in numbers:
            if self._made[k] != self.DIFFERS:
                self._made[k] = self.SAME if is_same else self.DIFFERS


def bind(code: types.CodeType) -> types.CodeType:
    """Makes the marks of compiled code add to the set that ``taken`` reads."""
    constants = tuple(
        bind(c) if isinstance(c, types.CodeType) else _CALLED.get(c, c) if isinstance(c, str) else c
        for c in code.co_consts
    )
    return code.replace(co_consts=constants)


def _marks_first(number: int, items: Iterable[object]) -> Iterable[object]:
    """An iterator over ``items`` that marks a branch at the first one. The others come at the speed of C."""
    if not any(hasattr(type(items), name) for name in ("__iter__", "__getitem__")):
        return items  # the user's line raises the error
    rest = iter(items)
    return itertools.chain(_first(number, rest), rest)


def _first(number: int, items: Iterator[object]) -> Iterator[object]:
    for item in items:
        _ran.add(number)
        yield item
        return


def _marks_callee(number: int, called: Held) -> Held:
    """Marks a branch for each function or class that is called, and returns it. Runs no code of the user's objects."""
    fn, kind = called, type(called)
    while kind in WRAPPERS:
        fn = getattr(fn, WRAPPERS[kind])
        kind = type(fn)
    if kind in NATIVE:
        place = number, kind.__name__, fn.__name__, str(getattr(fn, "__module__", ""))
    else:
        place = number, kind.__name__, _name_of(fn if issubclass(kind, type) else kind), ""
    if place not in _callees:
        _callees[place] = CALLEES + zlib.crc32(repr((_sites[number], place[1:])).encode()) % MOST_CALLEES
    _ran.add(_callees[place])
    return called


def _marks_none(number: int, seed: object) -> object:
    if seed is None:
        _ran.add(number)
    return seed


_CALLED = {_MARK: _ran.add, _FIRST: _marks_first, _CALLEE: _marks_callee, _NONE: _marks_none}


WRAPPERS: dict[type, str] = {functools.partial: "func", types.MethodType: "__func__"}
NATIVE = {types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType}
NATIVE |= {types.MethodWrapperType, types.ClassMethodDescriptorType, np.ufunc, type(np.random.default_rng)}
NATIVE |= {type(np.mean), type(random.random), type(random.SystemRandom.random)}
_name_of: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_callees: dict[tuple[int, str, str, str], int] = {}
_sites: dict[int, tuple[object, ...]] = {}  # places in the source of calls by data, by number


def compile_with_marks(module: ast.Module, file: str, flags: int) -> types.CodeType:
    """Compiles a syntax tree, instrumented so that each branch records that it ran."""
    marked = ast.fix_missing_locations(_Marker(file).visit(module))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a string is "called" until ``bind``
        return bind(compile(marked, file, "exec", flags=flags, dont_inherit=True))


class _Scope:
    """A function being instrumented."""

    def __init__(self, may_flag: bool) -> None:
        self.may_flag = may_flag
        self.loops = 0  # number of loops around the node being visited
        self.flags: dict[int, None] = {}  # branches that set a local variable
        self.chosen: set[str] = set()  # local variables with items of containers, or results of calls


class _Marker(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._file = file
        self._scope = _Scope(False)

    def _number(self, node: ast.AST, kind: str) -> int:
        place = self._file, getattr(node, "lineno", 0), getattr(node, "col_offset", 0), kind
        return MOST - 1 if len(_numbers) >= MOST else _numbers.setdefault(place, len(_numbers))

    def _new_flag(self, node: ast.AST, kind: str) -> ast.Name | None:
        """The local variable that a branch sets; None if it marks itself."""
        if not self._scope.loops or not self._scope.may_flag:
            return None
        number = self._number(node, kind)
        self._scope.flags[number] = None
        return ast.Name(f"{FLAG}{number}", ast.Store())

    def _mark(self, node: ast.AST, kind: str) -> ast.stmt:
        flag = self._new_flag(node, kind)
        mark = ast.Assign([flag], ast.Constant(True)) if flag else ast.Expr(_call(self._number(node, kind)))
        return ast.copy_location(mark, node)

    def _block(self, body: list[ast.stmt], kind: str) -> None:
        if body:
            is_text = kind == "def" and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            body.insert(int(is_text), self._mark(body[0], kind))

    def _value(self, node: ast.expr, kind: str) -> ast.expr:
        """``mark(k) or value`` if the value calls anything."""
        return self._always(node, kind) if _may_mark(node) else node

    def _always(self, node: ast.expr, kind: str) -> ast.expr:
        flag = self._new_flag(node, kind)
        if flag:
            marked = ast.BoolOp(ast.And(), [ast.NamedExpr(flag, ast.Constant(True)), node])
        else:
            marked = ast.BoolOp(ast.Or(), [_call(self._number(node, kind)), node])  # add() returns None
        return ast.copy_location(marked, node)

    @contextlib.contextmanager
    def _inside(self, may_flag: bool) -> Iterator[_Scope]:
        around, self._scope = self._scope, _Scope(may_flag)
        self._scope.chosen |= around.chosen
        yield self._scope
        self._scope = around

    @contextlib.contextmanager
    def _repeated(self) -> Iterator[None]:
        self._scope.loops += 1
        yield
        self._scope.loops -= 1

    def _visited(self, nodes: Iterable[T]) -> list[T]:
        return [self.visit(node) for node in nodes]

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        leaves = isinstance(node.body[-1], LEAVES)
        self._block(node.body, "if")
        if node.orelse:
            self._block(node.orelse, "else")
        elif leaves:
            node.orelse = [self._mark(node, "not")]
        return node

    def _visit_loop(self, node: ast.For | ast.While) -> ast.AST:
        with self._repeated():
            node.body = self._visited(node.body)
            self._block(node.body, "for" if isinstance(node, ast.For) else "while")
            if isinstance(node, ast.While):
                node.test = self.visit(node.test)
        if isinstance(node, ast.For):
            node.target, node.iter = self.visit(node.target), self.visit(node.iter)
        node.orelse = self._visited(node.orelse)
        self._block(node.orelse, "else")
        return node

    visit_For = visit_While = _visit_loop

    def _visit_with(self, node: ast.With | ast.AsyncWith) -> ast.AST:
        """An error may end the body before any of its statements, and the context manager may suppress it."""
        self.generic_visit(node)
        node.body = list(self._each_marked(node.body))
        return node

    visit_With = visit_AsyncWith = _visit_with

    def _each_marked(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for before, statement in itertools.pairwise(body):
            yield before
            yield self._mark(statement, "after")
        yield body[-1]
        if not isinstance(body[-1], LEAVES):
            yield self._mark(body[-1], "end")

    def _visit_try(self, node: ast.Try | ast.TryStar) -> ast.AST:  # ast.Try, or ast.TryStar, which Python 3.10 lacks
        self.generic_visit(node)
        if node.handlers:
            node.body = list(self._each_marked(node.body))
        for handler in node.handlers:
            self._block(handler.body, "except")
        self._block(node.orelse, "else")
        return node

    visit_Try = visit_TryStar = _visit_try

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        self.generic_visit(node)
        node.guard = node.guard and self._value(node.guard, "guard")
        self._block(node.body, "case")
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.body, node.orelse = self._value(node.body, "if"), self._value(node.orelse, "else")
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        node.values = [node.values[0], *(self._value(v, f"and {k}") for k, v in enumerate(node.values[1:]))]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        first, *later = node.comparators  # in a < b < c, the last one may not be evaluated
        node.comparators = [first, *(self._value(x, f"compared {k}") for k, x in enumerate(later))]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, (ast.Subscript, ast.Call)) or (
            isinstance(node.func, ast.Name) and node.func.id in self._scope.chosen
        ):
            node.func = self._around(_CALLEE, node.func, "callee")
        elif (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in SEEDED or _may_seed(node):
            if node.args and not _is_safe_seed(node.args[0]):
                node.args[0] = self._around(_NONE, node.args[0], "seed")
            for keyword in node.keywords:
                if keyword.arg and not _is_safe_seed(keyword.value):
                    keyword.value = self._around(_NONE, keyword.value, "seed")
        return node

    def _around(self, placeholder: str, node: ast.expr, kind: str) -> ast.expr:
        number = self._number(node, kind)
        _sites[number] = self._file, node.lineno, node.col_offset, kind
        call = ast.Call(ast.Constant(placeholder), [ast.Constant(number), node], [])
        return ast.copy_location(call, node)

    def _visit_items(self, node: Comprehension, first: str = "") -> Comprehension:
        """Marks the parts of a comprehension that are not evaluated if there are no items, except ``first``."""

        def marked(part: ast.expr, kind: str) -> ast.expr:
            return part if kind == first else self._value(part, kind)

        with self._repeated():
            for name in ("elt", "key", "value"):
                if hasattr(node, name):
                    setattr(node, name, marked(self.visit(getattr(node, name)), name))
            for k, generator in enumerate(node.generators):
                generator.ifs = [marked(x, f"if {k} {n}") for n, x in enumerate(self._visited(generator.ifs))]
        with self._inside(may_flag=False):  # Python allows no ``:=`` there
            for k, generator in enumerate(node.generators):
                found = self.visit(generator.iter)
                generator.iter = marked(found, f"iter {k}") if k else found
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = _visit_items

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        kind, part = _evaluated_first(node)
        by_item = node.generators[0].is_async or not _may_mark(part)
        with self._inside(may_flag=False):  # it may run after the function that made it
            self._visit_items(node, "" if by_item else kind)
        if not by_item:
            first = node.generators[0]
            call = ast.Call(ast.Constant(_FIRST), [ast.Constant(self._number(part, kind)), first.iter], [])
            first.iter = ast.copy_location(call, first.iter)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        with self._inside(may_flag=False):
            node.args, node.decorator_list = self.visit(node.args), self._visited(node.decorator_list)
        with self._inside(may_flag=node.name != SCOPE and not _shows_locals(node)) as scope:
            scope.chosen |= _chosen(node)
            node.body = self._visited(node.body)
        if scope.flags:
            node.body = _with_flags(node.body, scope.flags)
        if node.name != SCOPE:
            self._block(node.body, "def")
        return node

    def _visit_scope(self, node: ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        with self._inside(may_flag=False):
            return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_ClassDef = _visit_scope

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        with self._inside(may_flag=False):
            self.generic_visit(node)
            node.body = self._always(node.body, "lambda")
        return node


def _call(number: int) -> ast.Call:
    return ast.Call(ast.Constant(_MARK), [ast.Constant(number)], [])


def _may_seed(node: ast.Call) -> bool:
    """Whether a call by a name of the module hands data over: the name may stand for what seeds a generator."""
    is_own = isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id)
    return is_own and bool(node.args) and isinstance(node.args[0], (ast.Subscript, ast.Attribute))


def _is_safe_seed(node: ast.expr) -> bool:
    """Whether an argument needs no mark: it is a constant, or stands for several."""
    return isinstance(node, (ast.Constant, ast.Starred, ast.List, ast.Tuple, ast.BinOp, ast.JoinedStr))


def _chosen(tree: ast.FunctionDef) -> set[str]:
    """Local variables that hold items of containers, or results of calls."""
    out: set[str] = set()
    for x in ast.walk(tree):
        if isinstance(x, (ast.For, ast.comprehension)):
            targets: list[ast.expr] = [x.target]
        elif isinstance(x, ast.Assign) and isinstance(x.value, (ast.Subscript, ast.Call)):
            targets = x.targets
        elif isinstance(x, ast.NamedExpr) and isinstance(x.value, (ast.Subscript, ast.Call)):
            targets = [x.target]
        else:
            continue
        out |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return out


def _may_mark(node: ast.expr) -> bool:
    """Whether an expression calls anything, and may stand within another expression."""
    inside = list(ast.walk(node))
    users_walrus = any(isinstance(x, ast.NamedExpr) and not x.target.id.startswith(FLAG) for x in inside)
    calls = any(isinstance(x, ast.Call) for x in inside)
    return calls and not users_walrus and not any(isinstance(x, YIELDS) for x in inside)


def _evaluated_first(node: ast.GeneratorExp) -> tuple[str, ast.expr]:
    """The kind and the part of a generator expression that is evaluated as soon as there is an item."""
    first, *others = node.generators
    if first.ifs:
        return "if 0 0", first.ifs[0]
    return ("iter 1", others[0].iter) if others else ("elt", node.elt)


def _shows_locals(tree: ast.FunctionDef) -> bool:
    """Whether a function may look at its local variables, or run on after it has returned (a generator)."""
    return any(
        isinstance(x, YIELDS) or not LOOKS_AT_LOCALS.isdisjoint((getattr(x, "id", ""), getattr(x, "attr", "")))
        for x in ast.walk(tree)
    )


def _with_flags(body: list[ast.stmt], flags: Iterable[int]) -> list[ast.stmt]:
    """Sets flags to False, then runs a function's body, then marks the branches whose flag is True."""
    first = body[0]
    start = [ast.Assign([ast.Name(f"{FLAG}{k}", ast.Store())], ast.Constant(False)) for k in flags]
    marks = [ast.If(ast.Name(f"{FLAG}{k}", ast.Load()), [ast.Expr(_call(k))], []) for k in flags]
    around = ast.Try(body, [], [], [*marks])
    return [ast.copy_location(x, first) for x in start] + [ast.copy_location(around, first)]
