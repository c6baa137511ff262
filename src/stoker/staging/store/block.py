"""A sample of any type as a self-describing block of bytes.

A block consists, in little-endian, of: a crc32 of the sample's index and everything that follows; the length of the
type; the length of the block; the type; the size of each leaf; the leaves.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np

from .decode import Layout, layout
from .encode import ALIGN
from .spec import Leaf

_HEADER = struct.Struct("<IIQ")  # checksum, bytes of the type, bytes of the block
_CRC_BYTES = 4


def _padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def pack(type_spec: str, leaves: Sequence[Leaf], i: int, checked: bool = True) -> Leaf:
    """Packs sample ``i`` as a block. Its length is a multiple of ``ALIGN`` bytes."""
    text = type_spec.encode()
    sizes = struct.pack(f"<{len(leaves)}Q", *(x.nbytes for x in leaves))
    begin = _HEADER.size + len(text) + len(sizes)
    length = _padded(begin) + sum(_padded(x.nbytes) for x in leaves)
    block = np.empty(length, np.uint8)
    block[begin : _padded(begin)] = 0
    block[_HEADER.size : begin] = np.frombuffer(text + sizes, np.uint8)
    to = _padded(begin)
    for x in leaves:
        block[to : to + x.nbytes] = x
        block[to + x.nbytes : to + _padded(x.nbytes)] = 0
        to += _padded(x.nbytes)
    block[: _HEADER.size] = np.frombuffer(_HEADER.pack(0, len(text), length), np.uint8)
    if checked:
        block[:_CRC_BYTES] = np.frombuffer(_crc_of(block[:length], i).to_bytes(_CRC_BYTES, "little"), np.uint8)
    return block


def parts(heap: Leaf, offset: int, pickles: bool) -> tuple[Layout, list[Leaf]]:
    """Type and leaves of the sample at an offset of the heap. For a file, call ``is_intact`` first."""
    _, spec_bytes, length = _HEADER.unpack(heap[offset : offset + _HEADER.size].tobytes())
    body = heap[offset + _HEADER.size : offset + length]
    made = layout(body[:spec_bytes].tobytes().decode(), pickles)
    count = len(made.sizes)
    sizes = struct.unpack(f"<{count}Q", body[spec_bytes : spec_bytes + 8 * count].tobytes())
    to = _padded(_HEADER.size + spec_bytes + 8 * count) - _HEADER.size
    leaves: list[Leaf] = []
    for size in sizes:
        leaves.append(body[to : to + size])
        to += _padded(size)
    return made, leaves


def is_intact(heap: Leaf, offset: int, i: int) -> bool:
    """Whether the block at this offset is sample ``i`` exactly as it was written."""
    header = heap[offset : offset + _HEADER.size]
    if offset < 0 or len(header) < _HEADER.size:
        return False
    crc, _, length = _HEADER.unpack(header.tobytes())
    block = heap[offset : offset + length]
    return len(block) == length and bool(length >= _HEADER.size) and bool(_crc_of(block, i) == crc)


def _crc_of(block: Leaf, i: int) -> int:
    return zlib.crc32(block[_CRC_BYTES:].data, zlib.crc32(b"%d:" % i))
