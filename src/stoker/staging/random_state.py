"""The random state of a process and of generators that a dataset holds: saved, compared, set back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core import numpy_state
from ..sampling.generators import get_state, seed_generator, set_state

Generators = Sequence[tuple[str, Any]]  # of Python, NumPy or torch, each with a path


class RandomStates:
    """Saves the states of Python's, NumPy's and torch's global generators, and of some others.

    Args:
        others: generators that objects hold.
    """

    def __init__(self, others: Generators = ()) -> None:
        self._others = [(path, g, get_state(g)) for path, g in others]
        self.python = random.getstate()
        self.numpy = numpy_state.save()
        self.torch = torch.get_rng_state()

    def moved(self) -> list[str]:
        """Generators whose state is another one now: "torch", "random", "numpy", or a path."""
        out = [] if torch.equal(torch.get_rng_state(), self.torch) else ["torch"]
        if random.getstate() != self.python:
            out.append("random")
        if _comparable(numpy_state.save()) != _comparable(self.numpy):
            out.append("numpy")
        return out + [path for path, g, state in self._others if get_state(g) != state]

    def values(self) -> object:
        """All of them, for comparison."""
        return (
            self.python,
            _comparable(self.numpy),
            self.torch.numpy().tobytes(),
            [state for _, _, state in self._others],
        )

    def restore(self) -> None:
        """Sets all of them back."""
        for _, generator, state in self._others:
            set_state(generator, state)
        random.setstate(self.python)
        numpy_state.restore(self.numpy)
        torch.set_rng_state(self.torch)


def _comparable(state: Any) -> object:
    """What ``numpy_state.save`` returned, for comparison."""
    return state if type(state) is bytes else [x.tobytes() if isinstance(x, np.ndarray) else x for x in state]


def seed_all(seed: int, others: Generators = ()) -> None:
    """Seeds the global generators, and others; in place, so objects that share one go on sharing it."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    for k, (_, generator) in enumerate(others):
        seed_generator(generator, seed + k + 1)
