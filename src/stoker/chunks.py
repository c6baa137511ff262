"""Chunked epochs, for datasets larger than memory: a window of chunks is shuffled together, and read ahead.

It hands out indices and gives advice about storage; it reads no sample itself.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import inspect
import itertools
import mmap
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import RandomSampler, Subset

from .errors import StokerWarning, UsageError
from .source import CHUNK, PIECED, Permutation

RESIDENT = 16  # chunks shuffled together, of at least 64: docs/notes/chunks.md
CHUNKS = 64  # a shorter dataset is cut into so many, so that the window and what is read ahead are 28 % of it
LARGEST = 4096  # samples in a chunk
LARGEST_BYTES = 16 << 20  # and bytes, where rows are mapped: beside reading them even a disk's seek is short
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


class ChunkSampler(RandomSampler):
    """A shuffle of which only ``resident`` chunks are open at a time, a chunk being consecutive indices.

    Chunks come in a random order. Each stays for ``resident`` steps, then the next one takes its place. Its samples
    fall into these steps at random, each for itself, and a step's samples are shuffled. So a step replaces one chunk,
    and ``resident`` are open: with the one that is read ahead and the one that just left, storage holds two more. The
    first and the last step take what would have fallen before and after the epoch. Each index comes once.

    Two-level shuffles: Xu et al., "In-Database Machine Learning with CorgiPile: Stochastic Gradient Descent without
    Full Data Shuffle", SIGMOD 2022, whose window is replaced as a whole. ``docs/notes/chunks.md`` has what is lost
    against a uniform shuffle, and why samples are not drawn from a reservoir.

    An epoch draws once from ``generator``, at its first index, as ``RandomSampler`` does for its seed. It keeps
    ``resident * chunk_size`` indices. Chunks are read ahead where the dataset can: see ``Readahead``.

    Args:
        data_source: anything with a length.
        chunk_size: samples in a chunk. None: 4096, or a 64th of the dataset if that is less, or of a memory map what
            16 MB hold.
        resident: chunks shuffled together. As many as there are make a uniform shuffle.
        generator: where seeds are drawn from; None is torch's default generator.

    Raises:
        UsageError: ``chunk_size`` or ``resident`` is less than 1 or no whole number.

    Example:
        >>> sampler = ChunkSampler(range(10**9), resident=64)
        >>> first = next(iter(sampler))
        >>> sampler.chunk_size, len(sampler.upcoming().resident)
        (4096, 64)
    """

    def __init__(
        self,
        data_source: Sized,
        chunk_size: int | None = None,
        resident: int = RESIDENT,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(data_source, generator=generator)
        if chunk_size is None:
            chunk_size = _size(data_source)
        for name, value in (("chunk_size", chunk_size), ("resident", resident)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: a whole number, at least 1")
        self.chunk_size, self.resident = chunk_size, resident
        self._upcoming = Upcoming((), None)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._pieces())

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkSampler:
        # Whoever measures the loader copies its sampler; the dataset is larger than memory.
        other = copy.copy(self)
        other.generator = copy.deepcopy(self.generator, memo)
        return other

    def upcoming(self) -> Upcoming:
        """The window of the iterator that moved last, and what comes next."""
        return self._upcoming

    def _pieces(self, skip: int = 0) -> Iterator[list[int]]:
        n, size = len(self.data_source), self.chunk_size
        key = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        chunks = -(-n // size)
        resident = min(self.resident, chunks)
        last = chunks - resident  # steps are 0 to last
        rng = np.random.Generator(np.random.PCG64((key, 1)))
        coming = _coming(Permutation(chunks, key), size, n)
        window: deque[Range] = deque()
        steps: deque[list[Any]] = deque([] for _ in range(resident))  # what falls into this step and those after it
        ahead = Readahead.of(self.data_source)
        try:
            gone = left = None
            following: Range | None = next(coming)
            for step in range(last + 1):
                for c in range(step + resident - 1 if step else 0, step + resident):
                    assert following is not None
                    window.append(following)
                    following = next(coming, None)
                    _deal(window[-1], c, step, last, steps, rng)
                self._upcoming = Upcoming(tuple(window), following)
                due = steps.popleft()
                steps.append([])
                count = sum(map(len, due))
                skipped = 0 < skip >= count  # nothing of this step is wanted, so nothing is read for it
                if ahead is not None and not skipped:
                    ahead.turn(self._upcoming, gone)
                if due:
                    indices = np.concatenate(due)
                    del due
                    rng.shuffle(indices)
                    for at in range(skip, count, CHUNK):
                        yield indices[at : at + CHUNK].tolist()
                skip = max(0, skip - count)
                gone, left = left, window.popleft()  # a step later: what was drawn last may still be on its way
                if skipped:
                    gone = left = None
        finally:
            if ahead is not None:
                ahead.close()


PIECED[ChunkSampler] = ChunkSampler.__iter__


def _coming(order: Permutation, size: int, n: int) -> Iterator[Range]:
    """The chunks, in the order in which they come in."""
    for at in range(0, order.n, CHUNK):
        for c in order.at(np.arange(at, min(at + CHUNK, order.n))).tolist():
            yield c * size, min(c * size + size, n) - 1


def _deal(chunk: Range, c: int, step: int, last: int, steps: deque[list[Any]], rng: Any) -> None:
    """Each sample of the c-th chunk into one of the steps in which it is in the window."""
    first, end = chunk
    when = rng.integers(c - len(steps) + 1, c + 1, end - first + 1)
    when = np.minimum(np.maximum(when, step), last) - step
    by_step = first + when.astype(np.min_scalar_type(len(steps))).argsort(kind="stable")  # 16 bits: a radix sort
    at = 0
    for k, count in enumerate(np.bincount(when).tolist()):
        if count:
            steps[k].append(by_step[at : at + count])
            at += count


def _size(dataset: Any) -> int:
    """Samples in a chunk, where nobody says."""
    size = max(1, min(LARGEST, -(-len(dataset) // CHUNKS)))
    rows, _ = _innermost(dataset)
    if _mapped(rows):
        size = max(1, min(size, LARGEST_BYTES // max(1, rows.nbytes // len(rows))))
    return size


# -- storage


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
        inner, indices = _innermost(dataset)
        if _mapped(inner):
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


def _innermost(dataset: Any) -> tuple[Any, list[Any]]:
    """The dataset inside Subsets, and their indices."""
    indices = []
    while type(dataset) is Subset:
        indices.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, indices


def _mapped(rows: Any) -> bool:
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
    if not _mapped(array):
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

    Args:
        array: a C-contiguous ``numpy.memmap``, on Linux.
        first, last: rows, both included.

    Raises:
        UsageError: another array, or rows it has not.
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


# -- quality


class Quality(NamedTuple):
    """How far an order is from a uniform shuffle, which has about 0, 0 and 1.

    Attributes:
        rank_correlation: Spearman's, of place and index ("The Proof and Measurement of Association between Two Things",
            1904). Over ``n`` samples a uniform shuffle has a standard deviation of 1/sqrt(n).
        distance: for each tenth of the data the Kolmogorov-Smirnov distance between where in the epoch its samples
            stand and everywhere alike; the mean of the ten. A uniform shuffle has 0.82/sqrt(n/10) (the mean of
            Kolmogorov's distribution, for a tenth drawn without replacement), no shuffle 0.7.
        neighbours: pairs of samples in a batch that come from the same chunk, on average over full batches, as a
            multiple of what a uniform shuffle has.
    """

    rank_correlation: float
    distance: float
    neighbours: float


def quality(order: Iterable[int], n: int, chunk_size: int | None = None, batch_size: int = 64) -> Quality:
    """Measures one epoch's order.

    Args:
        order: the indices of an epoch, at least 10, each at most once.
        n: length of the dataset.
        chunk_size: samples in a chunk, for ``neighbours``; None: ``ChunkSampler``'s for this length.
        batch_size: at least 2.

    Example:
        >>> quality(range(1000), 1000, chunk_size=100, batch_size=10)
        Quality(rank_correlation=1.0, distance=0.7, neighbours=10.090909090909)
    """
    indices = np.asarray(order if isinstance(order, np.ndarray) else list(order), np.int64)
    m = len(indices)
    rank = np.empty(m)
    rank[np.argsort(indices)] = np.arange(m)
    correlation = float(np.corrcoef(np.arange(m), rank)[0, 1])

    apart = []
    tenth = indices * 10 // n
    for d in range(10):
        at = np.flatnonzero(tenth == d)
        if len(at):
            seen = np.arange(len(at))
            above, below = (seen + 1) / len(at) - (at + 1) / m, at / m - seen / len(at)
            apart.append(max(abs(above).max(), abs(below).max()))

    chunk = indices // (chunk_size or _size(range(n)))
    full = m // batch_size
    batch = np.arange(full * batch_size) // batch_size
    together = np.unique(batch * (chunk.max() + 1) + chunk[: len(batch)], return_counts=True)[1]
    pairs = float((together * (together - 1)).sum()) / max(1, full)
    every = np.bincount(chunk).astype(float)
    uniform = batch_size * (batch_size - 1) * float((every * (every - 1)).sum()) / (m * (m - 1))
    ratio = pairs / uniform if uniform else 1.0
    return Quality(*(round(x, 12) for x in (correlation, float(np.mean(apart)), ratio)))
