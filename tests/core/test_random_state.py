"""Random state: captured, compared, put back, and written as text."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.core import numpy_state
from stoker.core.errors import StateError
from stoker.core.random_state import RandomState, from_text, preserved, to_text

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(()),
    "python": random.random,
    "numpy": np.random.randn,  # leaves half a pair of normal numbers
}


def drawn() -> list[float]:
    return [float(torch.rand(())), random.gauss(0, 1), float(np.random.randn()), float(np.random.rand())]


@pytest.mark.parametrize("name", DRAWS)
def test_what_moved_is_named_and_put_back(name: str) -> None:
    before = RandomState()
    wanted = drawn()
    before.restore()
    DRAWS[name]()
    assert before.moved() == [name]
    assert before != RandomState()
    before.restore()
    assert before == RandomState()
    assert drawn() == wanted


@pytest.mark.parametrize("half", [False, True])
def test_bytes_and_texts_bring_a_state_back(half: bool) -> None:
    own = torch.Generator().manual_seed(3)
    np.random.seed(5)
    if half:
        np.random.randn()
        random.gauss(0, 1)
    state = RandomState([("generator", own)])
    texts = state.to_texts(state.values)
    raw = RandomState().to_bytes()
    wanted = drawn(), float(torch.rand((), generator=own))
    RandomState.from_texts(texts, own).restore_saved()
    assert (drawn(), float(torch.rand((), generator=own))) == wanted
    RandomState.from_bytes(raw).restore()
    assert drawn() == wanted[0]


def test_generators_of_one_name_are_both_kept() -> None:
    pair = random.Random(1), random.Random(2)
    state = RandomState([("a", pair[0]), ("a", pair[1])], ())
    wanted = [g.random() for g in pair]
    assert len(state.moved()) == 2
    state.restore()
    assert [g.random() for g in pair] == wanted


def test_preserved_after_an_error() -> None:
    own = torch.Generator().manual_seed(3)
    before = RandomState([("generator", own)])

    def fail() -> None:
        with preserved(own, None):
            drawn(), torch.rand((), generator=own)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert before == RandomState([("generator", own)])


@given(st.binary(min_size=1, max_size=6000))
def test_text_is_its_bytes(raw: bytes) -> None:
    assert from_text(to_text(raw)) == raw


@pytest.mark.parametrize(
    "texts", [{"python": to_text(b"12345678")}, {"numpy": "x"}, {"torch": to_text(b"short")}, {"generator": ""}]
)
def test_texts_of_something_else_are_refused(texts: dict[str, str]) -> None:
    with pytest.raises(StateError):
        RandomState.from_texts(texts, None).restore_saved()


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6))
@example([0])
@example([1, 0])
@example([2**32 - 1] * 4)
def test_words_give_the_state_that_numpy_gives(words: list[int]) -> None:
    with preserved():
        np.random.seed(words)
        expected = numpy_state.save()
        np.random.seed(1)
        np.random.randn()  # leaves half of a pair
        numpy_state.seed(words)
        assert numpy_state.save() == expected
