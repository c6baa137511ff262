"""Chunked epochs, for datasets larger than memory: a window of chunks is shuffled together.

It hands out indices and reads nothing: a thread that read chunks ahead was no faster (docs/notes/chunks.md).
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Sized
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import RandomSampler

from ..core.dataset_tree import without_subsets
from ..core.errors import UsageError
from .order import CHUNK, OWN_SAMPLERS, Ints, Permutation

Range: TypeAlias = tuple[int, int]  # first and last index, both included
RESIDENT = 64  # chunks shuffled together, of at least 256: as many as a batch has samples (docs/notes/chunks.md)
CHUNKS = 256  # a shorter dataset is cut into as many, so that the window is a quarter of it
LARGEST = 1024  # samples in a chunk
LARGEST_BYTES = 4 << 20  # and bytes, where rows are mapped: enough that reading them is what takes time, not finding


class ChunkSampler(RandomSampler):
    """A shuffle of which only ``resident`` chunks are open at a time, a chunk being consecutive indices.

    Chunks come in a random order. Each stays for ``resident`` steps, then the next one takes its place. Its samples
    fall into these steps at random, each for itself, and a step's samples are shuffled. So a step replaces one chunk,
    and ``resident`` are open. The first and the last step take what would have fallen before and after the epoch.
    Each index comes once.

    Two-level shuffles: Xu et al., "In-Database Machine Learning with CorgiPile: Stochastic Gradient Descent without
    Full Data Shuffle", SIGMOD 2022, whose window is replaced as a whole. ``docs/notes/chunks.md`` has what is lost
    against a uniform shuffle, and why samples are not drawn from a reservoir.

    An epoch draws once from ``generator``, at its first index, as ``RandomSampler`` does for its seed. It keeps
    ``resident * chunk_size`` indices.

    Args:
        data_source: anything with a length.
        chunk_size: samples in a chunk. None: 1024, or a 256th of the dataset if that is less, or of a memory map what
            4 MB hold.
        resident: chunks shuffled together. As many as there are make a uniform shuffle.
        generator: where seeds are drawn from; None is torch's default generator.

    Raises:
        UsageError: ``chunk_size`` or ``resident`` is less than 1 or no whole number.

    Example:
        >>> sampler = ChunkSampler(range(10**9), resident=16)
        >>> first = next(iter(sampler))
        >>> sampler.chunk_size
        1024
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

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._iter_lists())

    def __deepcopy__(self, memo: dict[int, object]) -> ChunkSampler:
        # ``stoker tune`` copies the sampler of a loader that it measures; the dataset is larger than memory.
        other = copy.copy(self)
        other.generator = copy.deepcopy(self.generator, memo)
        return other

    def _iter_lists(self, skip: int = 0) -> Iterator[list[int]]:
        n, size = len(self.data_source), self.chunk_size
        key = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        chunks = -(-n // size)
        resident = min(self.resident, chunks)
        last = chunks - resident  # steps are 0 to last
        rng = np.random.Generator(np.random.PCG64((key, 1)))
        coming = _coming(Permutation(chunks, key), size, n)
        steps: deque[list[Ints]] = deque([] for _ in range(resident))  # what falls into this step and those after it
        for step in range(last + 1):
            for c in range(step + resident - 1 if step else 0, step + resident):
                _deal(next(coming), c, step, last, steps, rng)
            due = steps.popleft()
            steps.append([])
            count = sum(map(len, due))
            if due:
                indices = np.concatenate(due)
                del due
                rng.shuffle(indices)
                for at in range(skip, count, CHUNK):
                    yield indices[at : at + CHUNK].tolist()
            skip = max(0, skip - count)


OWN_SAMPLERS[ChunkSampler] = ChunkSampler.__iter__


def _coming(order: Permutation, size: int, n: int) -> Iterator[Range]:
    for at in range(0, order.n, CHUNK):
        for c in order.at(np.arange(at, min(at + CHUNK, order.n))).tolist():
            yield c * size, min(c * size + size, n) - 1


def _deal(chunk: Range, c: int, step: int, last: int, steps: deque[list[Ints]], rng: np.random.Generator) -> None:
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


def _size(dataset: Sized) -> int:
    """The default number of samples in a chunk."""
    size = max(1, min(LARGEST, -(-len(dataset) // CHUNKS)))
    rows = without_subsets(dataset)
    if type(rows) is np.memmap and rows.ndim and len(rows) and rows.flags.c_contiguous:
        size = max(1, min(size, LARGEST_BYTES // max(1, rows.nbytes // len(rows))))
    return size
