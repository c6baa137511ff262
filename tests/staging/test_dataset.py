"""Staged datasets: the same batches with and without a cache, filled by workers of any kind, within the budget."""

from __future__ import annotations

import collections
import copy
import functools
import math
import multiprocessing
import pickle
import sqlite3
import sys
import threading
import time
import types
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

import stoker
from stoker.core.errors import StokerWarning, UsageError
from stoker.staging import change_watch
from stoker.staging.inputs import Inputs
from stoker.staging.store.decode import Layout, stored_copy
from stoker.staging.store.encode import take
from stoker.staging.store.memory import MemoryTables
from stoker.staging.store.store import Store, size_of
from stoker.staging.value_digests import readable

N = 60
Point = collections.namedtuple("Point", "x y")


class Source(Dataset[Any]):
    """Samples with a number in them, and a count of how often they were made."""

    def __init__(self, n: int = N, kind: str = "tensor") -> None:
        self.n, self.kind = n, kind
        self.made = torch.zeros(n, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        self.made[i] += 1
        x = torch.arange(48, dtype=torch.uint8).view(3, 4, 4) + i
        if self.kind == "tensor":
            return x, i % 7
        if self.kind == "strides":
            return x.permute(1, 2, 0).float(), float(i)
        if self.kind == "ragged":
            return torch.full((1 + i % 5,), i), f"name {i}"
        if self.kind == "dict":
            return {"image": x.numpy(), "point": Point(i, np.float32(i)), "flag": i % 2 == 0}
        return (x, i) if i % 10 else (x[:1], i)


def flip(sample: Any) -> Any:
    x, *rest = sample
    return (x.flip(-1) if torch.rand(()) < 0.5 else x, *rest)


def flip_batch(batch: Any) -> Any:
    x, y = batch
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x).float() / 255, y


def stay(samples: list[Any]) -> list[Any]:
    return samples


def same(a: Any, b: Any) -> bool:
    wa, la = take(a)
    wb, lb = take(b)
    return wa == wb and all(x.tobytes() == y.tobytes() for x, y in zip(la, lb, strict=True))


def epochs(dataset: Any, n: int = 3, **settings: Any) -> list[Any]:
    torch.manual_seed(11)
    loader = stoker.DataLoader(dataset, **{"batch_size": 8, "shuffle": True, **settings})
    return [batch for _ in range(n) for batch in loader]


WORKERS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "fork": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "thread": {"num_workers": 2, "worker_method": "thread"},
}


def settings_with(*names: str) -> list[Any]:
    """Some of ``WORKERS``; those that spawn, which takes seconds, are slow."""
    return [pytest.param(WORKERS[name], id=name, marks=[pytest.mark.slow] * (name == "spawn")) for name in names]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("tensor", WORKERS["fork"]),
        ("tensor", WORKERS["persistent"]),
        *[(kind, WORKERS["inline"]) for kind in ("strides", "dict", "odd")],
        ("dict", WORKERS["thread"]),
        pytest.param("odd", WORKERS["spawn"], marks=pytest.mark.slow),
    ],
    ids=["fork", "persistent", "strides", "dict", "odd", "thread", "spawn"],
)
@pytest.mark.few(1)
def test_a_cached_epoch_is_the_uncached_one_to_the_bit(settings: dict[str, Any], kind: str) -> None:
    collate = {"collate_fn": stay} if kind == "odd" else {}
    forked = {**settings, "multiprocessing_context": None}  # how workers start changes no bit, and spawning takes long
    plain = epochs(Source(kind=kind), **forked, **collate)
    source = Source(kind=kind)
    staged = stoker.Staged(source, prepare=keep, cache_budget="20MB")
    cached = epochs(staged, **settings, **collate)
    assert len(plain) == len(cached) == 24
    assert all(map(same, plain, cached))
    assert staged.account.filled == N, staged.report
    compared = 8 if settings is WORKERS["spawn"] else 0  # a spawned worker makes some again
    assert source.made.max() <= 2 + bool(compared)
    assert source.made.sum() <= N + 16 + compared


def keep(sample: Any) -> Any:
    return sample


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", settings_with("inline", "persistent", "spawn"))
def test_random_augmentation_is_the_same_with_and_without_a_cache(settings: dict[str, Any]) -> None:
    without = stoker.Staged(Source(), prepare=keep, augment=flip, cache=None)
    staged = stoker.Staged(Source(), prepare=keep, augment=flip, cache_budget="20MB")
    forked = {**settings, "multiprocessing_context": None}
    assert all(map(same, epochs(without, 2, **forked), epochs(staged, 2, **settings)))
    assert staged.account.filled == N
    assert without.account.filled == 0


