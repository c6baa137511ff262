"""What a survey of pure calls learned about one function (see ``pure_calls``)."""

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
from .rewrite_calls import rewritten, sites_of


class SurveyedFunction:
    """What is known about the calls of one function."""

    def __init__(self, callee: Callee) -> None:
        self.callee = callee  # the function
        self.sites = sites_of(callee.fn, callee.is_method)  # its calls, by number
        self.seconds: dict[int, list[float]] = {}  # durations of calls, by number, without their arguments
        self.seconds_with_args: dict[int, list[float]] = {}  # the same, including evaluation of its arguments
        self.not_by_args: set[int] = set()  # numbers of calls that draw, or whose arguments are not all small values
        self.drew: set[int] = set()  # numbers of calls that draw, themselves or in evaluating their arguments
        self.draws_itself: set[int] = set()  # numbers of calls that themselves draw
        self.large: dict[int, set[str]] = {}  # by call number, its local variables that are not small values
        self.calls: dict[int, Call] = {}  # by number, the first such call with arguments that are not small values
        self.prefixes: dict[int, PlanNode | None] = {}  # how to make calls in two parts, by number; None: impossible
        self.cheap: set[int] = set()  # numbers of frequent calls that take no time
        self.struck: set[int] = set()  # numbers of calls that must not be cached
        self.inner: dict[tuple[int, str], SurveyedFunction] = {}  # that it calls, by number and ``key_of``
        self._copy: types.FunctionType | None = None

    def copied(self) -> types.FunctionType:
        """Returns a copy that reports its calls. Made once, because a sample may call it often. See ``rewritten``."""
        fn, known = self.callee.fn, self._copy
        self._copy = rewritten(fn, self.callee.is_method) if known is None else rebound(known.__code__, fn, True)
        return self._copy

    def note_large(self, number: int, mentioned: tuple[object, ...] | None) -> None:
        """Records which local variables in a call are not small values."""
        names = self.sites[number].mentioned
        if names and mentioned is not None:
            large = {name for name, value in zip(names, mentioned, strict=True) if not is_small(value)}
            self.large.setdefault(number, set()).update(large)

    def has_small_variables(self, number: int) -> bool:
        """Whether the local variables in a call are all known and small."""
        return self.sites[number].mentioned is not None and not self.large.get(number)

    def arguments_draw(self, number: int) -> bool:
        """Whether evaluating a call's arguments draws random numbers."""
        return any(number in site.around and n in self.drew for n, site in self.sites.items())

    def all(self) -> Iterator[SurveyedFunction]:
        yield self
        for function in self.inner.values():
            yield from function.all()


def may_be_cut(call: Call) -> bool:
    """Whether a call may have a first part: it runs a container of transforms, or a user's Python function."""
    callee = callee_of(call.function)
    return items_of(call.function) is not None or (callee is not None and not is_closed(callee.fn, libraries()))
