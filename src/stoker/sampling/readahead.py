"""Chunks of a dataset brought into memory before they are wanted, and let go afterwards: advice to storage, no reading.

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
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Subset

from ..core.errors import StokerWarning, UsageError

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
    """Reads chunks before they are wanted and drops them afterwards, in one thread that ends with it.

    A dataset takes part by having ``read_ahead(first, last)``, and ``drop(first, last)`` if it likes; indices, both
    included. Before the first index of a chunk is handed out, ``read_ahead`` has returned for it. ``drop`` is called
    one step after the last index was, when a loader's workers will have read it; they might not, so it is advice. Both
    run in the consumer's process and concern what workers share: files and the page cache, not objects. What is in
    the window at the end of an epoch, or at a break, is not dropped. A ``numpy.memmap`` needs no methods; of a
    ``Subset`` it is the innermost dataset that counts, if the subset's indices lie close together.

    If a method fails there is a ``StokerWarning`` in the consumer's thread when a step begins, and nothing more is read
    ahead in this epoch. A child forked meanwhile has no such thread and does without.

    Args:
        read, drop: what the thread calls; ``drop`` may be None.
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

    def __init__(
        self, read: Callable[[int, int], Any], drop: Callable[[int, int], Any] | None, indices: list[Any]
    ) -> None:
        self._read, self._drop, self._indices = read, drop, indices
        self._pid: int | None = os.getpid()  # None: closed
        self._reads: dict[Range, Future[Any]] = {}
        self._dropped: Future[Any] | None = None
        self._pool = ThreadPoolExecutor(1, "stoker-readahead")

    @classmethod
    def of(cls, dataset: Any) -> Readahead | None:
        """None for a dataset that cannot be read ahead."""
        inner, indices = innermost(dataset)
        if mapped(inner):
            return cls(functools.partial(read_rows, inner), functools.partial(drop_rows, inner), indices)
        # Not what __getattr__ finds: a dataset around another one may have other indices, or need no reading.
        if inspect.getattr_static(inner, "read_ahead", None) is None:
            return None
        drop = inner.drop if inspect.getattr_static(inner, "drop", None) is not None else None
        return cls(inner.read_ahead, drop, indices)

    def turn(self, upcoming: Upcoming, gone: Range | None) -> None:
        """A step begins: waits for its window, and has the next chunk read, after ``gone`` was dropped."""
        if self._pid != os.getpid():
            return
        try:
            for chunk in upcoming.resident:
                if chunk not in self._reads:
                    self._reads[chunk] = self._pool.submit(self._call, self._read, chunk)
            for chunk in upcoming.resident:
                self._reads[chunk].result()
            if self._dropped is not None:
                self._dropped.result()  # it was asked for before the newest of these
            if gone is not None:
                del self._reads[gone]
                if self._drop is not None:
                    self._dropped = self._pool.submit(self._call, self._drop, gone)
            if upcoming.next is not None:
                self._reads[upcoming.next] = self._pool.submit(self._call, self._read, upcoming.next)
        except Exception as e:
            self.close()
            words = str(e) if isinstance(e, _Scattered) else f"{type(e).__name__}: {e}"
            warnings.warn(f"No chunk is read ahead any more in this epoch: {words}.", StokerWarning, stacklevel=3)

    def close(self) -> None:
        """Waits for the call that runs; those that wait are not made. In a forked child: nothing."""
        if self._pid != os.getpid():
            return
        self._pid = None
        with contextlib.suppress(RuntimeError):  # the thread itself has collected the iterator: it ends by itself
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _call(self, what: Callable[[int, int], Any], chunk: Range) -> None:
        first, last = chunk
        if self._indices:
            rows: Any = range(first, last + 1)
            for indices in self._indices:
                rows = [int(indices[i]) for i in rows]
            first, last = min(rows), max(rows)
            if last - first >= SCATTERED * len(rows):
                raise _Scattered(
                    f"a chunk of {len(rows):,} of the Subset is scattered over {last - first + 1:,} samples of its "
                    f"dataset. Sorted indices lie together: Subset(dataset, sorted(subset.indices))"
                )
        what(first, last)


class _Scattered(Exception):
    pass


def innermost(dataset: Any) -> tuple[Any, list[Any]]:
    """The dataset inside Subsets, and their indices."""
    indices = []
    while type(dataset) is Subset:
        indices.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, indices


def mapped(rows: Any) -> bool:
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


def _bytes_of(array: Any, first: int, last: int) -> tuple[int, int]:
    """Where rows begin and end in this process. Checked, for what is dropped beside a mapping is lost."""
    if not mapped(array):
        raise UsageError("rows are read ahead of a C-contiguous numpy.memmap, on Linux")
    if not 0 <= first <= last < len(array):
        raise UsageError(f"rows {first} to {last} of {len(array):,}")
    row = array.nbytes // len(array)
    return array.ctypes.data + first * row, array.ctypes.data + (last + 1) * row


def read_rows(array: Any, first: int, last: int) -> None:
    """Brings rows of a mapped file into memory, and into this process' page table. For a ``read_ahead`` of your own.

    All of it is asked for at once (``MADV_WILLNEED``) and then waited for (``MADV_POPULATE_READ``, madvise(2); a kernel
    before 5.14 only asks). The interpreter's lock is not held.

    Args:
        array: a C-contiguous ``numpy.memmap``, on Linux.
        first, last: rows, both included.

    Raises:
        UsageError: another array, or rows it has not.
    """
    begin, end = _bytes_of(array, first, last)
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    for at in range(begin, end, PIECE):
        _madvise()(at, min(PIECE, end - at), mmap.MADV_WILLNEED)
    _madvise()(begin, end - begin, MADV_POPULATE_READ)


def drop_rows(array: Any, first: int, last: int) -> None:
    """Lets rows of a mapped file go: from this process, and from the page cache unless another process has them mapped
    (madvise(2), posix_fadvise(2)). Nothing written is lost; pages that other rows share stay.

    Arguments and errors are ``read_rows``'s.
    """
    begin, end = _bytes_of(array, first, last)
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if array.mode == "c" or begin >= end:
        return  # "c": pages written to are this process' alone, and dropped they would be lost
    _madvise()(begin, end - begin, mmap.MADV_DONTNEED)
    start = np.frombuffer(array._mmap, np.uint8).ctypes.data  # where the mapping begins
    at = begin - start + array.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with contextlib.suppress(OSError, TypeError):  # a file without a name, or gone: the kernel drops it when it must
        fd = os.open(array.filename, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, at, end - begin, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
