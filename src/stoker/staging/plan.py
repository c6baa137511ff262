"""A plan: how a call is made in two parts, of which the first is deterministic and can be kept.

A plan is plain data, so a trial in another process can send it. It is compiled when a process first uses it, from the
functions and containers that it then meets. Three kinds of nodes make a tree:

    WholeNode     the call is deterministic: what it returns is kept
    CutNode       a Python function is cut before a statement, or inside a call for which there is a node again
    SliceNode     a container of transforms: the first ones are kept, the rest run every time

``head`` runs the first part and returns a *state*; ``tail`` takes a copy of it and runs the rest.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .recompile import rebound
from .rewrite_cut import Cut, Parts, cut

Made = TypeVar("Made")
PART, DONE = 0, 1  # the first item of a state: there is a second part; the function returned before the cut


class Unplanned(BaseException):
    """A sample took a way that no trial has seen. It is made as a whole, by the dataset's own code.

    Not an ``Exception``: the user's ``except Exception`` must not catch it.
    """


def only(items: Any) -> Any:
    """The item of a list of one: see ``unroll``."""
    if not isinstance(items, (list, tuple)) or len(items) != 1:
        raise Unplanned
    return items[0]


class Callee(NamedTuple):
    """A Python function that a call runs.

    Attributes:
        fn: the function.
        bound: what it is bound to; None for a plain function.
    """

    fn: Any
    bound: Any

    @property
    def is_method(self) -> bool:
        return self.bound is not None

    @property
    def first(self) -> tuple[Any, ...]:
        """The argument that a method is given by being one."""
        return (self.bound,) if self.is_method else ()


def callee_of(called: Any) -> Callee | None:
    """The Python function behind something that is called: a function, a method, a module's ``forward``, an object
    with ``__call__``. None for code that is not Python's, and for classes."""
    if isinstance(called, types.FunctionType):
        return Callee(called, None)
    if isinstance(called, types.MethodType):
        return Callee(called.__func__, called.__self__) if isinstance(called.__func__, types.FunctionType) else None
    if isinstance(called, (type, types.BuiltinFunctionType, functools.partial)):
        return None
    if isinstance(called, torch.nn.Module):
        hooks = (called._forward_hooks, called._forward_pre_hooks, called._backward_hooks)
        fn: Any = None if any(hooks) else getattr(type(called), "forward", None)
    else:
        fn = next((vars(c)["__call__"] for c in type(called).__mro__ if "__call__" in vars(c)), None)
    return Callee(fn, called) if isinstance(fn, types.FunctionType) else None


def key_of(called: Any) -> str:
    """By what a node for a call is found: the function's place in its file, or a container's transforms."""
    items = container_items(called)
    if items is not None:
        names = ",".join(type(x).__qualname__ for x in items[1])
        return f"{type(called).__module__}.{type(called).__qualname__}[{names}]"
    callee = callee_of(called)
    if callee is None:
        return ""
    code = callee.fn.__code__
    return f"{code.co_filename}:{code.co_firstlineno}:{callee.fn.__qualname__}"


