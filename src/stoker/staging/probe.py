"""Finds the first statement of a function, and the first call in it, that advances a random generator.

An instrumented copy of the function runs once. It reports each statement, call and subscript to a ``Recorder``, which
checks after each whether a generator has advanced.
"""

from __future__ import annotations

import ast
import contextlib
import time
import types
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from .callee import AnyCallable, Call, callee_of
from .library_objects import Held
from .own_caches import OwnDict, OwnList
from .plan import loop, only_item
from .source import NoSource, compiled_like, constant, helper_call
from .syntax import SIMPLE, Position, blocks_of, calls_in, first_param, is_generator, is_setup, root_of
from .unroll import tree_for
from .users_code import is_library_class


class Moved(NamedTuple):
    """What advanced a generator."""

    position: Position  # the statement
    call: int | None  # number of the call in it, in order of evaluation; None: not a reported call


class Reached(BaseException):
    """The requested call is about to be made."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class Recorder:
    """Receives the reports of a probed function. ``stop_at``: a call instead of which to raise ``Reached``."""

    def __init__(self, has_moved: Callable[[], bool], stop_at: Moved | None = None) -> None:
        self.first: Moved | None = None  # what first advanced a generator; None so far
        self.plain: set[tuple[int, int]] = set()  # line and column of subscripts of lists, dicts and arrays
        self.contexts: set[Position] = set()  # ``with`` statements whose context is more than a resource to close
        self.stacks: set[Position] = set()  # those of an ``ExitStack``, which the tail cannot enter again
        self.elapsed = 0.0  # seconds until a generator advanced, without the time for checking
        self._has_moved = has_moved  # whether a generator has advanced since the function was called
        self._stop_at = stop_at
        self._last: Position = (0,)
        self._asking_s = 0.0
        self._began = time.perf_counter()

    only = staticmethod(only_item)
    loop = staticmethod(loop)

    def at(self, position: Position) -> None:
        """Reports that the statement at a position is next."""
        self.settle()
        self._last = position

    def settle(self) -> None:
        """Attributes any draw since the last report to the last statement."""
        self._ask(Moved(self._last, None))

    def _ask(self, by: Moved) -> None:
        if self.first is not None:
            return
        began = time.perf_counter()
        if self._has_moved():
            self.first = by
            self.elapsed = began - self._began - self._asking_s
        self._asking_s += time.perf_counter() - began

    def context(self, position: Position, value: object) -> object:
        """Reports the value that a ``with`` statement enters."""
        if isinstance(value, (contextlib.ExitStack, contextlib.AsyncExitStack)):
            self.stacks.add(position)
        elif not hasattr(value, "close") or not is_library_class(type(value)):  # the user's may suppress errors
            self.contexts.add(position)
        return value

    def call(self, position: Position, number: int, called: AnyCallable, /, *args: object, **kwargs: object) -> object:
        """Makes and reports a call inside the statement at a position."""
        if self._stop_at == (position, number):
            raise Reached(Call(called, args, kwargs))
        self.settle()
        out = called(*args, **kwargs)
        self._ask(Moved(position, number))
        return out

    def item(self, position: Position, number: int, place: tuple[int, int], value: Held, index: object) -> object:
        """Reports a subscript, as a call of ``__getitem__`` if that is a Python function."""
        is_plain = isinstance(value, (list, tuple, dict, np.ndarray, torch.Tensor))
        if is_plain and not isinstance(value, (OwnDict, OwnList)):  # those are empty when the second part runs
            self.plain.add(place)
        getter: Held = getattr(value, "__getitem__", None)
        return self.call(position, number, getter if callee_of(getter) else lambda key: value[key], index)


def probed(fn: types.FunctionType, is_method: bool, unrolled: bool = False) -> types.FunctionType:
    """Returns a copy that reports to the ``Recorder`` passed as ``_stoker``: ``at(position)`` before each statement,
    ``call`` and ``item`` instead of calls and subscripts, ``context`` around what a ``with`` enters. Raises NoSource
    for a generator or coroutine, and as ``tree_of`` does."""
    function = tree_for(fn, unrolled)
    tree = function.tree
    if is_generator(tree):
        raise NoSource(f"{tree.name} is a generator or a coroutine")
    tree.body = _probe_block(tree.body, (), first_param(tree, is_method))
    (made,) = compiled_like(fn, function, [(tree, True)])
    return made


def _probe_block(block: list[ast.stmt], around: Position, first: str) -> list[ast.stmt]:
    out: list[ast.stmt] = []
    for k, statement in enumerate(block):
        position = (*around, k)
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
    """Replaces the calls of a simple statement by calls of the recorder."""
    root = root_of(statement)
    numbers = {id(x): n for n, x in enumerate(calls_in(root))}

    class Reports(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST:
            number = numbers.get(id(node))
            super().generic_visit(node)
            where: list[ast.expr] = [constant(position), constant(number)]
            if number is not None and isinstance(node, ast.Call):
                new = helper_call("call", *where, node.func, *node.args)
                new.keywords = node.keywords
                return ast.copy_location(new, node)
            if number is not None and isinstance(node, ast.Subscript):
                place = constant((node.lineno, node.col_offset))
                return ast.copy_location(helper_call("item", *where, place, node.value, node.slice), node)
            return node

    if numbers and root is not None and isinstance(statement, SIMPLE):
        statement.value = Reports().visit(root)
