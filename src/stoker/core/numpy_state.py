"""NumPy's process-wide generator, saved and put back by its memory.

``numpy.random.get_state`` and ``set_state`` go number by number, 30 us each, which is half of what a small batch takes.
Where the generator's memory does not look as NumPy documents it (``BitGenerator.ctypes``), these are used.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, cast

import numpy as np

_BYTES = 625 * 4  # 624 words, and the position in them
_bits: Any = None
_memory: Any = None
_known: bytes = b""  # a state of which it is known that no half of a pair of normal numbers waits beside it


def save() -> Any:
    """The state, for ``restore``. Whoever draws and then puts exactly this position back with the second half of a pair
    waiting, between two calls, is not noticed."""
    global _known
    memory = _look()
    if memory is None:
        return np.random.get_state()
    with _bits.lock:
        raw: bytes = memory.raw
    if raw != _known:
        state: Any = np.random.get_state()
        if state[3]:
            return state
        _known = raw
    return raw


def restore(saved: Any) -> None:
    """Puts a state back."""
    if type(saved) is bytes and _look() is None:  # somebody has put another generator there
        key, position = np.frombuffer(saved[:-4], np.uint32), int.from_bytes(saved[-4:], sys.byteorder)
        saved = ("MT19937", key, position)
    if type(saved) is not bytes:
        np.random.set_state(saved)
        return
    np.random.seed(0)  # forgets the half of a pair
    with _bits.lock:
        _memory.raw = saved


def _look() -> Any:
    """The generator's memory; None where it cannot be used."""
    global _bits, _memory
    bits = np.random.mtrand._rand._bit_generator
    if bits is not _bits:
        _bits, _memory = bits, None
        if type(bits) is np.random.MT19937:
            memory = (ctypes.c_char * _BYTES).from_address(bits.ctypes.state_address)
            _, key, position, *_ = cast(tuple[Any, ...], np.random.get_state())
            if memory.raw == key.tobytes() + int(position).to_bytes(4, sys.byteorder):
                _memory = memory
    return _memory