@dataclass
class WholeNode:
    """The whole call is deterministic."""

    def head(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns."""
        return called(*args, **kwargs)

    def tail(self, called: Any, again: tuple[Any, ...], state: Any) -> Any:
        """The same."""
        return state


class Compiled(Generic[Made]):
    """A node that compiles what it makes of functions when a process first calls them.

    Attributes:
        made: by file and code, for code of another file may be equal: the function, and what was made of it.
    """

    made: dict[tuple[str, types.CodeType], tuple[Any, Made]]

    def __post_init__(self) -> None:
        self.made = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "made": {}}

    def compile(self, callee: Callee, make: Callable[[], Made], again: Callable[[Made], Made]) -> Made:
        """What is made of a function; ``again``: for one made by the same statement, with other variables around it."""
        fn: Any = callee.fn
        key = fn.__code__.co_filename, fn.__code__
        known = self.made.get(key)
        if known is None or known[0] is not fn:
            known = self.made[key] = fn, make() if known is None else again(known[1])
        return known[1]


@dataclass
class CutNode(Compiled[Parts]):
    """A function in two parts.

    Attributes:
        where: the cut.
        inner: nodes for the call in which the cut continues, by ``key_of`` what is called there.
    """

    where: Cut
    inner: dict[str, Node] = field(default_factory=dict)

    @property
    def compiled(self) -> dict[types.CodeType, Parts]:
        """The functions that were cut in this process so far, by their code."""
        return {code: parts for (_, code), (_, parts) in self.made.items()}

    def parts(self, callee: Callee) -> Parts:
        """The two functions."""

        def again(found: Parts) -> Parts:
            head, tail, *_ = found
            return found._replace(head=rebound(head, callee.fn, True), tail=rebound(tail, callee.fn, False))

        return self.compile(callee, lambda: cut(callee.fn, callee.is_method, self.where), again)

    def head(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs what comes before the cut.

        Raises:
            Unplanned: another branch than the one with the cut was taken.
        """
        callee = callee_of(called)
        if callee is None:
            raise Unplanned
        parts = self.parts(callee)
        return parts.head(*callee.first, *args, _stoker=_Helper(self, parts), **kwargs)

    def tail(self, called: Any, again: tuple[Any, ...], state: Any) -> Any:
        """Runs the rest. ``again``: arguments of the call that the caller passed again."""
        if state[0] == DONE:
            return state[1]
        callee = callee_of(called)
        assert callee is not None
        parts = self.parts(callee)
        given = again if self.where.given else ()
        inner, missing, *values = state[1:]
        helper = _Helper(self, parts)
        return parts.tail(*callee.first, *given, *values, _stoker=helper, _stoker_state=inner, _stoker_missing=missing)


class _Helper:
    """What rewritten code finds as ``_stoker``."""

    __slots__ = ("_node", "_parts")

    Unplanned = Unplanned

    def __init__(self, node: CutNode, parts: Parts) -> None:
        self._node, self._parts = node, parts

    def pack(self, variables: dict[str, Any], inner: Any) -> Any:
        """The state: the variables that the second part needs."""
        stored = self._parts.stored
        missing = [name for name in stored if name not in variables]
        return (PART, inner, missing, *[variables.get(name) for name in stored])

    def done(self, value: Any) -> Any:
        """The state of a function that returned before the cut."""
        return DONE, value

    only = staticmethod(only)

    def unplanned(self) -> None:
        """Another branch than the one with the cut."""
        raise Unplanned

    def head(self, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The state of the call in which the cut continues."""
        node = self._node.inner.get(key_of(called))
        if node is None:
            raise Unplanned
        return node.head(called, args, kwargs)

    def tail(self, called: Any, again: tuple[Any, ...], state: Any) -> Any:
        """What that call returns."""
        return self._node.inner[key_of(called)].tail(called, again, state)


# -- containers of transforms


def container_items(called: Any) -> tuple[str, list[Any]] | None:
    """The attribute in which a container keeps its transforms, and these; None for anything else.

    A container is any object that is called and has one list or tuple of callables, whatever its attribute is named.
    """
    held = getattr(called, "__dict__", None)
    if not held or isinstance(called, (type, types.FunctionType, types.ModuleType)):
        return None
    if isinstance(called, torch.nn.Module):
        modules = called._modules
        lists = [(k, m) for k, m in modules.items() if isinstance(m, torch.nn.ModuleList)]
        if isinstance(called, torch.nn.Sequential) and modules:
            return "", list(modules.values())
        if len(lists) == 1 and len(lists[0][1]):
            return f"_modules.{lists[0][0]}", list(lists[0][1])
    found = [(k, v) for k, v in held.items() if type(v) in (list, tuple) and v and all(map(callable, v))]
    if not found or not callable(called):
        return None
    named = [f for f in found if f[0] == "transforms"] or found
    return (named[0][0], list(named[0][1])) if len(named) == 1 else None


def with_items(container: Any, attribute: str, items: list[Any]) -> Any:
    """A shallow copy of a container with other transforms. It shares everything else with the original."""
    new = object.__new__(type(container))
    held = new.__dict__
    held.update(container.__dict__)
    if attribute and not attribute.startswith("_modules."):
        held[attribute] = type(container.__dict__[attribute])(items)
        return new
    modules = held["_modules"] = dict(held["_modules"])
    if attribute:
        modules[attribute.removeprefix("_modules.")] = torch.nn.ModuleList(items)
    else:
        held["_modules"] = {str(k): m for k, m in enumerate(items)}
    return new


def _write_back(copied: Any, container: Any, attribute: str) -> None:
    """Attributes that a call of the copy has set are the container's."""
    own, changed = container.__dict__, copied.__dict__
    skip = "_modules" if not attribute or attribute.startswith("_modules.") else attribute
    for name, value in changed.items():
        if name != skip and own.get(name, _write_back) is not value:
            own[name] = value


class _Boxed:
    """A state on its way through a container, which must not look into it."""

    def __init__(self, state: Any) -> None:
        self.state = state


@dataclass
class SliceNode:
    """A container whose first transforms are deterministic.

    Attributes:
        kept: how many.
        names: of its transforms, for reports.
        inner: the node of the next transform, if part of it is deterministic.
    """

    kept: int
    names: list[str] = field(default_factory=list)
    inner: Node | None = None

    def head(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the first transforms, with the container's own code."""
        attribute, items = self._items(called)
        first = items[: self.kept]
        if self.inner is not None:
            node, last = self.inner, items[self.kept]
            first.append(lambda *a, **k: _Boxed(node.head(last, a, k)))
        part = with_items(called, attribute, first)
        out = part(*args, **kwargs)
        _write_back(part, called, attribute)
        if isinstance(out, _Boxed):
            return PART, "inner", out.state
        if kwargs:
            if args or not isinstance(out, dict):
                raise Unplanned
            return PART, "keywords", out
        return PART, "one" if len(args) == 1 else "several", out

    def tail(self, called: Any, again: tuple[Any, ...], state: Any) -> Any:
        """Runs the others."""
        attribute, items = self._items(called)
        _, kind, value = state
        rest = items[self.kept :]
        if kind == "inner":
            node, first = self.inner, items[self.kept]
            assert node is not None
            rest[0] = lambda boxed: node.tail(first, (), boxed.state)
            value = _Boxed(value)
        part = with_items(called, attribute, rest)
        out = part(**value) if kind == "keywords" else part(*value) if kind == "several" else part(value)
        _write_back(part, called, attribute)
        return out

    def _items(self, called: Any) -> tuple[str, list[Any]]:
        found = container_items(called)
        if found is None or self.kept >= len(found[1]):
            raise Unplanned
        return found


Node = WholeNode | CutNode | SliceNode
Caller = Callable[..., Any]


def globals_now(names: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The values of global variables, given as module and name."""
    modules = ((module, name, sys.modules.get(module)) for module, name in names)
    return {f"{module}.{name}": getattr(found, name, None) for module, name, found in modules}


@dataclass
class Plan:
    """How samples of a dataset are made in two parts.

    Attributes:
        root: for ``dataset.__getitem__``.
        moves: paths of generators that a container draws from for itself (albumentations does), in both parts: what
            the first part draws is put back.
        reads: names of attributes and globals that the first part may read; None: any.
        scratch: paths of attributes that loading a sample writes, and the first part does not read before that.
        globals: module and name of each global variable that it reads.
        shown: file and line of the first statement that runs every time.
        head_s, tail_s: seconds of the two parts, a sample.
        read_s: seconds to copy a kept state out of memory.
        nbytes: bytes that are kept of a sample.
    """

    root: Node
    moves: list[str] = field(default_factory=list)
    reads: set[str] | None = None
    scratch: set[str] = field(default_factory=set)
    globals: list[tuple[str, str]] = field(default_factory=list)
    shown: str = ""
    head_s: float = 0.0
    tail_s: float = 0.0
    read_s: float = 0.0
    nbytes: float = 0.0

    @property
    def slices(self) -> bool:
        """It cuts a container of transforms, whose own code runs in both parts."""
        waiting: list[Any] = [self.root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, SliceNode):
                return True
            if isinstance(node, CutNode):
                waiting += node.inner.values()
        return False

    @property
    def exact(self) -> bool:
        """What is kept is the sample."""
        return isinstance(self.root, WholeNode)

    def head(self, dataset: Any, index: Any) -> Any:
        """What is to be kept of a sample.

        Raises:
            Unplanned: this sample is to be made as a whole.
        """
        return self.root.head(dataset.__getitem__, (index,), {})

    def tail(self, dataset: Any, state: Any) -> Any:
        """The sample, from a copy of what was kept."""
        return self.root.tail(dataset.__getitem__, (), state)