@pytest.mark.parametrize("settings", settings_with("inline", "fork", "persistent", "thread"))
@pytest.mark.few(2)
def test_a_batch_is_augmented_once(settings: dict[str, Any]) -> None:
    without = stoker.Staged(Source(), prepare=keep, augment_batch=flip_batch, cache=None)
    staged = stoker.Staged(Source(), prepare=keep, augment_batch=flip_batch, cache_budget="20MB")
    if settings.get("worker_method") == "thread":  # torch's process-wide generator, drawn from by several at once
        assert {len(b) for b in epochs(staged, **settings)} == {2}
        return
    assert all(map(same, epochs(without, **settings), epochs(staged, **settings)))


def test_a_subset_is_served_from_the_same_cache() -> None:
    source = Source()
    staged = stoker.Staged(source, prepare=keep, augment_batch=flip_batch, cache_budget="20MB")
    rows = list(range(0, N, 3))
    for settings in (WORKERS["inline"], WORKERS["fork"]):
        assert len(epochs(Subset(Subset(staged, rows), range(16)), **settings)) == 6
    assert staged.account.filled == 16
    assert source.made[rows[:16]].max() <= 3  # a try, a fill


@pytest.mark.slow
def test_torchs_own_loader_takes_it() -> None:
    staged = stoker.Staged(Source(), prepare=keep, augment=flip, cache_budget="20MB")
    without = stoker.Staged(Source(), prepare=keep, augment=flip, cache=None)
    out = []
    for dataset in (staged, without):
        torch.manual_seed(0)
        out.append([b for _ in range(2) for b in torch.utils.data.DataLoader(dataset, 8, num_workers=2)])
    assert all(map(same, *out))
    assert staged.account.filled == N
    batchwise = stoker.Staged(Source(), prepare=keep, augment_batch=flip_batch, cache_budget="20MB")
    with pytest.raises(UsageError, match=r"stoker\.DataLoader"):
        next(iter(torch.utils.data.DataLoader(batchwise, 8)))
    with stoker.installed():
        assert len(next(iter(torch.utils.data.DataLoader(batchwise, 8, num_workers=1)))) == 2


