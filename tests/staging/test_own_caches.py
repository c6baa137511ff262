"""Datasets that keep what they loaded themselves: ``if i not in self.cache: self.cache[i] = load(i)``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import stoker
from stoker.core.compare import equal_bits
from stoker.core.errors import UsageError
from stoker.staging import own_caches
from stoker.staging.trial import find_plan

N = 24


class Base(Dataset[Any]):
    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}
        self.images: list[Any] = [None] * N
        self.cache_size = 1_000

    def __len__(self) -> int:
        return N

    def load(self, i: int) -> Any:
        x = np.arange(400, dtype=np.float64) + i
        for _ in range(30):
            x = np.log(np.exp(x / 500)) * 500
        return x

    def augment(self, x: Any) -> torch.Tensor:
        return torch.from_numpy(np.roll(x, random.randrange(9)) + np.random.rand())


class InADictionary(Base):
    def clean(self, i: int) -> Any:
        if i not in self.cache:
            self.cache[i] = self.load(i)
        return self.cache[i]

    def __getitem__(self, i: int) -> Any:
        return self.augment(self.clean(i))


class UpToASize(Base):
    """As PointNet's datasets do."""

    def __getitem__(self, i: int) -> Any:
        if i in self.cache:
            x = self.cache[i]
        else:
            x = self.load(i)
            if len(self.cache) < self.cache_size:
                self.cache[i] = x
        return self.augment(x)


class InAList(Base):
    def __getitem__(self, i: int) -> Any:
        if self.images[i] is None:
            self.images[i] = self.load(i)
        x = self.images[i].copy()
        return self.augment(x)


class AskedFor(Base):
    def __getitem__(self, i: int) -> Any:
        x = self.cache.get(i)
        if x is None:
            x = self.load(i)
            self.cache[i] = x
        return self.augment(x)


class ReadWhereItIsUsed(Base):
    def __getitem__(self, i: int) -> Any:
        if self.images[i] is None:
            self.images[i] = self.load(i)
        return self.augment(self.images[i]), i


class Records(Base):
    def __getitem__(self, i: int) -> Any:
        if i not in self.cache:
            self.cache[i] = {"x": self.load(i), "y": i % 3}
        record = self.cache[i]
        x, y = record["x"], record["y"]
        return {"image": self.augment(x), "label": y}


class Deterministic(InADictionary):
    def augment(self, x: Any) -> torch.Tensor:
        return torch.from_numpy(x.copy())


class History(Base):
    """Mixes a sample with one that was loaded before."""

    def __getitem__(self, i: int) -> Any:
        x = self.load(i)
        self.cache[i] = x
        return self.augment(x) + self.cache[max(self.cache)][:400]


class MixesNowAndThen(InADictionary):
    def __getitem__(self, i: int) -> Any:
        x = self.augment(self.clean(i))
        if random.random() < 0.05:
            x = x + self.cache[random.choice(list(self.cache))]
        return x


class Counts(Base):
    def __getitem__(self, i: int) -> Any:
        self.cache[i] = self.cache.get(i, 0) + 1
        x = self.load(i) * self.cache[i]
        return self.augment(x)


class CountsForTheScript(Base):
    """Samples do not depend on it: the script prints it at its end."""

    def __getitem__(self, i: int) -> Any:
        self.cache[i % 3] = self.cache.get(i % 3, 0) + 1
        x = self.load(i)
        return self.augment(x)


class NotesForTheScript(Base):
    def __getitem__(self, i: int) -> Any:
        self.images[i] = "seen"
        x = self.load(i)
        return self.augment(x)


class WritesToItsCache(InADictionary):
    def augment(self, x: Any) -> torch.Tensor:
        x += np.random.rand()
        return torch.from_numpy(x.copy())


class WritesToItsCacheNowAndThen(InADictionary):
    def augment(self, x: Any) -> torch.Tensor:
        shift = random.random()
        if shift < 0.2:
            x[3:9] = 0
        return torch.from_numpy(x + shift)


KINDS = [InADictionary, UpToASize, InAList, AskedFor, ReadWhereItIsUsed, Records, Deterministic]


def wrapped(kind: type[Base]) -> Any:
    return Subset(kind(), range(2, N))


