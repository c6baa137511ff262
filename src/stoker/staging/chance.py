"""Is a transform random? By what it does: calls under other random states, compared to the bit.

Random is what moves a generator, Python's, NumPy's, torch's or one of its own; what gives other bits on a repeat; what
keeps a state from call to call; and whatever cannot be told. A name alone decides nothing.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..cache.leaves import take
from .chain import Call
from .marks import Touched
from .reach import Reached, name_of, reach, set_state, state_of

REPEATS = 4  # calls of each sample, the first of which may set something up
AGAIN = 3  # times that two callables which differ are compared
ENOUGH_S = 1.0  # of calls of one transform; then fewer samples have to do


class Verdict(NamedTuple):
    """Whether calls with the same input give the same bits, whatever happened before, and why it is thought so."""

    deterministic: bool
    why: str


class States:
    """The state of the generators of a process, and of some others.

    Args:
        others: generators of somebody's own.
    """

    def __init__(self, others: Sequence[Any] = ()) -> None:
        self._others = [(g, state_of(g)) for g in others]
        self.python = random.getstate()
        self.numpy = np.random.get_state(legacy=False)
        self.torch = torch.get_rng_state()

    def moved(self) -> str:
        """Which generator's state is another now; "" if none is."""
        if not torch.equal(torch.get_rng_state(), self.torch):
            return "torch's"
        if random.getstate() != self.python:
            return "Python's"
        now = np.random.get_state(legacy=False)["state"]
        then = self.numpy["state"]
        if now["pos"] != then["pos"] or not np.array_equal(now["key"], then["key"]):
            return "NumPy's"
        return "its own" if any(state_of(g) != state for g, state in self._others) else ""

    def restore(self) -> None:
        """Sets all of them back."""
        for generator, state in self._others:
            set_state(generator, state)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


def _other_states(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def judge(
    fn: Callable[..., Any], inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], walk: Any = None
) -> Verdict:
    """Whether ``fn`` is deterministic, by calling it with each of ``inputs`` (args, kwargs) several times.

    Arguments are copied for each call. The process' generators, and its own, are as they were afterwards; so is
    ``fn``, which is called as a copy where it can be copied.

    Args:
        fn: what is called.
        inputs: what with.
        walk: whose attributes and code are looked at, if not ``fn``'s.

    Raises:
        Touched: from a call; the code after a transform looked at what it returned.

    Example:
        >>> judge(lambda x: x + 1, [((1,), {})]).deterministic, judge(lambda x: random.random(), [((1,), {})]).why
        (True, "draws from Python's generator")
    """
    found = reach(fn if walk is None else walk)
    early = _by_look(found)
    if early:
        return Verdict(False, early)
    called = fn
    if walk is None:
        with contextlib.suppress(Exception):
            called = copy.deepcopy(fn)
    before = States(list(found.generators.values()))
    try:
        return _try(called, inputs, found, called if walk is None else walk)
    finally:
        before.restore()


def _by_look(found: Reached) -> str:
    if found.unseen:
        return found.unseen[0]
    return f"cannot be told: {found.unknown[0]}" if found.unknown else ""


def _try(fn: Callable[..., Any], inputs: Sequence[Any], found: Reached, walk: Any) -> Verdict:
    began, calls = time.perf_counter(), 0
    seed = random.randrange(1 << 31)
    for args, kwargs in inputs:
        first: Any = None
        held: Any = None
        for _ in range(REPEATS):
            _other_states(seed + calls)
            own = reach(walk)
            states = States(list(own.generators.values()))
            try:
                out = fn(*copy.deepcopy(args), **copy.deepcopy(kwargs))
                words, leaves = take(out)
            except Touched:
                raise
            except Exception as e:
                return Verdict(False, f"cannot be told: {type(e).__name__}: {e}")
            calls += 1
            moved = states.moved()
            if moved:
                return Verdict(
                    False,
                    "draws from a generator of its own" if moved == "its own" else f"draws from {moved} generator",
                )
            bits = words, [x.tobytes() for x in leaves]
            if first is not None and bits != first:
                return Verdict(False, "gives other bits on a repeat")
            now = reach(walk).values
            if held is not None and now != held:
                changed = next((k for k in now if now.get(k) != held.get(k)), "something")
                return Verdict(False, f"keeps a state from call to call ({changed})")
            first, held = bits, now
        if time.perf_counter() - began > ENOUGH_S:
            break
    if found.chance and walk is fn:  # a dataset's own code is watched while it fills
        return Verdict(False, f"names {found.chance[0]}, which it did not call in {calls} calls")
    return Verdict(True, f"same bits in {calls} calls under other random states")


def _defined(cls: type) -> set[str]:
    return {name for base in cls.__mro__[:-1] for name in vars(base)}


def label(fn: Any) -> str:
    """What a transform is called in a report: ``Resize(size=256)`` where it says so itself, on one line."""
    name = name_of(fn)
    if name == "<lambda>" or (not isinstance(fn, torch.nn.Module) and "__repr__" not in _defined(type(fn))):
        return name
    words = " ".join(repr(fn).split())
    return words if words.startswith(name) and len(words) <= 80 else name


def same(
    whole: Callable[..., Any], parts: Callable[..., Any], inputs: list[Call], owners: list[Any] | None = None
) -> bool:
    """Whether two callables return the same bits from the same random states.

    What asks the clock, or the system for random bytes, is not even the same as itself; so it is asked several times,
    and what never repeats itself is believed.

    Args:
        whole, parts: the two.
        inputs: what they are called with.
        owners: whose generators are set back in between, if not those of ``whole``.
    """
    generators = [g for o in (owners or [whole]) for g in reach(o).generators.values()]
    for call in inputs:
        seen = []
        for _ in range(AGAIN):
            one, other = (_bits(fn, call, generators) for fn in (whole, parts))
            if one is not None and one == other:
                break
            seen.append(one)
        else:
            if None in seen or seen.count(seen[0]) == AGAIN:
                return False
    return True


def _bits(fn: Callable[..., Any], call: Call, generators: list[Any]) -> Any:
    """What a call returns, comparable; None where it fails."""
    states = States(generators)
    try:
        args, kwargs = copy.deepcopy(call)
        words, leaves = take(fn(*args, **kwargs))
        return words, [x.tobytes() for x in leaves]
    except Exception:
        return None
    finally:
        states.restore()
