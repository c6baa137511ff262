"""A plan: how to make a call in two parts, of which the first is deterministic and can be cached.

``head`` runs the first part and returns a *state*; ``tail`` takes a copy of the state and runs the rest. Three kinds of
nodes form a tree:

    WholeNode     the call is deterministic: its result is cached
    CutNode       a Python function is cut before a statement, or inside a call that has a node of its own
    SliceNode     a container of transforms: the first ones are cached, the rest run every time

A plan is plain data, so the child process of a trial can send it. Each process compiles it on first use, from the
functions and containers that it then encounters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from ..core.types import Attributes, Index, MapDataset, Sample
from .callee import AnyCallable, Call, Callee, Compiled, callee_of, key_of
from .containers import Items, Loop, items_of, run_with_items
from .cut_function import Cut, FunctionParts, cut
from .inputs import Head, Inputs
from .own_caches import Path, emptied
from .source import rebound

PART, DONE = 0, 1  # first item of a CutNode's state: there is a second part, or the function returned before the cut
INNER, KEYWORDS, SEVERAL, ONE = range(4)  # how a SliceNode's state is passed to the next transform
PreparedState: TypeAlias = Any  # result of ``head``: tuples of what a sample is made from


class Unplanned(BaseException):
    """A sample took another branch than in the trial, so the dataset's own code must make it as a whole. Not an
    ``Exception``, because the user's ``except Exception`` must not catch it."""


def only_item(items: object) -> object:
    """The only item of a list; see ``unroll``."""
    if not isinstance(items, (list, tuple)) or len(items) != 1:
        raise Unplanned
    return items[0]


def loop(items: object) -> Loop:
    """A loop over transforms, as a container; see ``unroll``."""
    if not isinstance(items, (list, tuple, torch.nn.ModuleList, torch.nn.Sequential)) or not all(map(callable, items)):
        raise Unplanned
    return Loop(list(items))


@dataclass
class WholeNode:
    """A call that is deterministic as a whole."""

    def head(self, call: Call) -> PreparedState:
        """Returns the result of the call."""
        return call.run()

    def tail(self, called: AnyCallable, repeated: tuple[object, ...], state: PreparedState) -> Sample:
        """Returns the state: it is the result."""
        return state


@dataclass
class CutNode(Compiled[FunctionParts]):
    """A function cut in two parts."""

    where: Cut  # the cut
    inner: dict[str, PlanNode] = field(default_factory=dict)  # of the call that is cut, too; by ``key_of`` the callee

    def parts(self, callee: Callee) -> FunctionParts:
        """Returns the head and tail functions."""

        def rebind(known: FunctionParts) -> FunctionParts:
            head = rebound(known.head.__code__, callee.fn, True)
            return known._replace(head=head, tail=rebound(known.tail.__code__, callee.fn, False))

        return self.compile(callee, lambda: cut(callee.fn, callee.is_method, self.where), rebind)

    def head(self, call: Call) -> PreparedState:
        """Runs everything before the cut. Raises Unplanned if another branch than the one with the cut was taken."""
        callee = _python_function(call.function)
        parts = self.parts(callee)
        return parts.head(*callee.first, *call.args, _stoker=_CutHelper(self, parts), **call.kwargs)

    def tail(self, called: AnyCallable, repeated: tuple[object, ...], state: PreparedState) -> Sample:
        """Runs the rest. ``repeated``: arguments of the call that the caller passes again to the second part."""
        if state[0] == DONE:
            return state[1]
        callee = _python_function(called)
        parts = self.parts(callee)
        inner, missing, *values = state[1:]
        return parts.tail(
            *callee.first,
            *(repeated if self.where.given else ()),
            *values,
            _stoker=_CutHelper(self, parts),
            _stoker_state=inner,
            _stoker_missing=missing,
        )


def _python_function(called: object) -> Callee:
    callee = callee_of(called)
    if callee is None:
        raise Unplanned
    return callee