def epochs(loader: Any, n: int = 3) -> list[Any]:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    return [list(loader) for _ in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "workers"), [*((kind, 1) for kind in KINDS), (InAList, 2), (InAList, 0)])
@pytest.mark.few(1)
def test_what_such_a_dataset_loads_is_kept_and_the_dataset_left_alone(make: Callable[[], Any], workers: int) -> None:
    data = make()
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    plain = epochs(DataLoader(make(), **settings))
    staged = stoker.Staged(data, cache_budget="10MB")
    assert equal_bits(plain, epochs(DataLoader(staged, **settings)))
    if workers:
        assert staged.account.filled == N
        assert not data.cache
        assert data.images == [None] * N
    else:  # the dataset's own cache serves the script's process
        assert staged.account.filled == 0
        assert all(x is not None for x in data.images)


@pytest.mark.slow
def test_one_inside_another_dataset_is_found() -> None:
    staged = stoker.Staged(wrapped(InADictionary), cache_budget="10MB")
    plain = epochs(DataLoader(wrapped(InADictionary), num_workers=1))
    assert equal_bits(plain, epochs(DataLoader(staged, num_workers=1)))
    assert staged.account.filled == N - 2


@pytest.mark.slow
def test_what_the_script_puts_there_is_used() -> None:
    data = InADictionary()
    staged = stoker.Staged(data, cache_budget="10MB")
    loader = stoker.DataLoader(staged, num_workers=1)
    before = epochs(loader, 2)
    data.cache[3] = np.zeros(400)
    with pytest.warns(stoker.StokerWarning, match="cache"):
        after = epochs(loader, 1)
    assert equal_bits(before[0][4], after[0][4])
    assert after[0][3].std() < 1e-9 < before[0][3].std()


NO_CACHES = [
    MixesNowAndThen,
    History,
    Counts,
    CountsForTheScript,
    NotesForTheScript,
    WritesToItsCache,
    WritesToItsCacheNowAndThen,
]


@pytest.mark.parametrize("make", [x for x in NO_CACHES if x is not NotesForTheScript])  # its note is made each time
@pytest.mark.few(1)
def test_what_is_no_cache_or_is_written_to_is_not_cut(make: type[Base]) -> None:
    assert find_plan(make()).plan is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "workers"), [*((kind, 0) for kind in NO_CACHES), (MixesNowAndThen, 2), (WritesToItsCacheNowAndThen, 2)]
)
@pytest.mark.few(1)
def test_batches_of_such_datasets_are_those_without_a_cache(make: type[Base], workers: int) -> None:
    """Calls inside them may be kept."""
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    plain = epochs(DataLoader(make(), **settings))
    with contextlib.suppress(UsageError):
        data = make()
        staged = stoker.Staged(data, cache_budget="10MB")
        assert equal_bits(plain, epochs(DataLoader(staged, **settings)))
        if not workers and make in (CountsForTheScript, NotesForTheScript):
            assert sum(data.cache.values()) == 3 * N or data.images == ["seen"] * N


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        (InADictionary, {"num_workers": 3, "worker_method": "thread"}),
        (ReadWhereItIsUsed, {"num_workers": 2, "read_threads": 4}),
    ],
)
@pytest.mark.few(1)
def test_threads_leave_the_dataset_as_it_was(kind: type[Base], workers: dict[str, Any]) -> None:
    """Threads that make first parts share one empty dictionary; the dataset's own comes back."""
    data = kind()
    own, images = data.cache, data.images
    staged = stoker.Staged(data, cache_budget="10MB")
    loader = stoker.DataLoader(staged, batch_size=4, shuffle=True, **workers)
    for _ in range(3):
        assert sum(1 for _ in loader) == N // 4
    assert staged.account.filled == N
    assert data.cache is own
    assert data.images is images
    assert not own
    assert images == [None] * N


def test_an_empty_one_in_its_place_is_no_change() -> None:
    """A thread looks for changes while another one makes a first part."""
    data = InADictionary()
    split = stoker.split(data)
    before = split.inputs()
    assert split.plan is not None
    with own_caches.emptied(data, split.plan.own_caches):
        data.clean(3)
        assert len(data.cache) == 1
        assert before.changes(split.inputs()) == []
    data.cache[3] = np.zeros(4)
    assert "cache" in " ".join(before.changes(split.inputs()))


@pytest.mark.slow
def test_many_threads_at_once() -> None:
    data = InADictionary()
    own = data.cache
    plan = stoker.split(data).plan
    assert plan is not None
    expected = [plan.head(data, i) for i in range(N)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda k: plan.head(data, k % N), range(40 * N)))
    assert all(equal_bits(expected[k % N], x) for k, x in enumerate(made))
    assert data.cache is own
    assert not own
