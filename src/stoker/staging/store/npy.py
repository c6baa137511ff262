"""Files of numbers in one dimension, in NumPy's format 1.0 (NEP 1): how they begin, and reading one as bytes.

Reading is no use of a cache: nothing is mapped, written or evaluated.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from .encode import CacheError

MAGIC, PREAMBLE = b"\x93NUMPY\x01\x00", 10  # magic and version; with the length of the header
# NumPy's own parser takes any Python literal. Bytes of a number; count.
HEADER = re.compile(rb"\{'descr': '[<|][iu]([1248])', 'fortran_order': False, 'shape': \((\d{1,18}),\), \} *\n")


def beginning(dtype: np.dtype[Any], count: int) -> bytes:
    """What a file of so many numbers begins with."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    )
    return head.getvalue()


def begin_of(fd: int) -> int:
    """Where the numbers begin."""
    return PREAMBLE + int.from_bytes(os.pread(fd, 2, PREAMBLE - 2), "little")


def check_length(path: Path, fd: int, want: int) -> None:
    """Raises ``CacheError`` where a file has another length."""
    there = os.fstat(fd).st_size
    if there != want:
        words = "is truncated" if there < want else "is longer than it should be"
        raise CacheError(f"{path} {words}: {there:,} bytes of {want:,}")


def read(path: Path, at: int = 0, nbytes: int = 0) -> bytes:
    """Bytes of the numbers.

    Raises:
        CacheError: the file is not whole, or has fewer.
        OSError: it cannot be read.
    """
    fd = _open(path)
    try:
        begin = begin_of(fd)
        head = os.pread(fd, begin, 0)
        found = HEADER.fullmatch(head, PREAMBLE) if head.startswith(MAGIC) else None
        if found is None:
            raise CacheError(f"{path} begins otherwise than it should")
        check_length(path, fd, begin + int(found[1]) * int(found[2]))
        data = os.pread(fd, nbytes, begin + at)
    finally:
        os.close(fd)
    if len(data) != nbytes:
        raise CacheError(f"{path} is truncated")
    return data


def _open(path: Path) -> int:
    """For reading, without its counting as use where the file is ours (open(2), O_NOATIME)."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        return os.open(path, flags)
