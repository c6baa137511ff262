"""Calls as data: the Python function that a call runs, and rewritten functions, compiled once per process."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch

from ..core.marked_code import original
from ..core.types import Attributes
from .containers import is_changed, items_of
from .library_objects import Held

Rewritten = TypeVar("Rewritten")
Value: TypeAlias = Held  # return value of a user's call
Thunk: TypeAlias = Callable[[], Value]
AnyCallable: TypeAlias = Callable[..., Value]
Values: TypeAlias = Callable[[], tuple[object, ...]]  # returns the values of local variables, some possibly unbound
Arguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]


class Call(NamedTuple):
    """A call that was made or is about to be."""

    function: AnyCallable
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def run(self) -> Value:
        return self.function(*self.args, **self.kwargs)

    def with_copied_arguments(self, dataset: object) -> Call:
        """The same call with copied arguments, if possible, because the function may write to them. Does not copy the
        dataset: the copy would have other generators."""
        try:
            return Call(self.function, *copy.deepcopy((self.args, self.kwargs), {id(dataset): dataset}))
        except Exception:
            return self


def call_of(called: Value, args: tuple[object, ...], kwargs: dict[str, object]) -> Call:
    """Builds a call, unwrapping ``functools.partial``."""
    while type(called) is functools.partial:
        called, args, kwargs = called.func, (*called.args, *args), {**called.keywords, **kwargs}
    return Call(called, args, kwargs)


class Callee(NamedTuple):
    """The Python function that a call runs."""

    fn: Held  # a types.FunctionType; mypy would bind a field of that type like a method
    bound: object  # object it is bound to; None for a plain function

    @property
    def is_method(self) -> bool:
        """Whether the first parameter is ``self``."""
        return self.bound is not None

    @property
    def first(self) -> tuple[object, ...]:
        """``(self,)``; () for a plain function."""
        return (self.bound,) if self.is_method else ()


def callee_of(called: object) -> Callee | None:
    """The Python function that a callable runs: itself, ``forward``, ``__call__``; None for native code and classes."""
    if isinstance(called, types.FunctionType):
        return Callee(called, None)
    if isinstance(called, types.MethodType):
        return Callee(called.__func__, called.__self__) if isinstance(called.__func__, types.FunctionType) else None
    if isinstance(called, (type, types.BuiltinFunctionType, functools.partial)):
        return None
    if isinstance(called, torch.nn.Module):
        fn: object = None if is_changed(called) else getattr(type(called), "forward", None)
    else:
        fn = member(type(called), "__call__")
    return Callee(fn, called) if isinstance(fn, types.FunctionType) else None


def member(cls: type, name: str) -> object:
    """A class attribute by name, without running descriptors; None if there is none."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def key_of(called: object) -> str:
    """Key under which a plan finds a node: the function's place in its file, or a container's class and transforms."""
    found = items_of(called)
    if found is not None:
        names = ",".join(type(x).__qualname__ for x in found.items)
        return f"{type(called).__module__}.{type(called).__qualname__}[{names}]"
    callee = callee_of(called)
    if callee is None:
        return ""
    code = original(callee.fn.__code__)
    return f"{code.co_filename}:{code.co_firstlineno}:{callee.fn.__qualname__}"


class Compiled(Generic[Rewritten]):
    """A plan node that rewrites functions when a process first calls them. The rewritten functions are not pickled."""

    # by file and code (equal code may come from another file): the function, and its rewritten form
    rewritten: dict[tuple[str, types.CodeType], tuple[types.FunctionType, Rewritten]]
    last: tuple[types.FunctionType, Rewritten] | None  # requested last: hashing a function's code takes 2 us

    def __post_init__(self) -> None:
        self.rewritten = {}
        self.last = None

    def __getstate__(self) -> Attributes:
        return {**self.__dict__, "rewritten": {}, "last": None}

    def compile(
        self, callee: Callee, make: Callable[[], Rewritten], rebind: Callable[[Rewritten], Rewritten]
    ) -> Rewritten:
        """Rewrites a function, once per process. ``rebind``: adapts the result to another closure of the same code."""
        fn = callee.fn
        if self.last is not None and self.last[0] is fn:
            return self.last[1]
        key = fn.__code__.co_filename, fn.__code__
        known = self.rewritten.get(key)
        if known is None or known[0] is not fn:
            known = self.rewritten[key] = fn, make() if known is None else rebind(known[1])
        self.last = known
        return known[1]
