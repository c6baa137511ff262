"""A sample of any make as one block of bytes, which says itself what it is."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .leaves import ALIGN, Leaf, layout

_BLOB = struct.Struct("<IIQ")  # crc32 of what follows, bytes of words, bytes of the whole


def _padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def packed_size(words: str, leaves: Sequence[Leaf]) -> int:
    """Bytes of a sample in the heap."""
    return _padded(_BLOB.size + len(words.encode()) + 8 * len(leaves)) + sum(_padded(x.nbytes) for x in leaves)


def pack(heap: np.ndarray[Any, Any], at: int, words: str, leaves: Sequence[Leaf], i: int) -> None:
    """Writes sample ``i`` to the heap: crc32, what it is made of, the size of each leaf, leaves; little-endian."""
    text = words.encode()
    sizes = struct.pack(f"<{len(leaves)}Q", *(x.nbytes for x in leaves))
    n = packed_size(words, leaves)
    blob = heap[at : at + n]
    begin = _BLOB.size + len(text) + len(sizes)
    blob[_BLOB.size : begin] = np.frombuffer(text + sizes, np.uint8)
    to = _padded(begin)
    blob[begin:to] = 0
    for x in leaves:
        blob[to : to + x.nbytes] = x
        blob[to + x.nbytes : to + _padded(x.nbytes)] = 0
        to += _padded(x.nbytes)
    head = _BLOB.pack(_crc_of(blob, i), len(text), n)
    blob[: _BLOB.size] = np.frombuffer(head, np.uint8)


def unpack(heap: np.ndarray[Any, Any], at: int, trusted: bool) -> Any:
    """The sample at an offset of the heap.

    In a file only what is ``intact``.
    """
    _, n_words, n = _BLOB.unpack(heap[at : at + _BLOB.size].tobytes())
    blob = heap[at : at + n]
    made = layout(blob[_BLOB.size : _BLOB.size + n_words].tobytes().decode(), trusted)
    count, begin = len(made.sizes), _BLOB.size + n_words
    sizes = struct.unpack(f"<{count}Q", blob[begin : begin + 8 * count].tobytes())
    to, leaves = _padded(begin + 8 * count), []
    for size in sizes:
        leaves.append(blob[to : to + size])
        to += _padded(size)
    return made.put(leaves)


def _crc_of(blob: np.ndarray[Any, Any], i: int) -> int:
    return zlib.crc32(blob[_BLOB.size :].data, zlib.crc32(b"%d:" % i))


def intact(heap: np.ndarray[Any, Any], at: int, i: int) -> bool:
    """Whether sample ``i`` lies at this offset as it was written."""
    head = heap[at : at + _BLOB.size]
    if at < 0 or len(head) < _BLOB.size:
        return False
    crc, _, n = _BLOB.unpack(head.tobytes())
    blob = heap[at : at + n]
    return len(blob) == n and bool(n >= _BLOB.size) and bool(_crc_of(blob, i) == crc)
