"""Chunks of a dataset brought into memory before they are wanted: advice to storage, no reading.

A dataset says itself how, or is rows of a mapped file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from torch.utils.data import Subset

from ..core.errors import UsageError
from ..core.warn import warn_user

PIECE = 128 << 10  # bytes asked for at once: a kernel reads no more at one MADV_WILLNEED than its read-ahead window
MADV_POPULATE_READ = 22  # linux/mman.h, kernel 5.14; Python's mmap has no name for it
SCATTERED = 2  # a chunk of a Subset is read ahead while what lies between its first and last is not more than it

Range = tuple[int, int]


class Upcoming(NamedTuple):
    """What an epoch wants of storage now. Ranges are first and last index, both included.

    Attributes:
        resident: the chunks of the window.
        next: the chunk that comes in next; None when all are in, or were.
    """

    resident: tuple[Range, ...]
    next: Range | None


class Readahead:
    """Reads chunks before they are wanted, in one thread that ends with it.

    A dataset takes part by having ``read_ahead(first, last)``; indices, both included. Before the first index of a
    chunk is handed out, ``read_ahead`` has returned for it. It runs in the consumer's process and concerns what workers
    share: files and the page cache, not objects. A ``numpy.memmap`` needs no method; of a ``Subset`` it is the
    innermost dataset that counts, if the subset's indices lie close together.

    If the method fails, the consumer's thread warns when a step begins, and nothing more is read ahead in this epoch. A
    child forked meanwhile has no such thread and does without.

    Args:
        read: what the thread calls.
        indices: from the outermost Subset to the innermost.

    Example:
        >>> class Files(torch.utils.data.Dataset):
        ...     def __init__(self, paths):
        ...         self.paths = paths
        ...     def __len__(self):
        ...         return len(self.paths)
        ...     def __getitem__(self, i):
        ...         return self.paths[i].read_bytes()
        ...     def read_ahead(self, first, last):
        ...         for path in self.paths[first : last + 1]:
        ...             path.read_bytes()  # from now on in the page cache
    """

    def __init__(self, read: Callable[[int, int], object], indices: list[Sequence[int]]) -> None:
        self._read, self._indices = read, indices
        self._pid: int | None = os.getpid()  # None: closed
        self._reads: dict[Range, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1, "stoker-readahead")

    @classmethod
    def of(cls, dataset: object) -> Readahead | None:
        """None for a dataset that cannot be read ahead."""
        inner, indices = innermost(dataset)
        if mapped(inner):
            return cls(functools.partial(read_rows, inner), indices)
        # Not what __getattr__ finds: a dataset around another one may have other indices, or need no reading.
        if inspect.getattr_static(inner, "read_ahead", None) is None:
            return None
        return cls(inner.read_ahead, indices)

    def turn(self, upcoming: Upcoming) -> None:
        """A step begins: waits for its window, and has the next chunk read."""
        if self._pid != os.getpid():
            return
        try:
            old, self._reads = self._reads, {}
            for chunk in upcoming.resident if upcoming.next is None else (*upcoming.resident, upcoming.next):
                self._reads[chunk] = old.get(chunk) or self._pool.submit(self._call, chunk)
            for chunk in upcoming.resident:
                self._reads[chunk].result()
        except Exception as e:
            self.close()
            reason = str(e) if isinstance(e, _Scattered) else f"{type(e).__name__}: {e}"
            warn_user(f"No chunk is read ahead any more in this epoch: {reason}.")

    def close(self) -> None:
        """Waits for the call that runs; those that wait are not made. In a forked child it does nothing."""
        if self._pid != os.getpid():
            return
        self._pid = None
        with contextlib.suppress(RuntimeError):  # the thread itself has collected the iterator: it ends by itself
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _call(self, chunk: Range) -> None:
        first, last = chunk
        if self._indices:
            rows: Sequence[int] = range(first, last + 1)
            for indices in self._indices:
                rows = [int(indices[i]) for i in rows]
            first, last = min(rows), max(rows)
            if last - first >= SCATTERED * len(rows):
                raise _Scattered(
                    f"a chunk of {len(rows):,} of the Subset is scattered over {last - first + 1:,} samples of its "
                    f"dataset. Sorted indices lie together: Subset(dataset, sorted(subset.indices))"
                )
        self._read(first, last)


class _Scattered(Exception):
    pass


def innermost(dataset: Any) -> tuple[Any, list[Sequence[int]]]:
    """The dataset inside Subsets, and their indices."""
    indices = []
    while type(dataset) is Subset:
        indices.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, indices


def mapped(rows: object) -> TypeGuard[np.memmap[Any, Any]]:
    """Whether it is a file's rows, mapped, one after the other."""
    return (
        sys.platform == "linux"
        and type(rows) is np.memmap
        and isinstance(rows._mmap, mmap.mmap)  # type: ignore[attr-defined]
        and rows.ndim > 0
        and rows.nbytes > 0
        and bool(rows.flags.c_contiguous)
    )


@functools.cache
def _madvise() -> Any:
    # Not mmap.mmap.madvise, which keeps the interpreter's lock while it waits for the disk.
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise


def read_rows(array: object, first: int, last: int) -> None:
    """Brings rows of a mapped file into memory, and into this process' page table. For a ``read_ahead`` of your own.

    All of it is asked for at once (``MADV_WILLNEED``) and then waited for (``MADV_POPULATE_READ``, madvise(2); a kernel
    before 5.14 only asks). The interpreter's lock is not held.

    Args:
        array: a C-contiguous ``numpy.memmap``, on Linux.
        first, last: rows, both included.

    Raises:
        UsageError: another array, or rows it has not.
    """
    if not mapped(array):
        raise UsageError("rows are read ahead of a C-contiguous numpy.memmap, on Linux")
    if not 0 <= first <= last < len(array):
        raise UsageError(f"rows {first} to {last} of {len(array):,}")
    row = array.nbytes // len(array)
    begin, end = array.ctypes.data + first * row, array.ctypes.data + (last + 1) * row
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    for at in range(begin, end, PIECE):
        _madvise()(at, min(PIECE, end - at), mmap.MADV_WILLNEED)
    _madvise()(begin, end - begin, MADV_POPULATE_READ)
