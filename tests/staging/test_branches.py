"""Branches within loops are marked by local variables: the same branches, results, tracebacks and local names as without."""

from __future__ import annotations

import ast
import functools
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.staging import branches, vetting
from stoker.staging.isolate import run_isolated


def identity(x: Any) -> Any:
    return x


def loops(n: int) -> list[object]:
    out: list[object] = []
    for a in range(n):
        if a == 3:
            continue
        if a == 5 and n < 7:
            out.append(identity(a))
            break
        while True:
            if a == 6:
                return [a, *out]
            out.append(a)
            break
    else:
        out.append("else")
    return out


def raises(n: int) -> object:
    for a in range(n):
        try:
            if a == 2:
                raise KeyError(a)
            identity(1 / (4 - a))
        except KeyError:
            n -= 1
        else:
            n += 0
        finally:
            identity(n)
    return n


def comprehensions(n: int) -> object:
    squares = [identity(a) if a % 2 else str(a) for a in range(n) if a != 3 and identity(a) < 6]
    pairs = {identity(a): [identity(b) for b in range(a) if b or identity(b)] for a in range(n)}
    return squares, pairs, {x for a in range(n) for x in ([identity(a)] if a > 1 else ())}


def lazily(n: int) -> Iterator[object]:
    """The generator runs after the function has returned."""
    for _ in range(2):
        made = (identity(a) for a in range(n) if identity(a) or a > 1)
    return made


def own_walrus(n: int) -> object:
    found = [y for a in range(n) if (y := identity(a)) > 1]
    for a in range(n):
        if (z := identity(a)) and (a > 2 or identity(z)):
            found.append(z)
    return found


def closures(n: int) -> object:
    total = 0

    def add(k: int = n) -> None:
        nonlocal total
        for a in range(k):
            if a > 1:
                total += identity(a)

    for a in range(n):
        add(a if identity(a) % 2 else 1)
    lambdas = [lambda a=a: identity(a) if a > 2 else [identity(b) for b in range(a)] for a in range(n)]
    return total, [f() for f in lambdas]


def recursive(n: int) -> int:
    for _ in range(2):
        if n > 1:
            return recursive(n - 1)
    return n


def names(n: int) -> object:
    for a in range(n):
        if a > 1:
            n += identity(0)
    return sorted(locals())


def generator(n: int) -> Iterator[object]:
    for a in range(n):
        if a > 1:
            yield identity(a)


def generator_expressions(n: int) -> object:
    words = [str(a) * a for a in range(n)]
    nested = [c for word in words for c in (identity(c) for c in word if identity(c) != "3")]
    unused = (identity(a) for a in words)
    parts = (c for word in words for c in identity(word) if n > 2)
    nothing = sum(identity(a) for a in range(2, n))
    first = next(unused, None) if n > 3 else None
    return nested, "".join(parts), nothing, first, max(identity(a) for a in (words if n < 6 else n))  # type: ignore[attr-defined]


FUNCTIONS = [
    loops,
    raises,
    comprehensions,
    lazily,
    own_walrus,
    closures,
    recursive,
    names,
    generator,
    generator_expressions,
]


def outcome(fn: Callable[..., Any], n: int) -> tuple[object, object, frozenset[int]]:
    """What a function gives, the lines of its traceback, and the branches taken."""
    branches.begin()
    lines: object = None
    try:
        made = fn(n)
        made = list(made) if isinstance(made, Iterator) else made
    except Exception as e:
        made, lines = repr(e), [frame.lineno for frame in traceback.extract_tb(e.__traceback__)[1:]]
    return made, lines, branches.taken()