class _CutHelper:
    """The object that both parts of a function see as ``_stoker``."""

    __slots__ = ("_node", "_parts")

    Unplanned = Unplanned
    only = staticmethod(only_item)
    loop = staticmethod(loop)

    def __init__(self, node: CutNode, parts: FunctionParts) -> None:
        self._node = node
        self._parts = parts

    def pack(self, variables: Attributes, inner: PreparedState) -> PreparedState:
        """Builds the state from the variables that the second part needs."""
        stored = self._parts.stored
        missing = [name for name in stored if name not in variables]
        return (PART, inner, missing, *[variables.get(name) for name in stored])

    def done(self, value: object) -> PreparedState:
        """Builds the state of a function that returned before the cut."""
        return DONE, value

    def unplanned(self) -> None:
        """Reports that another branch than the one with the cut was taken."""
        raise Unplanned

    def head(self, called: AnyCallable, /, *args: object, **kwargs: object) -> PreparedState:
        """Makes the state of the call in which the cut continues."""
        node = self._node.inner.get(key_of(called))
        if node is None:
            raise Unplanned
        return node.head(Call(called, args, kwargs))

    def tail(self, called: AnyCallable, repeated: tuple[object, ...], state: PreparedState) -> Sample:
        """Finishes that call and returns its result."""
        node = self._node.inner.get(key_of(called))
        if node is None:
            raise Unplanned
        return node.tail(called, repeated, state)


class Boxed:
    """Carries a state through a container, which must not look inside it."""

    def __init__(self, state: PreparedState) -> None:
        self.state = state


@dataclass
class SliceNode:
    """A container whose first transforms are deterministic."""

    kept: int  # number of cached transforms
    names: list[str] = field(default_factory=list)  # names of its transforms, for reports
    inner: PlanNode | None = None  # node of the next transform, if it is partly deterministic
    leaves: bool = False  # the container may end its loop early: ``if x is None: return None``

    def head(self, call: Call) -> PreparedState:
        """Runs the first transforms with the container's own code. Raises Unplanned if it ends its loop early."""
        attribute, items = self.items(call.function)
        first = items[: self.kept]
        is_marked = self.leaves and self.inner is None
        if is_marked:
            first.append(Boxed)
        if self.inner is not None:
            node, last = self.inner, items[self.kept]
            first.append(lambda *args, **kwargs: Boxed(node.head(Call(last, args, kwargs))))
        out = run_with_items(call.function, attribute, first, *call.args, **call.kwargs)
        if self.leaves and not isinstance(out, Boxed):
            raise Unplanned
        if is_marked:
            return PART, ONE, out.state
        if isinstance(out, Boxed):
            return PART, INNER, out.state
        if call.kwargs:
            if call.args or not isinstance(out, dict):
                raise Unplanned
            return PART, KEYWORDS, out
        return PART, ONE if len(call.args) == 1 else SEVERAL, out

    def tail(self, called: AnyCallable, repeated: tuple[object, ...], state: PreparedState) -> Sample:
        """Runs the remaining transforms."""
        attribute, items = self.items(called)
        _, kind, value = state
        rest = items[self.kept :]
        if kind == INNER:
            node, first = self.inner, items[self.kept]
            assert node is not None
            rest[0] = lambda boxed: node.tail(first, (), boxed.state)
            value = Boxed(value)
        if kind == KEYWORDS:
            return run_with_items(called, attribute, rest, **value)
        return run_with_items(called, attribute, rest, *(value if kind == SEVERAL else (value,)))

    def items(self, called: object) -> Items:
        """The transforms of the container that is called."""
        found = items_of(called)
        if found is None or self.kept >= len(found.items):
            raise Unplanned
        return found


PlanNode = WholeNode | CutNode | SliceNode


def nodes_in(root: PlanNode) -> Iterator[PlanNode]:
    yield root
    inside: Iterable[PlanNode] = ()
    if isinstance(root, CutNode):
        inside = root.inner.values()
    elif isinstance(root, SliceNode) and root.inner is not None:
        inside = [root.inner]
    for node in inside:
        yield from nodes_in(node)


