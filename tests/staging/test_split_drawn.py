"""Datasets drawn at random: what stoker keeps of them never changes a bit of what torch's loader gives."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import random
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import stoker
from stoker.core.compare import equal_bits
from stoker.core.errors import UsageError
from stoker.core.random_state import RandomState
from stoker.sampling.generators import find_generators
from stoker.staging import search
from tests.staging.drawn import source_of

EPOCHS = 3
_numbers = itertools.count()
seen: collections.Counter[str] = collections.Counter()


def module_of(text: str, folder: str) -> Any:
    """A module of its own: globals as they are at first."""
    name = f"drawn_{next(_numbers)}"
    path = Path(folder, f"{name}.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def epochs(module: Any, data: Any, loaded: Any, workers: int) -> list[Any]:
    """All samples of some epochs, and what is left behind after each."""
    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    loader = DataLoader(loaded, batch_size=3, shuffle=True, num_workers=workers, collate_fn=list)
    out: list[Any] = []
    for epoch in range(EPOCHS):
        if epoch:
            module.change(data, epoch)
        try:
            out.append(list(loader))
        except Exception as e:
            out.append(f"{type(e).__name__}: {str(e).splitlines()[-1] if workers else e}")
        if not workers:
            out.append(RandomState(find_generators(data)).in_order())
            out.append(module.MODULE_RNG.bit_generator.state)
            out.append([getattr(data, name, None) for name in ("count", "seen", "sums")])
    return out


def check(text: str, folder: str, workers: tuple[int, ...] = (0, 2)) -> str:
    """Compares the loader of torch with and without ``Staged``. What was found: "whole", "cut" or why nothing."""
    found: Any = None
    for n in workers:
        results = []
        for staged in (True, False):
            module = module_of(text, folder)
            data: Any = module.build()
            loaded = data
            if staged:
                try:
                    loaded = stoker.Staged(data, cache_budget="10MB")
                except UsageError as e:
                    sys.modules.pop(module.__name__)
                    reason = str(e)
                    assert re.search(r"cannot be split: \S.{10}", reason), reason
                    return reason
                found = loaded.split
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                results.append(epochs(module, data, loaded, n))
            if staged:
                seen[
                    f"filled {bool(loaded.account.filled)}, discarded {any('discarded' in str(w.message) for w in said)}"
                ] += 1
            sys.modules.pop(module.__name__)
        for k, (mine, plain) in enumerate(zip(*results, strict=True)):
            assert equal_bits(plain, mine), f"{n} workers, result {k}\nplain {plain}\nmine  {mine}\n{found}"
    return "whole" if found.exact else "cut"


def drawn(rng: random.Random, deep: bool, workers: bool) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(search, "WORTH_S", 0.0 if deep else search.WORTH_S)
        check(source_of(rng), folder, (0, 2) if workers else (0,))


RANDOM = st.randoms(use_true_random=False)
# The same datasets each time, so that a failure is the change's. `python -m tests.staging.explore` draws others.
QUICK = settings(
    max_examples=1, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)


@QUICK
@given(RANDOM, st.booleans())
def test_never_a_wrong_bit(rng: random.Random, deep: bool) -> None:
    drawn(rng, deep, workers=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(QUICK, max_examples=12)
@given(RANDOM, st.booleans(), st.integers(0, 7).map(lambda k: k == 0))
def test_never_a_wrong_bit_in_many_datasets(rng: random.Random, deep: bool, workers: bool) -> None:
    drawn(rng, deep, workers)
