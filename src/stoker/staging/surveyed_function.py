"""What a survey of pure calls saw of one function (see ``pure_calls``)."""

from __future__ import annotations

import types
from collections.abc import Iterator

from ..core.packages import libraries
from .callee import Call, Callee, callee_of
from .containers import items_of
from .executed_code import is_closed
from .memoize import is_small
from .plan import PlanNode
from .recompile import rebound
from .rewrite_calls import sites_of, surveyed


class SurveyedFunction:
    """What was seen of the calls of one function."""

    def __init__(self, callee: Callee) -> None:
        self.callee = callee  # the function
        self.sites = sites_of(callee.fn, callee.is_method)  # its calls, by number
        # by number of a call: how long it took each time, without its arguments
        self.seconds: dict[int, list[float]] = {}
        self.seconds_with_args: dict[int, list[float]] = {}  # the same, with what was evaluated for its arguments
        self.not_by_args: set[int] = set()  # numbers of calls that draw, or whose arguments are no small values
        self.drew: set[int] = set()  # numbers of calls that draw, or for whose arguments something draws
        self.draws_itself: set[int] = set()  # numbers of calls that draw
        self.large: dict[int, set[str]] = {}  # by number of a call, the local variables in it that are no small values
        self.calls: dict[int, Call] = {}  # by number, the first call that has other arguments than small values
        # by number of a call, how it can be made in two parts; None: it cannot
        self.prefixes: dict[int, PlanNode | None] = {}
        self.cheap: set[int] = set()  # numbers of calls that are often made and take no time
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

    def has_small_variables(self, number: int) -> bool:
        """Whether the local variables in a call are all known, and small values."""
        return self.sites[number].mentioned is not None and not self.large.get(number)

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
