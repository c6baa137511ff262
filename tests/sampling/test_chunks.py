"""Chunked epochs: each index once, a window that holds, and the quality that is stated."""

from __future__ import annotations

import copy
import gc
import math
import os
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Subset, TensorDataset

import stoker
from benchmarks.quality import quality
from stoker.core.errors import UsageError
from stoker.sampling.chunks import ChunkSampler

SEED = int(os.environ.get("STOKER_SEED", "0"))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def most_open(order: list[int], size: int) -> int:
    """Chunks that were begun and not finished, at most."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, i in enumerate(order):
        first.setdefault(i // size, at)
        last[i // size] = at
    change = Counter(first.values())
    change.subtract(at + 1 for at in last.values())
    now = most = 0
    for at in sorted(change):
        now += change[at]
        most = max(most, now)
    return most


# -- the order


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 300) | st.integers(4000, 9000),
    size=st.integers(1, 40) | st.integers(1, 10_000) | st.none(),
    resident=st.integers(1, 20) | st.integers(1, 1000),
    seed=st.integers(0, 1 << 32),
)
@pytest.mark.slow
def test_an_epoch_has_each_index_once_and_a_window(n: int, size: int | None, resident: int, seed: int) -> None:
    sampler = ChunkSampler(range(n), size, resident, seeded(seed))
    order = list(sampler)
    assert len(sampler) == n
    assert sorted(order) == list(range(n))
    assert all(type(i) is int for i in order[:3])
    assert most_open(order, sampler.chunk_size) <= resident
    assert list(ChunkSampler(range(n), size, resident, seeded(seed))) == order


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 500), size=st.integers(1, 40), resident=st.integers(1, 20), own=st.booleans())
def test_an_epoch_draws_once_as_torchs_sampler_draws_its_seed(n: int, size: int, resident: int, own: bool) -> None:
    """At the first index, from ``generator`` or torch's default; NumPy's and Python's are left alone."""
    numpy: Any = np.random.get_state()
    torch.manual_seed(SEED)
    generator = seeded(SEED + 1) if own else None
    it = iter(ChunkSampler(range(n), size, resident, generator))
    drawn_from = torch.default_generator if generator is None else generator
    other = seeded(SEED + own)
    assert torch.equal(drawn_from.get_state(), other.get_state())
    next(it)
    torch.empty((), dtype=torch.int64).random_(generator=other)
    assert torch.equal(drawn_from.get_state(), other.get_state())
    list(it)
    assert torch.equal(drawn_from.get_state(), other.get_state())
    if own:
        assert torch.equal(torch.get_rng_state(), seeded(SEED).get_state())
    assert str(np.random.get_state()) == str(numpy)


def test_epochs_and_seeds_differ() -> None:
    sampler = ChunkSampler(range(1000), 20, 5, seeded(SEED))
    first, second = list(sampler), list(sampler)
    assert first != second
    assert list(ChunkSampler(range(1000), 20, 5, seeded(SEED + 1))) != first
    torch.manual_seed(SEED)
    assert list(ChunkSampler(range(1000), 20, 5)) == first


@pytest.mark.parametrize(("size", "resident"), [(4, 1), (2, 2), (1, 4), (3, 9), (1, 1)])
@pytest.mark.few(1)
def test_all_resident_or_chunks_of_one_are_a_uniform_shuffle(size: int, resident: int) -> None:
    """Each of the 24 orders of four, as often as chance has it (chi-square, 23 degrees: 49.7 is one in a thousand)."""
    generator = seeded(1)
    counts = Counter(tuple(ChunkSampler(range(4), size, resident, generator)) for _ in range(2400))
    assert len(counts) == 24
    assert sum((c - 100) ** 2 / 100 for c in counts.values()) < 49.7


@pytest.mark.slow
def test_memory_is_the_windows() -> None:
    size, resident = 1024, 64
    it = iter(ChunkSampler(range(10**10), size, resident, seeded(SEED)))
    next(it)
    gc.collect()
    tracemalloc.start()
    try:
        it = iter(ChunkSampler(range(10**10), size, resident, seeded(SEED)))
        assert len(set(islice(it, 500_000))) == 500_000
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    seen = 500_000 * 32 + (32 << 20)  # the set above: ints, and a table that doubles
    assert most < seen + 4 * 8 * size * resident


@pytest.mark.parametrize("kw", [{"chunk_size": 0}, {"resident": 0}, {"chunk_size": 2.0}, {"resident": True}])
def test_wrong_arguments(kw: Any) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(kw))}=.*at least 1"):
        ChunkSampler(range(10), **kw)


def test_the_size_of_chunks_where_nobody_says(tmp_path: Path) -> None:
    sizes = {n: ChunkSampler(range(n)).chunk_size for n in (1, 256, 257, 6400, 10**6, 10**9)}
    assert sizes == {1: 1, 256: 1, 257: 2, 6400: 25, 10**6: 1024, 10**9: 1024}
    rows: Any = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(64_000, 1 << 17))  # 8 GB, sparse
    assert ChunkSampler(rows).chunk_size == 32  # 4 MB
    assert ChunkSampler(Subset(rows, range(1000))).chunk_size == 4


# -- quality


