"""The order of tasks: torch's samplers without a list of the whole epoch, and shuffles too long for a list."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from ..core.types import Index

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
CHUNK = 4096  # indices computed at once: 32 KB
LIST_LENGTH = 1024  # indices converted to Python ints at once; more would delay the first batch
SMALL = 1 << 16  # up to this length a permutation is drawn whole
END = object()
ROUNDS = 8  # even, so that both halves end where they started
TORCH_SAMPLERS = {kind: kind.__iter__ for kind in (BatchSampler, RandomSampler, SequentialSampler)}


class Task(NamedTuple):
    """The indices of one batch, and their place in the run."""

    epoch: int  # of the iterator, from 0
    number: int  # position in the sampler's order, from 0
    indices: Index  # yielded by the index sampler: a list of keys, one key, or Nones for an iterable dataset


class Permutation:
    """A keyed pseudo-random permutation of ``range(n)``: any element in constant time, without storing the permutation.

    A generalised Feistel network over Z_a x Z_b with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", CT-RSA 2002). ``a`` and ``b`` are near the square root of ``n``; there are eight rounds. The round
    function is SplitMix64's finaliser (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
    2014). Up to 65,536 elements, the permutation is drawn whole, because a network on few values is a poor shuffle.
    ``n``: 1 to 2**62.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation must have 1 to 2**62 elements, not {n}")
        self.n, self.key = n, key
        self._drawn: Ints | None = None
        generator = np.random.Generator(np.random.PCG64(key & (1 << 64) - 1))
        if n <= SMALL:
            self._drawn = generator.permutation(n)
            return
        a = math.isqrt(n) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-n // a))
        self._keys = generator.integers(0, 1 << 64, ROUNDS, np.uint64, endpoint=False)

    def at(self, places: npt.NDArray[np.integer]) -> Ints:
        """Returns the elements at ``places``, an integer array with values from 0 to n - 1, as an int64 array."""
        if self._drawn is not None:
            drawn: Ints = self._drawn[places]
            return drawn
        out = self._once(np.asarray(places).astype(np.uint64))
        while (outside := out >= self.n).any():  # a * b slightly exceeds n; walk on until inside
            out[outside] = self._once(out[outside])
        return out.astype(np.int64)

    def _once(self, x: Words) -> Words:
        a, b = self._a, self._b
        left, right = x % a, x // a
        for i, key in enumerate(self._keys):
            modulus = b if i & 1 else a
            left, right = right, (left + _mixed(right + key) % modulus) % modulus
        return left + right * a


def _mixed(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class FeistelSampler(RandomSampler):
    """Shuffles without a list: each epoch is a ``Permutation``, with a key drawn as ``RandomSampler`` draws its seed.

    For datasets so long that torch's order, which is drawn as a whole, takes seconds and gigabytes. The order differs
    from torch's for the same seed. ``DataLoader(shuffle="feistel")`` makes one.

    Args:
        data_source: anything with a length.
        generator: from which keys are drawn; None for torch's default generator.

    Example:
        >>> sampler = FeistelSampler(range(10**9))
        >>> first = next(iter(sampler))
    """

    def __init__(self, data_source: Sized, generator: torch.Generator | None = None) -> None:
        super().__init__(data_source, generator=generator)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._iter_lists())

    def _iter_lists(self, skip: int = 0) -> Iterator[list[int]]:
        n = len(self.data_source)
        key = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        permutation = Permutation(n, key)
        for at in range(skip, n, CHUNK):
            yield permutation.at(np.arange(at, min(at + CHUNK, n))).tolist()


FEISTEL = FeistelSampler.__iter__


def order(index_sampler: Iterable[Index], skip: int = 0) -> Iterator[Index] | None:
    """Yields the same items as ``iter(index_sampler)``, sooner and in less memory. Draws from the same generators at
    the same moments, but never makes a list of the whole epoch. Returns None for user samplers, which may notice when
    ``iter`` is called. ``skip``: number of indices, not batches, to draw and leave out."""
    sampler, size, drop_last = index_sampler, 0, False
    if type(index_sampler) is BatchSampler:
        sampler, size, drop_last = index_sampler.sampler, index_sampler.batch_size, index_sampler.drop_last
    if any(kind.__iter__ is not own for kind, own in TORCH_SAMPLERS.items()):
        return None  # other code has replaced torch's order
    if type(sampler) is RandomSampler and not sampler.replacement:
        lists = _shuffled(sampler, skip)
    elif type(sampler) is SequentialSampler:
        lists = _sequential(sampler, skip)
    elif type(sampler) is FeistelSampler and FeistelSampler.__iter__ is FEISTEL:
        lists = sampler._iter_lists(skip)
    else:
        return None
    indices = itertools.chain.from_iterable(lists)
    return in_batches(indices, size, drop_last) if size else indices


def in_batches(indices: Iterator[Index], size: int, drop_last: bool) -> Iterator[list[Index]]:
    """Groups any indices into batches as torch does."""
    while batch := [*itertools.islice(indices, size)]:
        if len(batch) < size and drop_last:
            return
        yield batch


def with_first_drawn(indices: Iterator[Index]) -> Iterator[Index]:
    """Returns the same indices, but makes the random draws for the first of them now."""
    first = next(indices, END)
    return iter(()) if first is END else itertools.chain([first], indices)


def _shuffled(sampler: RandomSampler, skip: int) -> Iterator[list[int]]:
    """Yields torch's order. Draws the last permutation even if it is not needed, because that moves the sampler's
    generator; a generator made here need not be moved."""
    n, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    whole, rest = divmod(sampler.num_samples, n)
    for _ in range(whole):
        yield from _lists_of(_permutation(n, generator), skip)
        skip = max(0, skip - n)
    if rest or sampler.generator is not None:
        yield from _lists_of(_permutation(n, generator)[:rest], skip)


def _permutation(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draws torch's permutation, in half the memory if 32 bits suffice: on a CPU, ``randperm`` draws the same values
    for any dtype (``randperm_cpu``, ATen/native/TensorFactories.cpp)."""
    small = n < 1 << 31 and generator.device.type == "cpu"
    return torch.randperm(n, generator=generator, dtype=torch.int32 if small else torch.int64)


def _lists_of(indices: torch.Tensor, skip: int) -> Iterator[list[int]]:
    for at in range(skip, len(indices), LIST_LENGTH):
        yield indices[at : at + LIST_LENGTH].tolist()


def _sequential(sampler: SequentialSampler, skip: int) -> Iterator[list[int]]:
    n = len(sampler.data_source)
    for at in range(skip, n, LIST_LENGTH):
        yield list(range(at, min(at + LIST_LENGTH, n)))