class CachedPart(NamedTuple):
    """Which code and objects make the cached part of a sample, as arguments of ``Inputs``."""

    heads: dict[int, Head]  # by id of a function that is cut: its first part
    skip: set[str]  # paths of what the first part does not use


def narrow(part: CachedPart, node: PlanNode, called: object, path: str, inputs: Inputs) -> None:
    """Adds what a node tells about a call. ``path``: where the called object was found in ``inputs``."""
    if isinstance(node, CutNode):
        callee = _python_function(called)
        owner = callee.fn.__qualname__.rpartition(".")[0]  # a method may be found as a function of its class
        is_method = callee.is_method or bool(owner and not owner.endswith("<locals>"))
        parts = cut(callee.fn, is_method, node.where)  # and not ``node.parts``, which calls of either kind share
        part.heads[id(callee.fn)] = Head(parts.head.__code__, (parts.text, parts.stored))
        for key, inner in node.inner.items():
            for place, x in inputs.found(key):
                narrow(part, inner, x, place, inputs)
    elif isinstance(node, SliceNode):
        attribute, items = node.items(called)
        for k in range(node.kept + (node.inner is not None), len(items)):
            part.skip.add(f"{path}.{attribute}[{k}]")
        if node.inner is not None:
            narrow(part, node.inner, items[node.kept], f"{path}.{attribute}[{node.kept}]", inputs)


def globals_now(names: Iterable[tuple[str, str]]) -> Attributes:
    """Values of global variables, given as module and name; "CONFIG.size" is an attribute of one."""
    return {
        f"{module}.{name}": functools.reduce(lambda x, part: getattr(x, part, None), name.split("."), found)
        for module, name in names
        for found in [sys.modules.get(module)]
    }


@dataclass
class Plan:
    """How to make the samples of a dataset in two parts."""

    root: PlanNode  # for ``dataset.__getitem__``
    # paths of generators that a container itself draws from in both parts, as albumentations does; the first part's
    # draws are undone
    moves: list[str] = field(default_factory=list)
    reads: set[str] | None = None  # names of attributes and globals that the first part may read; None: any
    scratch: set[str] = field(default_factory=set)  # paths that samples write, and the first part does not read before
    stores: set[str] = field(default_factory=set)  # attributes of lasting objects that the first part assigns to
    own_caches: list[Path] = field(default_factory=list)  # where the dataset caches samples; empty for the first part
    globals: list[tuple[str, str]] = field(default_factory=list)  # module and name of each that the first part reads
    shown: str = ""  # file and line of the first statement that runs every time
    head_s: float = 0.0  # seconds that the first part of a sample takes
    tail_s: float = 0.0  # seconds that the second part takes
    read_s: float = 0.0  # seconds to copy a cached state out of memory
    nbytes: float = 0.0  # bytes cached per sample
    pickled: str = ""  # a class whose objects are pickled in it; "" if none

    @property
    def slices(self) -> bool:
        """Whether the plan cuts a container of transforms, whose own code runs in both parts."""
        return any(isinstance(node, SliceNode) for node in nodes_in(self.root))

    @property
    def exact(self) -> bool:
        """Whether the cached state is the sample itself."""
        return isinstance(self.root, WholeNode)

    def head(self, dataset: MapDataset, index: Index) -> PreparedState:
        """Makes the part of a sample to be cached. Raises Unplanned if the sample must be made as a whole."""
        call = Call(dataset.__getitem__, (index,), {})
        if not self.own_caches:
            return self.root.head(call)
        with emptied(dataset, self.own_caches):
            return self.root.head(call)

    def tail(self, dataset: MapDataset, state: PreparedState) -> Sample:
        """Makes the sample from a copy of the cached part."""
        return self.root.tail(dataset.__getitem__, (), state)
