"""A sample of any type as a self-describing block of bytes.

A block consists, in little-endian, of: a crc32 of the sample's index and everything that follows; the length of the
type; the length of the block; the type; the size of each leaf; the leaves.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .decode import Layout, layout
from .encode import ALIGN, CacheError
from .spec import Leaf

_HEADER = struct.Struct("<IIQ")  # checksum, bytes of the type, bytes of the block
_CRC_BYTES = 4
PIECE = 1 << 20  # bytes that are read at once to check a block


class Readable(Protocol):
    """An array of bytes, or a file that is read slice by slice."""

    def __len__(self) -> int: ...
    def __getitem__(self, wanted: slice, /) -> Leaf: ...


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
        crc = zlib.crc32(block[_CRC_BYTES:].data, zlib.crc32(b"%d:" % i))
        block[:_CRC_BYTES] = np.frombuffer(crc.to_bytes(_CRC_BYTES, "little"), np.uint8)
    return block


def parts(heap: Readable, offset: int, pickles: bool) -> tuple[Layout, list[Leaf]]:
    """Type and leaves of the sample at an offset of the heap. For a file, call ``is_intact`` first. Raises CacheError
    if the type is invalid, or does not have these leaves."""
    _, spec_bytes, length = _HEADER.unpack(heap[offset : offset + _HEADER.size].tobytes())
    body = heap[offset + _HEADER.size : offset + length]
    try:
        made = layout(str(body[:spec_bytes].data, "utf-8"), pickles)
    except UnicodeDecodeError as e:
        raise CacheError(f"invalid sample type ({e})") from e
    count = len(made.sizes)
    sizes = struct.unpack(f"<{count}Q", body[spec_bytes : spec_bytes + 8 * count].tobytes())
    to = _padded(_HEADER.size + spec_bytes + 8 * count) - _HEADER.size
    leaves: list[Leaf] = []
    for size, wanted in zip(sizes, made.sizes, strict=True):
        if wanted not in (None, size) or to + size > len(body):
            raise CacheError(f"a leaf of {size:,} bytes does not fit its type")
        leaves.append(body[to : to + size])
        to += _padded(size)
    return made, leaves


def is_intact(heap: Readable, end: int, offset: int, i: int) -> bool:
    """Whether the block at this offset is sample ``i`` exactly as it was written, before the offset ``end``."""
    end = min(end, len(heap))
    if offset < 0 or offset + _HEADER.size > end:
        return False
    crc, _, length = _HEADER.unpack(heap[offset : offset + _HEADER.size].tobytes())
    if length < _HEADER.size or offset + length > end:
        return False
    found = zlib.crc32(b"%d:" % i)
    for at in range(offset + _CRC_BYTES, offset + length, PIECE):  # a damaged length may be that of the whole file
        found = zlib.crc32(heap[at : min(at + PIECE, offset + length)].data, found)
    return bool(found == crc)
