"""Chunked epochs: each index once, a window that holds, the quality that is stated, and storage told in time."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import mmap
import os
import signal
import threading
import tracemalloc
import warnings
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, RandomSampler, Subset, TensorDataset

import stoker
from benchmarks.quality import quality
from stoker.core.errors import StokerWarning, UsageError
from stoker.sampling.chunks import ChunkSampler
from stoker.sampling.readahead import Readahead, read_rows

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


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("stoker-readahead")]


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


@settings(max_examples=50, deadline=None)
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
def test_all_resident_or_chunks_of_one_are_a_uniform_shuffle(size: int, resident: int) -> None:
    """Each of the 24 orders of four, as often as chance has it (chi-square, 23 degrees: 49.7 is one in a thousand)."""
    generator = seeded(1)
    counts = Counter(tuple(ChunkSampler(range(4), size, resident, generator)) for _ in range(2400))
    assert len(counts) == 24
    assert sum((c - 100) ** 2 / 100 for c in counts.values()) < 49.7


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


def test_quality_of_what_is_known() -> None:
    n = 100_000
    assert quality(range(n), n)[:2] == (1.0, 0.7)
    assert quality(range(n - 1, -1, -1), n).rank_correlation == -1.0
    uniform = [quality(torch.randperm(n, generator=seeded(s)).numpy(), n) for s in range(10)]
    assert all(abs(q.rank_correlation) < 4 / math.sqrt(n) for q in uniform)
    assert np.mean([q.distance for q in uniform]) == pytest.approx(0.82 / math.sqrt(n / 10), rel=0.1)
    assert np.mean([q.neighbours for q in uniform]) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("n", "size", "resident"), [(100_000, 500, 4), (100_000, 500, 16), (100_000, 100, 64)])
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
    assert epochs(1, 1) == epochs(1, 2) == [first, second]
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


# -- reading ahead


class Told(Dataset):
    """Writes down what it is told, and by whom."""

    def __init__(self, n: int, fail: str = "", at: int = 3) -> None:
        self.n, self.fail, self.at = n, fail, at
        self.events: list[tuple[str, int, int]] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i

    def _note(self, what: str, first: int, last: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append((what, first, last))
        if what == self.fail and sum(e[0] == what for e in self.events) == self.at:
            raise OSError("the disk is gone")

    def read_ahead(self, first: int, last: int) -> None:
        self._note("read", first, last)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 400), size=st.integers(1, 40), resident=st.integers(1, 8))
def test_a_chunk_is_read_before_its_first_index(n: int, size: int, resident: int) -> None:
    data = Told(n)
    for i in ChunkSampler(data, size, resident):
        data.events.append(("index", i, i))
    chunks = [(first, min(first + size, n) - 1) for first in range(0, n, size)]
    assert sorted(e[1:] for e in data.events if e[0] == "read") == chunks  # each once
    read: set[int] = set()
    left = Counter(i // size for i in range(n))
    for what, first, _ in data.events:
        if what == "read":
            read.add(first // size)
            assert sum(left[chunk] > 0 for chunk in read) <= resident + 1
        else:
            assert first // size in read
            left[first // size] -= 1
    assert all(name.startswith("stoker-readahead") for name in data.threads)
    assert not readers()


def test_what_comes_next_can_be_asked() -> None:
    sampler = ChunkSampler(range(100), 10, 3, seeded(SEED))
    assert sampler.upcoming() == ((), None)
    seen: list[Any] = []
    for i in sampler:
        now = sampler.upcoming()
        assert any(first <= i <= last for first, last in now.resident)
        if not seen or seen[-1] != now:
            seen.append(now)
    assert len(seen) == 8
    for before, after in pairwise(seen):
        assert after.resident == (*before.resident[1:], before.next)
    assert seen[-1].next is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("left", ["end", "break", "error"])
@pytest.mark.few(2)
def test_no_thread_is_left(workers: int, left: str) -> None:
    data = Told(2000)
    loader = stoker.DataLoader(data, 10, sampler=ChunkSampler(data, 50, 4), num_workers=workers)

    def epoch() -> None:
        for k, _ in enumerate(loader):
            assert len(readers()) <= 1
            if k == 30 and left != "end":
                assert len(readers()) == 1
                if left == "error":
                    raise ZeroDivisionError
                break

    for _ in range(2):
        try:
            epoch()
        except ZeroDivisionError:
            assert left == "error"
        gc.collect()  # the error's traceback had the iterator
        assert not readers()
    assert data.events


def test_no_thread_where_nothing_can_be_read_ahead() -> None:
    it = iter(ChunkSampler(range(100), 10, 3))
    next(it)
    assert not readers()


def test_an_error_is_told_once_and_ends_reading_ahead() -> None:
    data = Told(1000, "read")
    it = iter(ChunkSampler(data, 20, 2))
    with pytest.warns(StokerWarning, match="read ahead.*OSError: the disk is gone") as caught:
        order = list(it)
    assert sorted(order) == list(range(1000))
    assert len(caught) == 1
    assert len(data.events) < 20
    assert not readers()
    data.events.clear()
    with pytest.warns(StokerWarning):  # the next epoch tries again
        list(ChunkSampler(data, 20, 2))


def test_an_error_that_is_to_end_the_run_does() -> None:
    data = Told(1000, "read")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StokerWarning, match="the disk is gone"):
            list(ChunkSampler(data, 20, 2))
    gc.collect()
    assert not readers()


def test_a_forked_child_does_without() -> None:
    data = Told(1000)
    it = iter(ChunkSampler(data, 20, 3))
    order = list(islice(it, 300))
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        good = sorted(order + list(it)) == list(range(1000))
        del it
        os._exit(not good)
    assert os.waitpid(pid, 0)[1] == 0
    assert sorted(order + list(it)) == list(range(1000))
    assert len([e for e in data.events if e[0] == "read"]) == 50


def test_of_a_subset_the_inner_rows_are_read() -> None:
    data = Told(1000)
    inner = Subset(Subset(data, range(500, 1000)), list(range(100, 400)))
    assert sorted(ChunkSampler(inner, 50, 2)) == list(range(300))
    assert sorted(e[1:] for e in data.events if e[0] == "read") == [(k, k + 49) for k in range(600, 900, 50)]


def test_of_a_scattered_subset_nothing_is() -> None:
    data = Told(1000)
    some = Subset(data, np.random.default_rng(SEED).permutation(1000)[:800].tolist())
    with pytest.warns(StokerWarning, match="scattered over .* sorted"):
        list(ChunkSampler(some, 50, 2))
    assert not data.events
    list(ChunkSampler(Subset(data, sorted(some.indices)), 50, 2))
    assert data.events


def test_a_dataset_around_another_is_not_taken_for_it() -> None:
    """``Staged`` hands on what it has not itself; its samples may be in memory already."""
    data = Told(100)
    staged = stoker.Staged(data, prepare=torch.tensor)
    assert staged.read_ahead == data.read_ahead
    assert Readahead.of(staged) is None
    assert Readahead.of(data) is not None


def test_a_copy_has_the_dataset_and_its_own_generator() -> None:
    """The tuner copies a loader's sampler; a copy of a mapped file would be in memory."""
    data = Told(100)
    sampler = ChunkSampler(data, 10, 2, seeded(SEED))
    other = copy.deepcopy(sampler)
    assert other.data_source is data
    assert list(other) == list(sampler)
    assert copy.copy(sampler).generator is sampler.generator


