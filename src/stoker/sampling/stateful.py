"""Objects that have a state of their own: ``state_dict()`` and ``load_state_dict()``, torchdata's ``Stateful``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..core.errors import StateError


def is_stateful(obj: Any) -> bool:
    """Whether an object follows the protocol: ``state_dict()`` and ``load_state_dict(state)``. A module's are its
    weights, and no place in a run."""
    if isinstance(obj, torch.nn.Module):
        return False
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def noted(state: Callable[[], Any]) -> bytes:
    """A state as it is now, which later changes do not reach; or why there is none, for whoever asks for it."""
    try:
        return pickle.dumps(state())
    except Exception as e:
        return pickle.dumps(StateError(f"the state of the dataset or sampler cannot be taken: {type(e).__name__}: {e}"))


def read(note: bytes | None) -> Any:
    """What ``noted`` wrote, in this run.

    Raises:
        StateError: the object's ``state_dict()`` failed when its time was.
    """
    state = None if note is None else pickle.loads(note)
    if isinstance(state, StateError):
        raise state
    return state


def put(obj: Any, state: Any, name: str) -> None:
    """Gives an object its state.

    Raises:
        StateError: it has none, or does not take this one.
    """
    if state is None:
        return
    if not is_stateful(obj):
        raise StateError(
            f"the state dict has a state for the {name}, but {type(obj).__name__} has no load_state_dict()"
        )
    try:
        obj.load_state_dict(state)
    except Exception as e:
        words = f"{type(e).__name__}: {e}"
        raise StateError(f"the {name}'s own load_state_dict() does not take its state: {words}") from e


def alike(a: Any, b: Any) -> bool:
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
