"""A sample of any make as one block of bytes, which says itself what it is.

crc32 of all that follows and of which sample it is; bytes of words, the highest bit set where the rest is compressed;
bytes of the whole; then words, the size of each leaf, leaves. Little-endian. Compressed is zlib (RFC 1950), level 1:
higher levels cost more than they bring (``docs/notes/staging.md``).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .decode import layout
from .encode import ALIGN, Leaf

LEVEL = 1
_BLOB = struct.Struct("<IIQ")
_AFTER = 4  # bytes of the checksum itself
_SQUEEZED = 1 << 31


def _padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def pack(words: str, leaves: Sequence[Leaf], i: int, squeeze: bool, checked: bool = True) -> np.ndarray[Any, Any]:
    """Sample ``i`` as a block, a multiple of ``ALIGN`` bytes; with a checksum where one is wanted."""
    text = words.encode()
    sizes = struct.pack(f"<{len(leaves)}Q", *(x.nbytes for x in leaves))
    begin = _BLOB.size + len(text) + len(sizes)
    n = _padded(begin) + sum(_padded(x.nbytes) for x in leaves)
    blob = np.empty(n, np.uint8)
    blob[begin : _padded(begin)] = 0
    blob[_BLOB.size : begin] = np.frombuffer(text + sizes, np.uint8)
    to = _padded(begin)
    for x in leaves:
        blob[to : to + x.nbytes] = x
        blob[to + x.nbytes : to + _padded(x.nbytes)] = 0
        to += _padded(x.nbytes)
    flag = 0
    if squeeze:
        small = zlib.compress(blob[_BLOB.size :].data, LEVEL)
        whole = _BLOB.size + len(small)
        if _padded(whole) < n:
            blob, n, flag = np.zeros(_padded(whole), np.uint8), whole, _SQUEEZED
            blob[_BLOB.size : n] = np.frombuffer(small, np.uint8)
    blob[: _BLOB.size] = np.frombuffer(_BLOB.pack(0, len(text) | flag, n), np.uint8)
    if checked:
        blob[:_AFTER] = np.frombuffer(_crc_of(blob[:n], i).to_bytes(_AFTER, "little"), np.uint8)
    return blob


def unpack(heap: np.ndarray[Any, Any], at: int, trusted: bool) -> Any:
    """The sample at an offset of the heap; in a file only where it is ``intact``."""
    _, n_words, n = _BLOB.unpack(heap[at : at + _BLOB.size].tobytes())
    body = heap[at + _BLOB.size : at + n]
    if n_words & _SQUEEZED:
        n_words ^= _SQUEEZED
        body = np.frombuffer(zlib.decompress(body.data), np.uint8)
    made = layout(body[:n_words].tobytes().decode(), trusted)
    count = len(made.sizes)
    sizes = struct.unpack(f"<{count}Q", body[n_words : n_words + 8 * count].tobytes())
    to, leaves = _padded(_BLOB.size + n_words + 8 * count) - _BLOB.size, []
    for size in sizes:
        leaves.append(body[to : to + size])
        to += _padded(size)
    return made.put(leaves)


def _crc_of(blob: np.ndarray[Any, Any], i: int) -> int:
    return zlib.crc32(blob[_AFTER:].data, zlib.crc32(b"%d:" % i))


def intact(heap: np.ndarray[Any, Any], at: int, i: int) -> bool:
    """Whether sample ``i`` lies at this offset as it was written."""
    head = heap[at : at + _BLOB.size]
    if at < 0 or len(head) < _BLOB.size:
        return False
    crc, _, n = _BLOB.unpack(head.tobytes())
    blob = heap[at : at + n]
    return len(blob) == n and bool(n >= _BLOB.size) and bool(_crc_of(blob, i) == crc)
