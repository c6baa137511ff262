"""Maps shared memory without spending a descriptor on each mapping.

``mmap.mmap`` keeps a duplicate of the file's descriptor for as long as it lives (Python 3.13 can be told not to). A
consumer that keeps a thousand batches would need a thousand descriptors, the usual limit for a whole process. mmap(2)
itself needs the descriptor only during the call.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any, TypeAlias

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, kernel 5.14; Python's mmap has no names for them
Memory: TypeAlias = Any  # a ctypes array of bytes, which NumPy's stubs do not accept as a buffer; views keep it mapped
_PUNCH_HOLE_KEEP_SIZE = 3  # linux/falloc.h: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = pointer, size, integer, integer, integer, ctypes.c_long
    libc.mmap.restype = pointer
    libc.munmap.argtypes = pointer, size
    libc.madvise.argtypes = pointer, size, integer
    libc.fallocate.argtypes = integer, integer, ctypes.c_int64, ctypes.c_int64
    return libc


def map_shared(fd: int, length: int, offset: int = 0) -> Memory:
    """Maps ``length`` bytes of a file, readable, writable and shared with other processes. Returns a ctypes array of
    bytes, unmapped when its last view dies. Raises OSError if memory, address space or mappings are exhausted."""
    libc = _libc()
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
    memory = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(memory, libc.munmap, address, length).atexit = False  # process exit unmaps it anyway
    return memory


def populate(memory: Memory, length: int, used: bool = False) -> None:
    """Populates the first ``length`` bytes at once, with huge pages if the system allows them for shared memory: one
    call instead of one fault per page, the largest cost of fresh memory. Both are only advice (madvise(2)), which a
    kernel may not know. ``used``: the pages exist and only need mapping. Reading then maps sixteen at a time, as
    writable as writing would. For pages that do not exist yet, reading takes twice as long."""
    libc, address = _libc(), ctypes.addressof(memory)
    libc.madvise(address, ctypes.sizeof(memory), mmap.MADV_HUGEPAGE)  # obeyed only if shmem_enabled is "advise"
    advice = MADV_POPULATE_READ if used else MADV_POPULATE_WRITE
    libc.madvise(address, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE, advice)


def punch(fd: int, offset: int, length: int) -> None:
    """Returns a file's pages to the system; the file keeps its size (fallocate(2)). A failure only costs memory."""
    _libc().fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, length)
