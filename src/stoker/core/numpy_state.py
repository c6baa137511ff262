"""NumPy's process-wide generator, saved and put back by its memory.

``numpy.random.get_state`` and ``set_state`` go number by number, 30 to 100 us each, which is half of what a small batch
takes. Two places of memory hold the state: the 624 words of the Mersenne Twister and the position in them, whose
address NumPy documents (``BitGenerator.ctypes``), and in the ``RandomState`` object the second half of a pair of normal
numbers, if one waits. Where that lies is found out by setting it to known values in another object. Where either place
does not look as expected, NumPy's own functions are used.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

StateDict: TypeAlias = dict[str, Any]  # what ``RandomState.get_state(legacy=False)`` returns
_WORDS = 625  # 624 words of the state, and the position in them
_WORDS_BYTES = _WORDS * 4
_HALF_BYTES = 16  # an int that says whether half a pair waits, four bytes of padding, and a double
_bits: object = None
_memory: tuple[Any, Any] | None = None  # ctypes arrays over the words, and over the half of a pair


def save() -> object:
    """The state, comparable: the generator's memory, or ``freeze`` of a dict."""
    memory = _find_memory()
    if memory is None:
        return freeze(np.random.get_state(legacy=False))
    words, half = memory
    with np.random.mtrand._rand._bit_generator.lock:
        raw: bytes = words.raw + half.raw
    return raw


def restore(saved: object) -> None:
    """Puts a state back."""
    memory = _find_memory()
    if type(saved) is not bytes or memory is None:
        np.random.set_state(as_dict(saved))
        return
    words, half = memory
    with np.random.mtrand._rand._bit_generator.lock:
        words.raw = saved[:_WORDS_BYTES]
        half.raw = saved[_WORDS_BYTES:]


def seed(words: list[int]) -> None:
    """``numpy.random.seed(words)``, in 0.1 instead of 0.6 ms in a process just forked: NumPy's function writes to 160
    pages of memory, each of which the kernel has to copy first. Python's generator is the same Mersenne Twister, and
    takes the same words if the last is not 0. It is left with the same state."""
    if _find_memory() is None or not words or not words[-1]:
        np.random.seed(words)
        return
    random.seed(sum(word << 32 * i for i, word in enumerate(words)))
    restore(struct.pack(f"{_WORDS}I", *random.getstate()[1]) + bytes(_HALF_BYTES))


def as_dict(saved: object) -> StateDict:
    """What ``save`` returned, as ``RandomState.get_state(legacy=False)`` would return it."""
    if type(saved) is not bytes:
        found: StateDict = thaw(saved)
        return found
    at = _WORDS_BYTES - 4
    key = {"key": np.frombuffer(saved[:at], np.uint32), "pos": int.from_bytes(saved[at:_WORDS_BYTES], sys.byteorder)}
    has_gauss, gauss = struct.unpack("i4xd", saved[_WORDS_BYTES:])
    return {"bit_generator": "MT19937", "state": key, "has_gauss": has_gauss, "gauss": gauss}


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


def _find_memory() -> tuple[Any, Any] | None:
    """The generator's memory; None where it cannot be used."""
    global _bits, _memory
    bits = np.random.mtrand._rand._bit_generator
    if bits is not _bits:
        _bits, _memory = bits, None
        half_at = _half_pair_offset()
        if type(bits) is np.random.MT19937 and half_at is not None:
            words = (ctypes.c_char * _WORDS_BYTES).from_address(bits.ctypes.state_address)
            half = (ctypes.c_char * _HALF_BYTES).from_address(id(np.random.mtrand._rand) + half_at)
            state: StateDict = np.random.get_state(legacy=False)
            if freeze(as_dict(words.raw + half.raw)) == freeze(state):
                _memory = words, half
    return _memory


@functools.cache
def _half_pair_offset() -> int | None:
    """Where in a ``RandomState`` object the half of a pair lies: an int, then a double eight bytes behind it."""
    if sys.implementation.name != "cpython":
        return None
    other = np.random.RandomState(0)
    size = type(other).__basicsize__
    memory = (ctypes.c_char * size).from_address(id(other))
    state: StateDict = other.get_state(legacy=False)
    places = set(range(0, size - _HALF_BYTES + 1, 8))
    for has_gauss, gauss in ((1, 1.2345678901234e-77), (1, -9.87654321e55), (0, 0.0)):
        other.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})
        raw = memory.raw
        places = {at for at in places if struct.unpack_from("i4xd", raw, at) == (has_gauss, gauss)}
    return places.pop() if len(places) == 1 else None


# When this module is imported, which also loads ``numpy.random``: each worker that is forked would take 10 ms for both.
_find_memory()
