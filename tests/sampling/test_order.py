"""The order: torch's to the bit without torch's list, and orders too long for any list."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, TensorDataset

import stoker
from stoker.core.errors import UsageError
from stoker.sampling.order import SMALL, FeistelSampler, Permutation, order

SEED = int(os.environ.get("STOKER_SEED", "0"))


ORDERS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 40) | st.integers(4090, 9000),
        "samples": st.integers(1, 100) | st.none(),
        "size": st.integers(1, 50) | st.integers(4000, 5000) | st.none(),
        "drop_last": st.booleans(),
        "shuffle": st.booleans(),
        "own": st.booleans(),
        "taken": st.integers(0, 12) | st.none(),
    }
)


@settings(max_examples=12, deadline=None)
@given(ORDERS)
def test_the_order_and_its_draws_are_torchs(case: dict[str, Any]) -> None:
    compare(**case)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(ORDERS)
def test_many_orders_and_their_draws_are_torchs(case: dict[str, Any]) -> None:
    compare(**case)


def compare(
    n: int, samples: int | None, size: int | None, drop_last: bool, shuffle: bool, own: bool, taken: int | None
) -> None:
    """Every item, and both generators after each: a sampler's draws happen when torch's happen."""

    def trace(fast: bool) -> list[Any]:
        torch.manual_seed(SEED)
        generator = torch.Generator().manual_seed(SEED + 1) if own else None
        sampler: Any = (
            RandomSampler(range(n), num_samples=samples, generator=generator)
            if shuffle
            else SequentialSampler(range(n))
        )
        index_sampler = sampler if size is None else BatchSampler(sampler, size, drop_last)
        it = order(index_sampler) if fast else iter(index_sampler)
        assert it is not None
        generators = [g for g in (torch.default_generator, generator) if g is not None]

        def states() -> list[int]:
            return [hash(g.get_state().numpy().tobytes()) for g in generators]

        return [*((item, states()) for item in itertools.islice(it, taken)), states()]

    assert trace(True) == trace(False)


@pytest.mark.parametrize("n", [1, 2, 70_000, pytest.param(3_000_001, marks=pytest.mark.slow)])
def test_a_long_order_is_torchs_in_half_the_memory(n: int) -> None:
    theirs, ours = (torch.Generator().manual_seed(SEED) for _ in range(2))
    expected = torch.randperm(n, generator=theirs)
    assert torch.equal(_tensor(order(RandomSampler(range(n), generator=ours))), expected)
    torch.randperm(n, generator=theirs)  # RandomSampler's last draw, of which nothing is needed
    assert torch.equal(ours.get_state(), theirs.get_state())


def _tensor(items: Any) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(items, np.int64))


def test_only_what_is_torchs_own_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(RandomSampler):
        pass

    assert order(Mine(range(5))) is None
    assert order(BatchSampler(Mine(range(5)), 2, False)) is None
    assert order(RandomSampler(range(5), replacement=True)) is None
    assert order([1, 2]) is None
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: iter([4]))
    assert order(RandomSampler(range(5))) is None


@pytest.mark.parametrize("n", [1, 2, 3, 1000, SMALL, SMALL + 1, 100_003, 1_000_000])
def test_a_permutation_is_one(n: int) -> None:
    p = Permutation(n, key=SEED)
    found = p.at(np.arange(n))
    assert np.array_equal(np.sort(found), np.arange(n))
    places = np.random.default_rng(SEED).integers(0, n, 100)
    assert np.array_equal(p.at(places), found[places])  # any place alone


def test_permutations_of_many_differ_and_are_shuffled() -> None:
    n = 200_000
    x, y = (Permutation(n, key).at(np.arange(n)) for key in (SEED, SEED + 1))
    for a, b in ((x, y), (x, np.arange(n)), (x[:-1], x[1:])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.015  # 6 standard deviations of a random order's rank correlation
    # Where a place's element comes from: each of 16 x 16 blocks as full as chance has it (chi-square, 255 degrees).
    counts = np.bincount(np.arange(n) * 16 // n * 16 + x * 16 // n, minlength=256)
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 400


def test_a_permutation_of_the_longest() -> None:
    p = Permutation(1 << 62, 3)
    some = p.at(np.array([0, 1, (1 << 62) - 1]))
    assert len(set(some.tolist())) == 3
    assert all(0 <= i < 1 << 62 for i in some.tolist())
    for n in (0, -1, (1 << 62) + 1):
        with pytest.raises(ValueError, match="2\\*\\*62"):
            Permutation(n, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_shuffles_with_feistel(workers: int) -> None:
    data = TensorDataset(torch.arange(1000))

    def epochs(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        loader = stoker.DataLoader(data, batch_size=7, shuffle="feistel", num_workers=workers)
        assert isinstance(loader.sampler, RandomSampler)
        assert loader.shuffle == "feistel"
        return [[i for (batch,) in loader for i in batch.tolist()] for _ in range(2)]

    first, second = epochs(1)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(1000))
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first


def test_a_loader_rebuilt_keeps_its_feistel() -> None:
    loader = stoker.DataLoader(range(10), shuffle="feistel", generator=torch.Generator())  # type: ignore[arg-type]
    names = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "generator", "num_workers")
    again = stoker.DataLoader(**{name: getattr(loader, name) for name in names})
    assert type(again.sampler) is FeistelSampler
    assert again.batch_sampler.sampler is again.sampler  # type: ignore[union-attr]
    assert sorted(int(b) for b in again) == list(range(10))


@pytest.mark.parametrize("shuffle", ["feistle", "", "True"])
def test_another_word_is_an_error(shuffle: str) -> None:
    with pytest.raises(UsageError, match="feistel"):
        stoker.DataLoader(range(3), shuffle=shuffle)  # type: ignore[arg-type]


def test_feistel_is_refused_where_torch_refuses_a_shuffle() -> None:
    with pytest.raises(ValueError, match="mutually exclusive"):
        stoker.DataLoader(range(3), shuffle="feistel", sampler=[0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mutually exclusive"):
        stoker.DataLoader(range(3), shuffle="feistel", batch_sampler=[[0, 1]])  # type: ignore[arg-type]


def test_a_billion_samples_start_at_once() -> None:
    """A list of them would be 8 GB; this test would not end."""

    class Many(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, i: int) -> int:
            return i

    loader = stoker.DataLoader(Many(), batch_size=64, shuffle="feistel", num_workers=1)
    batches = list(itertools.islice(loader, 100))
    assert len(torch.cat(batches).unique()) == 6400