def test_what_is_augmented_by_the_batch_is_never_left_unaugmented() -> None:
    staged = stoker.Staged(Source(), prepare=keep, augment_batch=flip_batch, cache_budget="20MB")
    joined = torch.utils.data.ConcatDataset([staged, staged])
    for settings in ({"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, "worker_method": "thread"}):
        with pytest.raises(UsageError, match="augment_batch"):
            next(iter(stoker.DataLoader(staged, batch_size=None, **settings)))
        if settings["num_workers"]:
            with pytest.raises(UsageError, match="augment_batch"):
                next(iter(stoker.DataLoader(joined, 8, **settings)))
    assert staged[0][0].dtype is torch.uint8  # to look at one is no mistake


class OwnChance(Source):
    """Draws from a generator of its own, whatever prepare does."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(self.rng.random())


def test_a_dataset_that_draws_is_not_frozen_by_a_prepare_that_does_not() -> None:
    staged = stoker.Staged(OwnChance(), prepare=keep, cache_budget="1MB")
    with pytest.warns(StokerWarning, match=r"Cache discarded: 5 of 6 samples draw"):
        values = {float(staged[i]) for i in [*range(N), *range(N)]}
    assert len(values) == 2 * N
    assert staged.account.filled == 0


def test_what_is_handed_out_is_the_users() -> None:
    staged = stoker.Staged(Source(), prepare=keep, cache_budget="20MB")
    first = [staged[i] for i in range(N)]
    for _ in range(2):
        again = [staged[i] for i in range(N)]
        assert all(map(same, first, again))
        for x, _ in again:
            x.zero_()
    for settings in (WORKERS["inline"], WORKERS["thread"]):  # where no process lies between
        for x, _ in stoker.DataLoader(staged, 8, **settings):
            x.zero_()
    assert all(map(same, first, [staged[i] for i in range(N)]))


def test_an_augment_that_writes_to_its_sample_changes_nothing_that_is_kept() -> None:
    staged = stoker.Staged(Source(), prepare=keep, augment=lambda s: (s[0].add_(100), s[1]), cache_budget="20MB")
    first = [staged[i] for i in range(N)]
    assert all(map(same, first, [staged[i] for i in range(N)]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "ragged"])
def test_the_budget_holds_and_what_is_in_stays(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_watch, "FIRST_COMPARE_S", math.inf)  # on a busy machine some would be made again
    n = 800
    source = Source(n, kind)
    budget = 20_000
    staged = stoker.Staged(source, prepare=keep, cache_budget=budget)
    order = np.random.default_rng(0).permutation(n)
    first = {int(i): staged[int(i)] for i in order}
    account = staged.account
    assert 0 < account.nbytes <= budget
    assert n // 20 < account.filled < n * 3 // 4, staged.report
    assert "budget" in account.reason
    before = source.made.clone()
    again = {int(i): staged[int(i)] for i in order[::-1]}
    assert all(same(first[i], again[i]) for i in first)
    assert int((source.made - before).sum()) == n - account.filled  # what is in came from there, the rest was made
    assert staged.account.filled == account.filled


def test_a_sample_larger_than_the_budget_is_said() -> None:
    staged = stoker.Staged(Source(), prepare=keep, cache_budget=10)
    list(stoker.DataLoader(staged, 8))
    assert "exceeds the budget of 10" in staged.account.reason
    assert staged.account.filled == 0


class Sized(Source):
    size = 2  # of the class: an instance's own is new

    def __getitem__(self, i: int) -> Any:
        return torch.full((self.size,), i)


@pytest.mark.parametrize("settings", settings_with("inline", "fork", "thread"))
@pytest.mark.few(1)
def test_a_dataset_that_is_changed_between_epochs_begins_a_new_cache(settings: dict[str, Any]) -> None:
    data = Sized()
    staged = stoker.Staged(data, prepare=keep, cache_budget="1MB")
    loader = stoker.DataLoader(staged, 10, **settings)
    assert {b.shape[1] for b in loader} == {2}
    data.size = 3
    with pytest.warns(StokerWarning, match="size (was 2 and )?is 3"):
        assert {b.shape[1] for b in loader} == {3}
    assert {b.shape[1] for b in loader} == {3}
    assert staged.account.filled == N


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("tensor", {"persistent_workers": True}), ("tensor", {}), ("array", {}), ("value", {})],
    ids=["tensor, workers that stay", "tensor", "array", "value"],
)
@pytest.mark.few(1)
def test_what_is_changed_in_shared_memory_is_never_served_stale(kind: str, workers: dict[str, Any]) -> None:
    class Levels(Source):
        def __init__(self) -> None:
            super().__init__()
            self.tensor = torch.zeros(1, dtype=torch.int64).share_memory_()
            self.array = torch.zeros(1, dtype=torch.int64).share_memory_().numpy()
            self.value = multiprocessing.RawValue("q", 0)

        def set_epoch(self, epoch: int) -> None:
            self.tensor[0] = self.array[0] = self.value.value = epoch

        def __getitem__(self, i: int) -> Any:
            if kind == "value":
                return torch.tensor([i, self.value.value])
            return torch.tensor([i, int(self.tensor[0] if kind == "tensor" else self.array[0])])

    data = Levels()
    loader = stoker.DataLoader(stoker.Staged(data, cache_budget="1MB"), 10, num_workers=2, **workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StokerWarning)
        for level in (0, 0, 1, 1, 0):
            data.set_epoch(level)
            assert {int(x) for batch in loader for x in batch[:, 1]} == {level}


class Levelled(Source):
    """Its level is a ``multiprocessing.Value`` with a lock, as curricula have one."""

    def __init__(self) -> None:
        super().__init__()
        self.level = multiprocessing.Value("i", 0)

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i, self.level.value]), torch.rand(())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 0])
def test_a_shared_value_with_a_lock_is_read_in_the_trial(workers: int) -> None:
    data = Levelled()
    found = stoker.split(data)
    assert not found.exact
    staged = stoker.Staged(data, cache_budget="1MB")
    loader = stoker.DataLoader(staged, 10, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StokerWarning)
        for level in (0, 0, 1, 1):
            with data.level.get_lock():
                data.level.value = level
            assert {int(x) for batch, _ in loader for x in batch[:, 1]} == {level}
    assert staged.account.filled == N


class Later(Source):
    """Has what the script sets after some epochs, or what it loads itself with the first sample."""

    added: Any = None
    loads: Any = None

    def __getitem__(self, i: int) -> Any:
        if self.loads is not None and self.added is None:
            self.added = self.loads()
        return torch.tensor([i, 0 if self.added is None else int(self.added[i])])


class Reader:
    """As h5py's files: an object with values of its own."""

    def __init__(self) -> None:
        self.options = [None, "latest"]

    def __getitem__(self, i: int) -> int:
        return 5


class Connection(Reader):
    """As sqlite3's connections, which can be called."""

    def __call__(self, statement: str) -> None: ...

    def close(self) -> None: ...


AFTER_NONE: list[Any] = [np.full(N, 5), torch.full((N,), 5), [5] * N, dict.fromkeys(range(N), 5)]


@pytest.mark.parametrize(
    ("value", "workers"),
    [*((value, 0) for value in AFTER_NONE), (AFTER_NONE[0], 2)],
    ids=lambda x: str(x) if isinstance(x, int) else type(x).__name__,
)
@pytest.mark.slow
def test_data_set_where_there_was_none_begin_a_new_cache(value: Any, workers: int) -> None:
    data = Later()
    loader = stoker.DataLoader(stoker.Staged(data, cache_budget="1MB"), 10, num_workers=workers)
    assert {int(x) for batch in loader for x in batch[:, 1]} == {0}
    data.added = value
    with pytest.warns(StokerWarning, match="added was None and is a"):
        assert {int(x) for batch in loader for x in batch[:, 1]} == {5}


@pytest.mark.parametrize(
    ("loads", "workers"),
    [(Connection, 0), (lambda: np.full(N, 5), 0), (lambda: [5] * N, 0), (Reader, 2), (lambda: [5] * N, 2)],
    ids=["connection", "array", "list", "reader, workers", "list, workers"],
)
@pytest.mark.few(1)
def test_what_a_dataset_opens_with_its_first_sample_is_no_change(loads: Any, workers: int) -> None:
    data = Later()
    data.loads = loads
    staged = stoker.Staged(data, cache_budget="1MB")
    loader = stoker.DataLoader(staged, 10, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        for _ in range(3):
            assert {int(x) for batch in loader for x in batch[:, 1]} == {5}
    assert staged.account.filled == N


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("loads", [Connection, lambda: [5] * N], ids=["connection", "list"])
def test_what_the_first_sample_opens_in_one_part_others_open_in_theirs(loads: Any) -> None:
    """And what the script puts there is a change, if it is anything else."""
    parts = [Later(), Later()]
    for part in parts:
        part.loads = loads
    joined = ConcatDataset(parts)
    staged = stoker.Staged(joined, cache_budget="1MB")
    loader = stoker.DataLoader(staged, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        for _ in range(3):
            assert {int(x) for batch in loader for x in batch[:, 1]} == {5}
    assert staged.account.filled == len(joined)
    parts[1].added = [6] * N
    with pytest.warns(StokerWarning, match=r"datasets\[1\].added"):
        assert {int(x) for batch in loader for x in batch[:, 1]} == {5, 6}


def test_a_model_that_is_compiled_in_the_first_epoch_changes_nothing() -> None:
    """torch.compile raises the recursion limit to 2,000."""
    data = Later()
    data.loads = lambda: [5] * N
    staged = stoker.Staged(data, cache_budget="1MB")
    loader = stoker.DataLoader(staged, 10)
    before = sys.getrecursionlimit()
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        list(loader)
        try:
            sys.setrecursionlimit(2000)
            list(loader)
        finally:
            sys.setrecursionlimit(before)
    assert staged.account.filled == N


class Holder:
    """Holds attributes."""


@pytest.mark.slow
def test_what_is_opened_elsewhere_is_no_excuse() -> None:
    """The name alone of what a dataset opens does not hide a change of another object's attribute of that name."""

    class Two(Later):
        def __init__(self) -> None:
            super().__init__()
            self.loads, self.other = Reader, Holder()

        def __getitem__(self, i: int) -> Any:
            x = super().__getitem__(i)
            return x if getattr(self.other, "added", None) is None else x + self.other.added.gain

    class Gain:
        gain = 2

        def __init__(self) -> None:
            self.gain = 3

    data = Two()
    loader = stoker.DataLoader(stoker.Staged(data, cache_budget="1MB"), 10)
    assert {int(x) for batch in loader for x in batch[:, 1]} == {5}
    data.other.added = Gain()
    with pytest.warns(StokerWarning, match="is 3"):
        assert {int(x) for batch in loader for x in batch[:, 1]} == {8}


class Remembers:
    """As MONAI's transforms: what was drawn is kept on the transform."""

    def __call__(self, x: Any) -> Any:
        self.amount = float(torch.rand(()))
        return x, self.amount


@pytest.mark.filterwarnings("error::stoker.core.errors.StokerWarning")
def test_what_a_random_transform_remembers_is_no_change() -> None:
    staged = stoker.Staged(Source(), prepare=keep, augment=Remembers(), cache_budget="1MB")
    loader = stoker.DataLoader(staged, 10)
    seen = [{float(a) for _, amounts in loader for a in amounts} for _ in range(3)]
    assert len(set.union(*seen)) == 3 * N
    assert staged.account.filled == N
    assert int(staged.dataset.made.sum()) == N


@pytest.mark.slow
def test_a_dataset_that_changes_before_each_epoch_is_not_tried_again_and_again() -> None:
    data = Sized()
    staged = stoker.Staged(data, cache_budget="1MB")
    loader = stoker.DataLoader(staged, 10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(1, 9):
            data.size = size
            assert {b.shape[1] for b in loader} == {size}
    said = [str(w.message) for w in caught if "Cache discarded" in str(w.message)]
    assert len(said) == 4
    assert said[-1].endswith("From now on nothing is cached: it changes before each epoch.")


class Scaled:
    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, x: Any) -> Any:
        return x * self.k


class ScaledModule(torch.nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Any) -> Any:
        return x * self.k


class InTurn:
    def __init__(self, *steps: Any) -> None:
        self.transforms = list(steps)

    def __call__(self, x: Any) -> Any:
        for step in self.transforms:
            x = step(x)
        return x


class Through(Dataset[Any]):
    def __init__(self, transform: Any, labels: Any) -> None:
        self.transform, self.labels = transform, labels

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> Any:
        return self.transform(torch.tensor(float(self.labels[i])))


LABELS = [
    list(range(1000)),
    dict(enumerate(range(1000))),
    np.arange(1000),
    np.arange(1000).astype(object),
    deque(range(1000)),
    torch.arange(1000),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chain", "kind", "within", "workers"),
    [
        (InTurn, Scaled, lambda d: Subset(d, range(1000)), 1),
        (lambda t: t, Scaled, lambda d: d, 0),
        (InTurn, ScaledModule, lambda d: d, 0),
        (lambda t: t, ScaledModule, lambda d: Subset(d, range(1000)), 1),
    ],
    ids=["Compose in a Subset", "alone", "module in Compose", "module in a Subset"],
)
@pytest.mark.few(1)
def test_an_argument_of_a_transform_that_is_changed(chain: Any, kind: Any, within: Any, workers: int) -> None:
    """Progressive resizing, for one."""
    step = kind(2)
    staged = stoker.Staged(within(Through(chain(step), LABELS[0])), cache="ram", cache_budget="1MB")
    loader = stoker.DataLoader(staged, 100, num_workers=workers)
    for _ in range(2):
        assert float(next(iter(loader))[5]) == 10
    step.k = 3
    with pytest.warns(StokerWarning, match=r"k was 2 and is 3"):
        assert float(next(iter(loader))[5]) == 15


class Hung(Point):  # no __slots__: it has attributes
    pass


def hung(kind: str, i: int) -> Any:
    x = Hung(torch.tensor(i), 2) if kind == "tuple" else torch.full((3,), i)
    x.extra = i
    return x


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["tuple", "tensor"])
def test_what_hangs_on_a_sample_is_kept_with_it(kind: str) -> None:
    staged = stoker.Staged(
        list(range(24)), prepare=functools.partial(hung, kind), augment=lambda x: x.extra, cache="ram"
    )
    for _ in range(3):
        assert [staged[i] for i in range(24)] == list(range(24))
    assert staged.account.filled == 24


@pytest.mark.slow
@pytest.mark.parametrize("labels", LABELS, ids=lambda x: type(x).__name__)
@pytest.mark.few(1)
def test_a_label_among_many_that_is_changed(labels: Any) -> None:
    data = Through(Scaled(2), copy.copy(labels) if not isinstance(labels, torch.Tensor) else labels.clone())
    loader = stoker.DataLoader(stoker.Staged(data, cache="ram", cache_budget="1MB"), 1000)
    for _ in range(2):
        assert float(next(iter(loader))[517]) == 1034
    data.labels[517] = -1
    with pytest.warns(StokerWarning, match="labels"):
        assert float(next(iter(loader))[517]) == -2


def test_a_changed_dataset_is_noticed_without_anybody_saying_that_an_epoch_begins() -> None:
    data = Sized()
    staged = stoker.Staged(data, prepare=keep, cache_budget="1MB")
    loader = torch.utils.data.DataLoader(staged, 10, num_workers=1)
    assert {b.shape[1] for b in loader} == {2}
    data.size = 3
    assert {b.shape[1] for b in loader} == {3}
    staged.look_again()
    with pytest.warns(StokerWarning, match="the cache is no longer used: size was 2 and is 3"):
        sample = staged[0]
    assert sample.shape == (3,)


def test_indices_that_are_no_numbers_go_past_the_cache() -> None:
    table = {"a": torch.tensor(1), "b": torch.tensor(2)}

    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, k: str) -> Any:
            return table[k]

    staged = stoker.Staged(Named(), prepare=keep, cache_budget="1MB")
    assert [b.tolist() for b in stoker.DataLoader(staged, sampler=["b", "a"], batch_size=2)] == [[2, 1]]


def test_indices_from_the_end_and_past_it() -> None:
    staged = stoker.Staged(list(range(10)), prepare=keep, cache_budget="1MB")
    assert [staged[-1], staged[-1], staged[9]] == [9, 9, 9]
    with pytest.raises(IndexError):
        staged[10]


def test_attributes_that_are_set_are_the_datasets() -> None:
    source = Source(kind="tensor")
    staged = stoker.Staged(source, prepare=keep, cache_budget="1MB")
    staged.epoch = 3
    assert source.epoch == staged.epoch == 3  # type: ignore[attr-defined]
    staged._step, vars(staged)["scale"] = 4, 2.0
    assert source._step == staged._step == 4  # type: ignore[attr-defined]
    staged[0]
    assert source.scale == staged.scale == 2.0  # type: ignore[attr-defined]
    assert "scale" not in vars(staged)
    del staged.epoch
    assert not hasattr(source, "epoch")


def test_of_a_name_that_both_have_the_script_means_the_datasets() -> None:
    source = Source(kind="tensor")
    source._samples = source.cache = "its own"  # type: ignore[attr-defined]
    staged = stoker.Staged(source, prepare=keep, cache_budget="1MB")
    staged._samples = staged.cache = "the script's"  # type: ignore[assignment]
    assert source._samples == source.cache == "the script's"  # type: ignore[attr-defined]
    assert staged._samples == len(source)


def test_attributes_of_the_dataset_are_there() -> None:
    source = Source()
    source.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    source.samples = [("a.jpg", 0)]  # type: ignore[attr-defined]  # torchvision's name
    staged = stoker.Staged(source, prepare=keep, cache_budget="1MB")
    assert (staged.classes, staged.samples) == (["cat", "dog"], [("a.jpg", 0)])
    assert len(staged) == N
    with pytest.raises(AttributeError, match="colour"):
        getattr(staged, "colour")  # noqa: B009
    again = pickle.loads(pickle.dumps(staged))
    assert same(again[3], staged[3])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stoker.Staged(Source(), prepare=keep, cache="magic"), "not 'magic'"),
        (lambda: stoker.Staged(Source(), prepare=keep, cache_budget="lots"), "budget must be .*, not 'lots'"),
        (lambda: stoker.Staged(Source(), prepare=keep, cache_budget=0), "budget must be .*, not 0"),
        (lambda: stoker.Staged(["a.jpg", "b.jpg"]), "prepare="),
        (lambda: stoker.Staged(iter([1, 2]), prepare=keep), "map-style"),
    ],
)
def test_wrong_arguments(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


# -- leaves

numbers = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
arrays = st.builds(
    lambda dtype, shape, order, seed: np.asarray(
        np.random.default_rng(seed).integers(0, 2, shape).astype(dtype).transpose(order[: len(shape)])
        if sorted(order[: len(shape)]) == list(range(len(shape)))
        else np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
    ),
    st.sampled_from(["u1", "i8", "f4", "f8", "?", "c8", ">i4", "S3", "M8[s]"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.permutations(range(3)),
    st.integers(0, 99),
)
tensors = arrays.filter(lambda a: a.dtype.kind in "uif?c" and a.dtype.isnative).map(torch.from_numpy)
samples = st.recursive(
    numbers | arrays | tensors | st.just(np.float16(1.5)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=8,
)


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@hypothesis_settings(max_examples=40)
@given(samples, st.booleans())
def test_a_sample_comes_back_as_it_was(sample: Any, dense: bool) -> None:
    words, leaves = take(sample, dense)
    made = Layout(words)
    assert equal(made.put([x.copy() for x in leaves]), sample)
    for size, leaf in zip(made.sizes, leaves, strict=True):
        assert size in (None, leaf.nbytes)


@pytest.mark.slow
@hypothesis_settings(max_examples=40)
@given(st.lists(samples, min_size=1, max_size=24), st.integers(0, 99))
def test_a_store_gives_back_what_it_let_in(given_samples: list[Any], seed: int) -> None:
    n, budget = len(given_samples), 1 << 22
    store = Store(MemoryTables(size_of(n, budget)), n, budget)
    order = np.random.default_rng(seed).permutation(n)
    for part in np.array_split(order, 3):
        store.admit({int(i): take(given_samples[i]) for i in part})
    at = store.where(np.arange(n))
    assert store.account.prepared == n
    for i in np.flatnonzero(at):
        assert equal(store.read(int(at[i])), given_samples[i])
    assert store.account.filled == int((at != 0).sum()) >= n - 16


class Boxes(torch.Tensor):
    """As torchvision's tv_tensors are made."""


def test_kinds_of_tensors_come_back() -> None:
    boxes = torch.arange(8.0).view(2, 4).as_subclass(Boxes)
    boxes.canvas_size = (3, 4)  # type: ignore[attr-defined]
    words, leaves = take([boxes])
    (again,) = Layout(words).put([x.copy() for x in leaves])
    assert type(again) is Boxes
    assert again.canvas_size == (3, 4)
    assert torch.equal(again, boxes)
    assert take([boxes])[0] == take([again])[0]


class Encoded:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_a_tensor_that_carries_gradients_is_not_cached() -> None:
    """They would no longer reach the encoder that a sample has used."""
    from stoker.staging.store.encode import CacheError

    weight = torch.nn.Parameter(torch.ones(2))
    for sample in (weight, [weight * 2], Encoded(weight * 2), (weight * 2).as_subclass(Boxes)):
        with pytest.raises(CacheError, match="gradients"):
            take(sample)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "1", "P", "I;16", "F"])
def test_pictures_come_back(mode: str) -> None:
    from PIL import Image

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 13, 3), np.uint8)).convert("RGB")
    picture = (
        picture.convert("L").convert("I").point(lambda v: v * 200).convert(mode)
        if mode == "I;16"
        else picture.convert(mode)
    )
    picture.info["dpi"] = (72, 72)
    words, leaves = take((picture, 3))
    again, three = Layout(words).put(leaves)
    assert (again.mode, again.size, again.info, three) == (picture.mode, picture.size, picture.info, 3)
    assert again.tobytes() == picture.tobytes()
    assert again.getpalette() == picture.getpalette()


