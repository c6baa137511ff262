"""Keeps memory that was freed in this process.

glibc gives freed memory back to the kernel as soon as a few hundred kilobytes of it lie together, and takes it again
for the next sample. Each page of 4 KB then costs a page fault, 1 us, which is more than copying it. For samples
that are made in the script's own process this was 10 to 25 % of an epoch.
"""

from __future__ import annotations

import ctypes
import functools
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
KEPT_BYTES = 128 << 20  # at most: what is free beyond that goes back to the kernel
HEAP_BYTES = 32 << 20  # larger blocks are mapped, each by itself; glibc itself raises its limit up to this


@functools.cache
def keep_freed_memory() -> bool:
    """Sets glibc's limits, once a process. Returns whether they were set: not for other C libraries, nor where the
    user has set them."""
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or _VARIABLES & os.environ.keys():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
