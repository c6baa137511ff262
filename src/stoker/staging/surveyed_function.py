"""What a survey of pure calls saw of one function (see ``pure_calls``)."""

from __future__ import annotations

import types
from collections.abc import Iterator

from ..core.packages import libraries
from .callee import Call, Callee, callee_of
from .containers import items_of
from .executed_code import is_closed
from .memoize import is_small
from .plan import Node
from .recompile import rebound
from .rewrite_calls import definitions_of, sites_of, surveyed


class SurveyedFunction:
    """What was seen of the calls of one function."""

    def __init__(self, callee: Callee) -> None:
        self.callee = callee  # the function
        self.sites = sites_of(callee.fn, callee.is_method)  # its calls, by number
        self.definitions = definitions_of(callee.fn)  # its assignments of calls to variables
        # by number of a call: how long it took each time, without its arguments
        self.seconds: dict[int, list[float]] = {}
        self.seconds_with_args: dict[int, list[float]] = {}  # the same, with what was evaluated for its arguments
        self.not_by_args: set[int] = set()  # numbers of calls that draw, or whose arguments are no small values
        self.drew: set[int] = set()  # numbers of calls that draw, or for whose arguments something draws
        self.draws_itself: set[int] = set()  # numbers of calls that draw
        self.large: dict[int, set[str]] = {}  # by number of a call, the local variables in it that are no small values
        self.looked_up: set[int] = set()  # numbers of subscripts that are no call of a Python function
        self.calls: dict[int, Call] = {}  # by number, the first call that has other arguments than small values
        # by number of a call, how it can be made in two parts; None: it cannot
        self.prefixes: dict[int, Node | None] = {}
        self.struck: set[int] = set()  # numbers of calls that must not be kept
        # what was seen of the functions that it calls, by number and ``key_of``
        self.inner: dict[tuple[int, str], SurveyedFunction] = {}
        self._copy: types.FunctionType | None = None

    def copied(self) -> types.FunctionType:
        """A copy that reports its calls, made once: a sample may call it often. See ``surveyed``."""
        fn, known = self.callee.fn, self._copy
        self._copy = surveyed(fn, self.callee.is_method) if known is None else rebound(known, fn, True)
        return self._copy

    def note_large(self, number: int, mentioned: tuple[object, ...] | None) -> None:
        """Notes which of the local variables in a call are no small values."""
        names = self.sites[number].mentioned
        if names and mentioned is not None:
            large = {name for name, value in zip(names, mentioned, strict=True) if not is_small(value)}
            self.large.setdefault(number, set()).update(large)

    def definitions_for(self, number: int, inline: bool) -> set[int] | None:
        """The definitions that have to be taken into a call, so that it mentions small values only. ``inline``:
        definitions may be taken into calls. None where it is not possible."""
        site = self.sites[number]
        large = self.large.get(number, set())
        if site.mentioned is None or (large and not inline):
            return None
        out: set[int] = set()
        for name in large:
            definition = site.given.get(name)
            if definition is None or not self._is_pure(definition):
                return None
            inner = self.definitions_for(definition, inline)
            if inner is None:
                return None
            out |= {definition} | inner
        return out

    def _is_pure(self, definition: int) -> bool:
        found = self.definitions.by_number[definition]
        is_replaced = not found.mentions_itself or found.name in self.large.get(definition, ())
        was_run = definition in self.seconds_with_args or definition in self.looked_up
        return is_replaced and was_run and definition not in self.drew | self.struck

    def arguments_draw(self, number: int) -> bool:
        """Whether something draws for the arguments of a call."""
        return any(number in site.around and n in self.drew for n, site in self.sites.items())

    def all(self) -> Iterator[SurveyedFunction]:
        yield self
        for function in self.inner.values():
            yield from function.all()


def may_be_cut(call: Call) -> bool:
    """Whether a call may have a first part: it runs a container of transforms, or a Python function of the user's."""
    callee = callee_of(call.function)
    return items_of(call.function) is not None or (callee is not None and not is_closed(callee.fn, libraries()))
