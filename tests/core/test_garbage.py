"""Parsing where a garbage collection may run code of others."""

from __future__ import annotations

import ast
import contextlib
import gc
import linecache
from collections.abc import Iterator
from types import FunctionType

import pytest

from stoker.staging.source import compiled_like, tree_of
from stoker.workers.exceptions import Caught


class Parses:
    """Garbage whose finalizer parses, as hooks do that format an error. It leaves garbage of its kind."""

    again = True

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        if Parses.again:
            Parses()
            self.parse(5)

    def parse(self, depth: int) -> None:
        ast.parse("x = 1") if depth == 0 else self.parse(depth - 1)


@contextlib.contextmanager
def garbage() -> Iterator[None]:
    threshold = gc.get_threshold()
    Parses.again = True
    Parses()
    gc.set_threshold(200, 1, 1)
    try:
        yield
    finally:
        Parses.again = False
        gc.set_threshold(*threshold)


@pytest.mark.parametrize("what", ["source", "compile", "error"])
def test_a_finalizer_that_parses_does_not_end_a_parse(what: str) -> None:
    name, text = f"<garbage {what}>", "def f(x):\n" + "    x = x + f(x)\n" * 100 + "    return x + (1 / 0)\n"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    names: dict[str, FunctionType] = {}
    exec(compile(text, name, "exec"), names)
    fn = names["f"]
    if what == "source":
        with garbage():
            tree_of(fn)
    elif what == "compile":
        tree = tree_of(fn)
        with garbage():
            compiled_like(fn, tree, [(tree.tree, True)])
    else:
        try:
            exec(compile("x = 1 + (2 / 0)" + " + 1" * 500, name, "exec"))
        except ZeroDivisionError:
            with garbage():
                assert "ZeroDivisionError" in Caught("here").exc_msg
    assert gc.isenabled()
