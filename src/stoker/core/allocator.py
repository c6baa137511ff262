"""Keeps memory that this process frees, instead of returning it to the kernel.

glibc returns freed memory to the kernel as soon as a few hundred contiguous kilobytes are free, and maps it again for
the next sample. Each 4 KB page then costs a page fault of 1 us, more than copying the page. This took 10 to 25 % of an
epoch if the script's own process makes the samples.
"""

from __future__ import annotations

import ctypes
import functools
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
KEPT_BYTES = 128 << 20  # free memory beyond this goes back to the kernel
HEAP_BYTES = 32 << 20  # larger blocks get a mapping of their own; glibc raises its dynamic limit up to this


@functools.cache
def keep_freed_memory() -> bool:
    """Sets glibc's limits once per process. Returns False with another C library, or if the user has set the limits."""
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or _VARIABLES & os.environ.keys():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