def copied(fn: types.FunctionType) -> types.FunctionType:
    return types.FunctionType(fn.__code__, globals(), fn.__name__, fn.__defaults__, fn.__closure__)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_the_same_branches_results_and_lines_as_marks_without_flags(
    fn: types.FunctionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, flagged, called = copied(fn), copied(fn), copied(fn)
    assert not vetting.mark([flagged])
    monkeypatch.setattr(branches, "_shows_locals", lambda tree: True)
    assert not vetting.mark([called])
    has_flags = any(
        name.startswith(branches.FLAG) for name in flagged.__code__.co_varnames + flagged.__code__.co_cellvars
    )
    assert has_flags == (fn.__name__ not in {"names", "generator"})
    for n in range(8):
        found, expected = outcome(flagged, n), outcome(called, n)
        assert found == expected
        assert found[:2] == outcome(plain, n)[:2]
        assert found[2]


@pytest.mark.parametrize(
    "source", ["c for c in items if called(c)", "called(c) for c in items", "d for c in items for d in called(c)"]
)
def test_a_generator_expression_is_marked_once_its_first_item_is_looked_at(source: str) -> None:
    seen: list[object] = []

    def called(c: object) -> object:
        seen.append(c)
        return [c]

    names: dict[str, Any] = {"called": called}
    module = ast.parse(f"def make(items): return ({source})")
    exec(branches.compile_with_marks(module, "here.py", 0), names)
    for items in ([], [1, 2], iter([3, 4]), {5: 6}):
        seen.clear()
        branches.begin()
        made = names["make"](items)
        made_by = branches.taken()
        assert not seen
        first = next(made, None)
        assert len(seen) == (first is not None)
        assert len(branches.taken() - made_by) == len(seen)
        list(made)
        assert len(branches.taken() - made_by) == (first is not None)


class Asked:
    """Has every attribute but the one that is asked for."""

    def __init__(self) -> None:
        vars(self)["names"] = []

    def __getattr__(self, name: str) -> object:
        self.names.append(name)
        raise KeyError(name)

    def __call__(self, n: int) -> int:
        return n + 1


def by_data(n: int) -> object:
    calls = {0: functools.partial(int), 1: functools.partial(str), 2: identity, 3: np.sin, 4: [].append, 5: str.upper}
    asked = {6: Asked()}

    def inner(n: int) -> object:
        """A text."""
        return n

    call = {**calls, **asked}[n % 7]
    made = call("a" if n % 7 == 5 else n)
    return str(made), inner.__doc__, [x.names for x in asked.values()]


def test_what_data_choose_to_call_is_a_branch_that_each_process_knows_by_the_same_number() -> None:
    fn, plain = copied(by_data), copied(by_data)  # type: ignore[arg-type]
    assert not vetting.mark([fn])
    found = [outcome(fn, n) for n in range(7)]
    assert [made for made, _, _ in found] == [outcome(plain, n)[0] for n in range(7)]
    chosen = [{k for k in taken if k >= branches.CALLEES} for _, _, taken in found]
    assert len(set().union(*chosen)) == 7
    assert all(chosen)

    def in_a_child() -> list[set[int]]:
        branches._callees.clear()
        return [{k for k in outcome(fn, n)[2] if k >= branches.CALLEES} for n in reversed(range(7))]

    assert run_isolated(in_a_child) == chosen[::-1]


def test_a_branch_that_differs_stays_one() -> None:
    vetted = branches.Vetted()
    for is_same in (False, True):
        vetted.note([3], is_same)
    assert vetted.may_not([3])


def test_flags_of_a_call_are_marked_before_the_sample_is_judged() -> None:
    fn = copied(loops)
    assert not vetting.mark([fn])
    vetted = branches.Vetted()
    for n in range(3):
        branches.begin()
        fn(n)
        vetted.note(branches.taken(), True)
    branches.begin()
    fn(2)
    assert not vetted.new(branches.taken())
    fn(6)  # takes "elif a == 5", "continue", ...
    assert vetted.new(branches.taken())


class ManyBranches(Dataset):
    """Each sample takes a branch of its own."""

    def __init__(self) -> None:
        self.odd = [lambda x: x * 2 if x.sum() else x, lambda x: x * 3 if x.sum() else x]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((8,), float(i))
        if i == 11:
            x = x.sin()
        if i == 12:
            x = x.cos()
        if i == 13:
            x = x.exp()
        return self.odd[i % 2](x)


@pytest.mark.slow
def test_vetting_takes_its_share_of_the_time_and_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    data, plain = stoker.Staged(ManyBranches()), ManyBranches()
    monkeypatch.setattr(vetting, "FREE_S", -1.0)
    monkeypatch.setattr(vetting, "SHARE", 0.0)
    for _ in range(2):
        assert all(torch.equal(data[i], plain[i]) for i in range(40))
    before = data.account.filled
    assert before < 40
    monkeypatch.setattr(vetting, "FREE_S", 60.0)
    for _ in range(2):
        assert all(torch.equal(data[i], plain[i]) for i in range(40))
    assert data.account.filled == 40 > before


class Together(ManyBranches):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(map(self.__getitem__, indices))


def test_samples_made_together_are_vetted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    vetted: list[object] = []
    check = vetting.Vetting.may_keep

    def noting(self: vetting.Vetting, made: object, *args: Any) -> bool:
        if self.new():
            vetted.append(made)
        return check(self, made, *args)

    monkeypatch.setattr(vetting.Vetting, "may_keep", noting)
    data, plain = stoker.Staged(Together()), Together()
    loader = stoker.DataLoader(data, batch_size=8)
    for _ in range(2):
        assert torch.equal(torch.cat(list(loader)), torch.stack([plain[i] for i in range(40)]))
    assert isinstance(vetted[0], torch.Tensor)
    assert sum(isinstance(made, list) for made in vetted) == 1  # for the branches of __getitems__ itself
    assert data.account.filled == 40
