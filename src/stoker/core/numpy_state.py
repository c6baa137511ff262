"""Saves and restores NumPy's process-wide generator by copying its memory.

``numpy.random.get_state`` and ``set_state`` convert number by number. Each takes 30 to 100 us, half the time of a small
batch. The state lies in two places. One holds the 624 words of the Mersenne Twister and the position in them; NumPy
documents its address (``BitGenerator.ctypes``). The other, in the ``RandomState`` object, holds the cached second
number of a normal pair; its offset is found by setting known values in another object. If either place does not look as
expected, NumPy's own functions are used.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Mapping
from typing import TypeAlias, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

Memory: TypeAlias = ctypes.Array[ctypes.c_char]
_WORDS = 625  # 624 words of state, and the position in them
_WORDS_BYTES = _WORDS * 4
_HALF_BYTES = 16  # an int that says whether a normal number is cached, 4 bytes of padding, and the number (double)
_bits: object = None
_memory: tuple[Memory, Memory] | None = None  # ctypes arrays over the words, and over the cached normal number


class TwisterState(TypedDict):
    """Part of a ``StateDict``."""

    key: NDArray[np.uint32]
    pos: int


class StateDict(TypedDict):
    """What ``RandomState.get_state(legacy=False)`` returns for a Mersenne Twister."""

    bit_generator: str
    state: TwisterState
    has_gauss: int
    gauss: float


def save() -> object:
    """Returns the state in comparable form: the generator's memory, or ``freeze`` of a dict."""
    memory = _find_memory()
    if memory is None:
        return freeze(np.random.get_state(legacy=False))
    words, half = memory
    with np.random.mtrand._rand._bit_generator.lock:
        raw: bytes = words.raw + half.raw
    return raw


def restore(saved: object) -> None:
    """Restores a state that ``save`` returned."""
    memory = _find_memory()
    if type(saved) is not bytes or memory is None:
        np.random.set_state({**as_dict(saved)})
        return
    words, half = memory
    with np.random.mtrand._rand._bit_generator.lock:
        words.raw = saved[:_WORDS_BYTES]
        half.raw = saved[_WORDS_BYTES:]


def seed(words: list[int]) -> None:
    """``numpy.random.seed(words)`` in 0.1 instead of 0.6 ms in a freshly forked process. NumPy's function writes to 160
    pages, which the kernel must copy first. Python's generator is the same Mersenne Twister and accepts the same words
    if the last is not 0. Python's generator ends in the same state."""
    if _find_memory() is None or not words or not words[-1]:
        np.random.seed(words)
        return
    random.seed(sum(word << 32 * i for i, word in enumerate(words)))
    restore(struct.pack(f"{_WORDS}I", *random.getstate()[1]) + bytes(_HALF_BYTES))


def as_dict(saved: object) -> StateDict:
    """Converts what ``save`` returned to the result of ``RandomState.get_state(legacy=False)``."""
    if type(saved) is not bytes:
        return cast(StateDict, thaw(saved))
    at = _WORDS_BYTES - 4
    key: TwisterState = {
        "key": np.frombuffer(saved[:at], np.uint32),
        "pos": int.from_bytes(saved[at:_WORDS_BYTES], sys.byteorder),
    }
    has_gauss, gauss = struct.unpack("i4xd", saved[_WORDS_BYTES:])
    return {"bit_generator": "MT19937", "state": key, "has_gauss": has_gauss, "gauss": gauss}


def freeze(state: object) -> object:
    """Converts a NumPy generator's state to tuples and bytes, which are comparable and hashable."""
    if isinstance(state, Mapping):
        return tuple((k, freeze(v)) for k, v in state.items())
    if isinstance(state, np.ndarray):
        return state.dtype.str, state.tobytes()
    return state


def thaw(state: object) -> object:
    """Inverse of ``freeze``."""
    if not isinstance(state, tuple):
        return state
    if len(state) == 2 and isinstance(state[1], bytes):
        return np.frombuffer(state[1], state[0]).copy()
    return {k: thaw(v) for k, v in state}


def _find_memory() -> tuple[Memory, Memory] | None:
    """The generator's memory; None if it cannot be used."""
    global _bits, _memory
    bits = np.random.mtrand._rand._bit_generator
    if bits is not _bits:
        _bits, _memory = bits, None
        half_at = _half_pair_offset()
        if type(bits) is np.random.MT19937 and half_at is not None:
            words = (ctypes.c_char * _WORDS_BYTES).from_address(bits.ctypes.state_address)
            half = (ctypes.c_char * _HALF_BYTES).from_address(id(np.random.mtrand._rand) + half_at)
            if freeze(as_dict(words.raw + half.raw)) == freeze(np.random.get_state(legacy=False)):
                _memory = words, half
    return _memory


@functools.cache
def _half_pair_offset() -> int | None:
    """Offset of the cached normal number in a ``RandomState`` object: an int, followed eight bytes later by a
    double."""
    if sys.implementation.name != "cpython":
        return None
    other = np.random.RandomState(0)
    size = type(other).__basicsize__
    memory = (ctypes.c_char * size).from_address(id(other))
    state = other.get_state(legacy=False)
    places = set(range(0, size - _HALF_BYTES + 1, 8))
    for has_gauss, gauss in ((1, 1.2345678901234e-77), (1, -9.87654321e55), (0, 0.0)):
        other.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})
        raw = memory.raw
        places = {at for at in places if struct.unpack_from("i4xd", raw, at) == (has_gauss, gauss)}
    return places.pop() if len(places) == 1 else None


# At import, which also loads ``numpy.random``: otherwise each forked worker would spend 10 ms on both.
_find_memory()