def test_words_from_elsewhere_do_no_harm() -> None:
    from stoker.staging.store.encode import CacheError

    for words in (
        "",
        "[]",
        '["t","uint8",[4],[1000000]]',
        '["t","uint8",[4],[-1]]',
        '["a","|O",[4],[8]]',
        '["o","x"]',
        '["N","os:system",[]]',
        '["P","RGB",[4],"{}"]',
        '["P","RGB",[4,4],"__import__(1)"]',
        '["t","nothing",[4],[1]]',
        "[" * 5000,
    ):
        with pytest.raises(CacheError):
            Layout(words, pickles=False)


@pytest.mark.parametrize(("gone", "instead"), [("compressed", 'use "ram"'), ("device", "a TensorDataset with")])
def test_caches_that_are_gone_are_refused_by_name(gone: str, instead: str) -> None:
    with pytest.raises(UsageError, match=f"is no longer supported: {instead}"):
        stoker.Staged(["x"], prepare=keep, cache=gone)
    with pytest.raises(UsageError, match=f"is no longer supported: {instead}"):
        stoker.install(cache=gone)


LISTS: list[Any] = [
    list(range(-8, 40)),
    [1 << 62, -(1 << 63)] * 10,
    [1 << 70] * 20,
    [float("nan"), -0.0, float("inf"), 0.1] * 8,
    [True, False] * 20,
    [1, True] * 20,
    [1, 2.0] * 20,
    ["", "ü", "\ud800", "word", "漢字"] * 8,
    ["only one"],
    [],
    [[1] * 20, ["a"] * 20],
    tuple(range(30)),
    [(i, i / 3, i % 2 == 0, f"row {i}") for i in range(20)],
    [[-0.0, float("nan"), 1 << 62, True]] * 5,
    [(1 << 70, 2)] * 20,
    [(1, 2), [1, 2]] * 10,
    [(1, 2), (1, 2, 3)] * 10,
    [(1, 2), (True, 2)] * 10,
    [(i, None) for i in range(20)],
    [(i, [i]) for i in range(20)],
    [Point(i, 0) for i in range(20)],
    [()] * 20,
]


