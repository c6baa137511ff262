"""Objects that have a state of their own: ``state_dict()`` and ``load_state_dict()``, torchdata's ``Stateful``."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import torch

from ..core.errors import StateError, one_line
from ..core.types import State


def is_stateful(obj: object) -> bool:
    """Whether an object has ``state_dict()`` and ``load_state_dict(state)`` that say its place in a run. Those of a
    module are its weights."""
    if isinstance(obj, torch.nn.Module):
        return False
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def pickled_state(state: Callable[[], State]) -> bytes:
    """A state as it is now, which later changes do not reach. If there is none, the error is pickled in its place."""
    try:
        return pickle.dumps(state())
    except Exception as e:
        return pickle.dumps(StateError(f"the state of the dataset or sampler cannot be taken: {one_line(e)}"))


def read_state(pickled: bytes | None) -> State:
    """What ``pickled_state`` wrote, in this run. Raises StateError: the object's ``state_dict()`` had failed."""
    state = None if pickled is None else pickle.loads(pickled)
    if isinstance(state, StateError):
        raise state
    return state


def load_into(obj: object, state: State, name: str) -> None:
    """Calls an object's ``load_state_dict``, not with None. Raises StateError: it has none, or refuses the state."""
    if state is None:
        return
    if not is_stateful(obj):
        raise StateError(
            f"the state dict has a state for the {name}, but {type(obj).__name__} has no load_state_dict()"
        )
    try:
        obj.load_state_dict(state)  # type: ignore[attr-defined]
    except Exception as e:
        raise StateError(f"the {name}'s own load_state_dict() does not take its state: {one_line(e)}") from e


def alike(a: State, b: State) -> bool:
    """Whether two values are the same, types included."""
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