# -- mapped files


def in_memory(path: Path) -> np.ndarray[Any, Any]:
    """For each page of a file whether it is in the page cache. mincore(2)."""
    size = path.stat().st_size
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as whole:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        view = np.frombuffer(whole, np.uint8)
        at = ctypes.c_void_p(view.ctypes.data)
        assert ctypes.CDLL(None).mincore(at, ctypes.c_size_t(size), pages) == 0
        del view
        return np.frombuffer(pages, np.uint8) & 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """32 MB that are in nobody's memory: 4096 rows of 8 KB behind a header of 100,000 bytes."""
    path = tmp_path / "rows"
    rows = np.broadcast_to(np.arange(4096, dtype=np.int64)[:, None], (4096, 1024))
    with open(path, "wb") as out:
        out.write(bytes(100_000))
        out.write(rows.tobytes())
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(path).any():
        pytest.skip("this file system keeps files in memory")
    return path


def mapped(path: Path, mode: Any = "r+") -> Any:
    return np.memmap(path, np.int64, mode, offset=100_000, shape=(4096, 1024))


def pages_of(first: int, last: int) -> slice:
    return slice((100_000 + first * 8192) // mmap.PAGESIZE, -(-(100_000 + (last + 1) * 8192) // mmap.PAGESIZE))


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("begin", [0, 333])
def test_rows_are_brought_in(file: Path, mode: str, begin: int) -> None:
    rows = mapped(file, mode)[begin:]
    read_rows(rows, 2000 - begin, 2999 - begin)
    assert in_memory(file)[pages_of(2000, 2999)].all()
    assert (rows[:, 0] == np.arange(begin, 4096)).all()


def test_rows_of_a_mapped_file_through_worker_processes(file: Path) -> None:
    """Read ahead by the parent, the same bits."""
    rows = mapped(file)
    loader = stoker.DataLoader(rows, 32, sampler=ChunkSampler(rows, 128, 4), num_workers=2)
    seen = [i for batch in loader for i in batch[:, 0].tolist()]
    assert sorted(seen) == list(range(4096))


def test_what_lies_otherwise_is_left_alone(file: Path) -> None:
    rows = mapped(file)
    for other in (rows[::2], rows.T, np.asarray(rows), rows + 1, rows.copy(), rows[:0]):
        assert Readahead.of(other) is None
        with pytest.raises(UsageError):
            read_rows(other, 0, 0)
    assert Readahead.of(rows) is not None
    for first, last in ((-1, 5), (5, 4), (0, 4096)):
        with pytest.raises(UsageError, match="of 4,096"):
            read_rows(rows, first, last)