@pytest.mark.parametrize("k", range(len(LISTS)))
def test_long_lists_of_numbers_and_words_come_back_as_they_were(k: int) -> None:
    words, leaves = take({"ids": LISTS[k], "n": 3})
    back = Layout(words).put([x.copy() for x in leaves])
    assert repr(back) == repr({"ids": LISTS[k], "n": 3})  # NaN, and True that is no 1


def test_token_ids_take_one_leaf() -> None:
    _, leaves = take({"input_ids": list(range(128)), "attention_mask": [1] * 128, "tokens": ["a"] * 128})
    assert len(leaves) == 3


def test_rows_take_one_leaf() -> None:
    _, leaves = take({"boxes": [[1.5, 2.5, 3.5, 4.5]] * 7, "log": [(i, f"{i}") for i in range(50)]})
    assert len(leaves) == 2


@hypothesis_settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(), st.floats() | st.booleans() | st.text(max_size=3)), max_size=24),
    st.sampled_from([tuple, list]),
)
def test_lists_of_rows_come_back_as_they_were(rows: list[Any], kind: Any) -> None:
    sample = [kind(row) for row in rows]
    words, leaves = take(sample)
    back = Layout(words).put([x.copy() for x in leaves])
    assert repr(back) == repr(sample)
    assert len({id(row) for row in back if row}) == len(back) or kind is tuple


