"""Objects with their own ``state_dict()`` and ``load_state_dict()``: torchdata's ``Stateful``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Protocol, TypeGuard

import numpy as np
import torch

from ..core.errors import StateError, one_line
from ..core.types import State


class Stateful(Protocol):
    """What ``is_stateful`` asks for."""

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State, /) -> object: ...


def is_stateful(obj: object) -> TypeGuard[Stateful]:
    """Whether an object has ``state_dict()`` and ``load_state_dict(state)`` for its position in a run. A module's hold
    its weights, so they do not count."""
    if isinstance(obj, torch.nn.Module):
        return False
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def pickled_state(state: Callable[[], State]) -> bytes:
    """Pickles the state at once, so later changes cannot affect it. If ``state()`` raises, pickles a StateError."""
    try:
        return pickle.dumps(state())
    except Exception as e:
        return pickle.dumps(StateError(f"state_dict() of the dataset or sampler failed: {one_line(e)}"))


def read_state(pickled: bytes | None) -> State:
    """Unpickles the result of ``pickled_state``, in the same run. Raises StateError if ``state_dict()`` had failed."""
    state = None if pickled is None else pickle.loads(pickled)
    if isinstance(state, StateError):
        raise state
    return state


def load_into(obj: object, state: State, name: str) -> None:
    """Calls an object's ``load_state_dict``, unless ``state`` is None. Raises StateError if the object has no such
    method or refuses the state."""
    if state is None:
        return
    if not is_stateful(obj):
        raise StateError(
            f"the state dict has a state for the {name}, but {type(obj).__name__} has no load_state_dict()"
        )
    try:
        obj.load_state_dict(state)
    except Exception as e:
        raise StateError(f"the {name}'s own load_state_dict() rejected its state: {one_line(e)}") from e


def alike(a: State, b: State) -> bool:
    """Whether two values are equal, including their types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(k in b and alike(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    try:
        return bool(a == b)
    except Exception:
        return False
