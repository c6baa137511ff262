"""The random state of a process and of generators that a dataset holds: saved, compared, set back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.random_state import RandomState
from ..sampling.generators import seed_generator

Generators = Sequence[tuple[str, Any]]  # of Python, NumPy or torch, each with a path


class RandomStates:
    """Saves the states of Python's, NumPy's and torch's global generators, and of some others.

    Args:
        others: generators that objects hold.
    """

    def __init__(self, others: Generators = ()) -> None:
        import numpy.random  # noqa: F401  each state has NumPy's

        self._state = RandomState(others)

    def moved(self) -> list[str]:
        """Which generators are in another state now: "torch", "random", "numpy", or a path."""
        return ["random" if name == "python" else name for name in self._state.moved()]

    def values(self) -> Any:
        """All of them, comparable."""
        return list(self._state.values.values())

    def restore(self) -> None:
        """Sets all of them back."""
        self._state.restore()


def seed_all(seed: int, others: Generators = ()) -> None:
    """Seeds the global generators, and others; in place, so objects that share one go on sharing it."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    for k, (_, generator) in enumerate(others):
        seed_generator(generator, seed + k + 1)
