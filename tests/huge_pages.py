"""Cheaper forks for the tests: most of a process's memory in huge pages, whose page table is short to copy."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

HUGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1


def collapse() -> None:
    """Join the small pages of this process's private memory; where the kernel cannot, they stay as they are."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    for line in maps.read_text().splitlines():
        found = re.match(r"(\w+)-(\w+) rw-p \w+ \S+ 0\s*(\[heap\])?$", line)  # heap, and what no file backs
        if found:
            first, end = -(-int(found[1], 16) // HUGE) * HUGE, int(found[2], 16) // HUGE * HUGE
            if first < end:
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), COLLAPSE)