def test_quality_is_what_it_says() -> None:
    rng = np.random.default_rng(SEED)
    n, size, batch = 210, 15, 8
    order = rng.permutation(n)
    got = quality(order.tolist(), n, size, batch)
    spearman = 1 - 6 * sum((at - int(i)) ** 2 for at, i in enumerate(order)) / (n * (n * n - 1))
    assert got.rank_correlation == pytest.approx(spearman)
    apart = []
    for tenth in range(10):
        inside = [int(i) * 10 // n == tenth for i in order]
        apart.append(max(abs(sum(inside[:k]) / sum(inside) - k / n) for k in range(n + 1)))
    assert got.distance == pytest.approx(np.mean(apart))
    pairs = [
        sum(batch_[a] // size == batch_[b] // size for a in range(batch) for b in range(a))
        for batch_ in order[: n // batch * batch].reshape(-1, batch)
    ]
    chance = (size - 1) / (n - 1)
    assert got.neighbours == pytest.approx(np.mean(pairs) / (batch * (batch - 1) / 2 * chance))


@pytest.mark.slow
def test_quality_of_what_is_known() -> None:
    n = 100_000
    assert quality(range(n), n)[:2] == (1.0, 0.7)
    assert quality(range(n - 1, -1, -1), n).rank_correlation == -1.0
    uniform = [quality(torch.randperm(n, generator=seeded(s)).numpy(), n) for s in range(10)]
    assert all(abs(q.rank_correlation) < 4 / math.sqrt(n) for q in uniform)
    assert np.mean([q.distance for q in uniform]) == pytest.approx(0.82 / math.sqrt(n / 10), rel=0.1)
    assert np.mean([q.neighbours for q in uniform]) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("n", "size", "resident"), [(100_000, 500, 4), (100_000, 500, 16), (100_000, 100, 64)])
@pytest.mark.few(1)
def test_the_quality_of_chunks(n: int, size: int, resident: int) -> None:
    """A batch from R of K chunks has K/R times the pairs, the two ends of the epoch up to a third more. Where a tenth of
    the data falls is known as well as K chunks in random order let it be."""
    chunks = n // size
    sampler = ChunkSampler(range(n), size, resident, seeded(3))
    each = [quality(np.array(list(sampler)), n, size) for _ in range(10)]
    assert all(abs(q.rank_correlation) < 4 / math.sqrt(chunks) for q in each)
    assert np.mean([q.distance for q in each]) < 1.1 * 0.82 / math.sqrt(chunks / 10)
    ratio = np.mean([q.neighbours for q in each]) / (chunks / resident)
    assert 0.9 < ratio < 1.05 + resident / chunks / 3


# -- the loader


@pytest.mark.few(1)
@pytest.mark.parametrize("kw", [{}, {"generator": True}])
def test_a_loader_shuffles_chunks_whatever_its_workers(kw: Any) -> None:
    data = TensorDataset(torch.arange(1000))

    def epochs(seed: int, workers: int) -> list[list[int]]:
        torch.manual_seed(seed)
        more = {"generator": seeded(seed)} if kw else {}
        loader = stoker.DataLoader(data, batch_size=7, shuffle="chunks", num_workers=workers, **more)
        assert type(loader.sampler) is ChunkSampler
        assert isinstance(loader.sampler, RandomSampler)
        assert loader.sampler.chunk_size == 4
        assert loader.shuffle == "chunks"
        assert len(loader) == 143
        return [[i for (batch,) in loader for i in batch.tolist()] for _ in range(2)]

    first, second = epochs(1, 0)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(1000))
    assert epochs(1, 2) == [first, second]
    assert epochs(2, 0)[0] != first


def test_a_loader_rebuilt_keeps_its_chunks() -> None:
    loader = stoker.DataLoader(range(10), shuffle="chunks", generator=torch.Generator())  # type: ignore[arg-type]
    names = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "generator", "num_workers")
    again = stoker.DataLoader(**{name: getattr(loader, name) for name in names})
    assert type(again.sampler) is ChunkSampler
    assert again.batch_sampler.sampler is again.sampler  # type: ignore[union-attr]
    assert sorted(int(b) for b in again) == list(range(10))


def test_a_loader_says_which_words_there_are() -> None:
    with pytest.raises(UsageError, match='"feistel" or "chunks", not \'chunk\''):
        stoker.DataLoader(range(3), shuffle="chunk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mutually exclusive"):
        stoker.DataLoader(range(3), shuffle="chunks", sampler=[0, 1])  # type: ignore[arg-type]


def test_a_sampler_of_ones_own_sizes_and_no_batches() -> None:
    data: Any = range(100)
    loader = stoker.DataLoader(data, batch_size=None, sampler=stoker.ChunkSampler(data, chunk_size=9, resident=3))
    assert sorted(int(i) for i in loader) == list(range(100))


def test_a_copy_has_the_dataset_and_its_own_generator() -> None:
    """The tuner copies a loader's sampler; a copy of a mapped file would be in memory."""
    data = range(100)
    sampler = ChunkSampler(data, 10, 2, seeded(SEED))
    other = copy.deepcopy(sampler)
    assert other.data_source is data
    assert list(other) == list(sampler)
    assert copy.copy(sampler).generator is sampler.generator


def test_rows_of_a_mapped_file_make_chunks_of_four_megabytes(tmp_path: Path) -> None:
    rows: Any = np.memmap(tmp_path / "rows", np.int64, "w+", shape=(4096, 1024))
    rows[:] = np.arange(4096)[:, None]
    assert ChunkSampler(Subset(np.broadcast_to(rows, rows.shape), range(4096))).chunk_size == 16
    large: Any = np.memmap(tmp_path / "large", np.uint8, "w+", shape=(1 << 16, 1 << 14))
    assert ChunkSampler(Subset(large, range(1 << 16))).chunk_size == 256
    loader = stoker.DataLoader(rows, 32, sampler=ChunkSampler(rows, 128, 4), num_workers=2)
    seen = [i for batch in loader for i in batch[:, 0].tolist()]
    assert sorted(seen) == list(range(4096))