def test_tensors_in_what_is_pickled_come_back_as_they_were() -> None:
    x = torch.arange(6.0)
    subclass = torch.nn.Parameter(x[:3].clone(), requires_grad=False)
    tensors = [
        x,
        x.view(2, 3).double().t(),
        torch.empty(0, 3),
        torch.tensor(1 + 2j).conj(),
        x.bool(),
        subclass,
        x.as_strided((1, 6), (9, 1)),
    ]
    again = stored_copy(types.SimpleNamespace(tensors=tensors, other=x))
    for old, new in zip(tensors, again.tensors, strict=True):
        assert (type(new), new.dtype, new.shape, new.stride()) == (type(old), old.dtype, old.shape, old.stride())
        assert torch.equal(new, old)
    assert again.other is again.tensors[0]
    again.tensors[0].zero_()
    assert x[5] == 5, "a copy"


@pytest.mark.few(1)
@pytest.mark.parametrize("flips", [[1, 0], [0, 1], [0, 0, 1]])
def test_a_rare_draw_from_system_entropy_is_no_stale_sample(flips: list[int]) -> None:
    """One sample in fifty is flipped: the served one or the script's own, when they are compared."""
    staged = stoker.Staged(Flipped(), cache="ram")
    assert len([staged[i] for i in range(40)]) == 40
    made = iter([*flips, *[0] * 100])
    read = functools.partial(staged.dataset.__getitem__, 3)
    assert staged._filler.compare_whole(3, read, lambda x: x + next(made))
    assert staged.usable
    with pytest.warns(UserWarning, match="Cache discarded"):
        assert not staged._filler.compare_whole(3, read, lambda x: x + 1)


