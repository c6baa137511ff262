"""NumPy's process-wide generator, saved and put back by its memory.

``numpy.random.get_state`` and ``set_state`` go number by number, 30 us each, which is half of what a small batch takes.
Where the generator's memory does not look as NumPy documents it (``BitGenerator.ctypes``), these are used.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

StateDict: TypeAlias = dict[str, Any]  # what ``RandomState.get_state(legacy=False)`` returns
_BYTES = 625 * 4  # 624 words, and the position in them
_bits: object = None
_memory: Any = None  # a ctypes array over the generator's memory
_without_half_pair: bytes = b""  # a state of which it is known that no half of a pair of normal numbers waits beside it


def save() -> object:
    """The state, comparable: the generator's memory, or ``freeze`` of a dict.

    A script that draws and then sets exactly this position again with half a pair waiting, between two calls, is not
    noticed.
    """
    global _without_half_pair
    memory = _find_memory()
    if memory is None:
        return freeze(np.random.get_state(legacy=False))
    with np.random.mtrand._rand._bit_generator.lock:
        raw: bytes = memory.raw
    if raw != _without_half_pair:
        state: StateDict = np.random.get_state(legacy=False)
        if state["has_gauss"]:
            return freeze(state)
        _without_half_pair = raw
    return raw


def restore(saved: object) -> None:
    """Puts a state back."""
    memory = _find_memory()
    if type(saved) is not bytes or memory is None:
        np.random.set_state(as_dict(saved))
        return
    np.random.seed(0)  # forgets the half of a pair
    with np.random.mtrand._rand._bit_generator.lock:
        memory.raw = saved


def as_dict(saved: object) -> StateDict:
    """What ``save`` returned, as ``RandomState.get_state(legacy=False)`` would return it."""
    if type(saved) is not bytes:
        return dict(thaw(saved))
    position = int.from_bytes(saved[-4:], sys.byteorder)
    key = {"key": np.frombuffer(saved[:-4], np.uint32), "pos": position}
    return {"bit_generator": "MT19937", "state": key, "has_gauss": 0, "gauss": 0.0}


def freeze(state: object) -> object:
    """A NumPy generator's state without dicts and arrays: comparable, hashable."""
    if isinstance(state, Mapping):
        return tuple((k, freeze(v)) for k, v in state.items())
    if isinstance(state, np.ndarray):
        return state.dtype.str, state.tobytes()
    return state


def thaw(state: object) -> Any:
    """What ``freeze`` took."""
    if not isinstance(state, tuple):
        return state
    if len(state) == 2 and isinstance(state[1], bytes):
        return np.frombuffer(state[1], state[0]).copy()
    return {k: thaw(v) for k, v in state}


def _find_memory() -> Any:
    """The generator's memory; None where it cannot be used."""
    global _bits, _memory
    bits = np.random.mtrand._rand._bit_generator
    if bits is not _bits:
        _bits, _memory = bits, None
        if type(bits) is np.random.MT19937:
            memory = (ctypes.c_char * _BYTES).from_address(bits.ctypes.state_address)
            state: StateDict = np.random.get_state(legacy=False)
            key, position = state["state"]["key"], int(state["state"]["pos"])
            if memory.raw == key.tobytes() + position.to_bytes(4, sys.byteorder):
                _memory = memory
    return _memory
