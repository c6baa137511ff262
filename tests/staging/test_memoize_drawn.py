"""Datasets drawn at random whose samples draw first and load afterwards: kept calls never change a bit."""

from __future__ import annotations

import random
import tempfile

import pytest
from hypothesis import given, settings

from stoker.staging import pure_calls, search, trial
from tests.staging import drawn, drawn_pairs
from tests.staging.test_split_drawn import QUICK, RANDOM, check


def compare(text: str, workers: tuple[int, ...] = (0,)) -> None:
    """Keeps every call that can be kept, however short it is."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for module, name, value in (
            (pure_calls, "WORTH_S", 0.0),
            (pure_calls, "WORTH_SHARE", 0.0),
            (pure_calls, "PAYS", 1e9),
            (search, "WORTH_S", 0.0),
            (trial, "_find_cut", lambda *_: trial.TrialResult(None, [], "")),
        ):
            patch.setattr(module, name, value)
        check(text, folder, workers)


@pytest.mark.slow
@settings(QUICK, max_examples=1)
@given(RANDOM)
def test_never_a_wrong_bit(rng: random.Random) -> None:
    compare(drawn_pairs.source_of(rng))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(QUICK, max_examples=5)
@given(RANDOM)
def test_never_a_wrong_bit_in_many_pairs(rng: random.Random) -> None:
    compare(drawn_pairs.source_of(rng), (0, 2) if rng.random() < 0.1 else (0,))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(QUICK, max_examples=5)
@given(RANDOM)
def test_never_a_wrong_bit_in_many_datasets(rng: random.Random) -> None:
    compare(drawn.source_of(rng))