class Flipped(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4,), float(i)).exp()


class FromFiles(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{k}.txt" for k in range(4)]
        self.conf = types.SimpleNamespace(pad=1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> int:
        return int(self.paths[i].read_text()) + self.conf.pad


@pytest.fixture
def from_files(tmp_path: Path) -> FromFiles:
    made = FromFiles(tmp_path)
    for k, path in enumerate(made.paths):
        path.write_text(str(k))
    return made


def test_the_user_is_told_which_value_changed(from_files: FromFiles) -> None:
    before = Inputs(from_files)
    from_files.conf.pad = 2
    changes = before.changes(Inputs(from_files), {})
    assert [readable(c) for c in changes] == ["dataset.conf.pad was 1 and is 2", "dataset.conf"]


@pytest.mark.parametrize("value", [True, sqlite3.connect(":memory:")], ids=["plain", "a connection"])
def test_a_handle_of_a_thread_is_a_handle(from_files: FromFiles, value: object) -> None:
    from_files.conf.thread = threading.local()
    from_files.conf.thread.value = value
    is_plain = value is True
    inputs = Inputs(from_files)
    assert any("thread" in path for path in inputs.of_thread) == is_plain
    assert any("thread" in path for path in inputs.handles) != is_plain
    assert "_local" in inputs.why_incomplete({})


class Multiplied(Dataset[Any]):
    scale = 1

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.full((4,), i * self.scale)


@pytest.mark.slow
def test_a_change_in_mid_epoch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_watch, "QUICK_S", -1.0)
    monkeypatch.setattr(change_watch, "SAVED_SHARE", 1.0)  # other load on the machine must not matter
    data = Multiplied()
    loader = stoker.DataLoader(stoker.Staged(data), batch_size=8)
    assert torch.cat(list(loader))[:, 0].tolist() == list(range(32))
    seen = []

    def epoch() -> None:
        for batch in loader:
            seen.extend(batch[:, 0].tolist())
            data.scale = 3

    with pytest.warns(StokerWarning, match="scale was 1 and is 3"):
        epoch()
    assert seen == [*range(8), *(3 * i for i in range(8, 32))]


def test_what_worker_init_fn_sets_counts_even_if_the_script_has_just_looked_at_a_sample() -> None:
    data, sizes = Sized(), [2]

    def init(_: int) -> None:
        torch.utils.data.get_worker_info().dataset.size = sizes[0]  # type: ignore[union-attr]

    staged = stoker.Staged(data, prepare=keep, cache_budget="1MB")
    loader = torch.utils.data.DataLoader(staged, 10, num_workers=1, worker_init_fn=init)
    for size in (2, 2, 3):
        sizes[0] = size
        assert staged[0].shape == (2,)
        assert {b.shape[1] for b in loader} == {size}
