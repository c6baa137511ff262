"""What ``--apply`` does not do where it would cost more than an epoch takes."""

from __future__ import annotations

import gc
import math
import os
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stoker.core.warn import StokerWarning
from stoker.staging import trial
from stoker.staging.isolate import Trial
from stoker.staging.trial import TrialResult
from stoker.tuning import apply, cache_pays, managed_dataset
from tests.tuning.conftest import put_behind_apply

N = 24


class Loader(DataLoader[Any]):
    """What ``--apply`` is put behind."""


@pytest.fixture(autouse=True)
def _applied(monkeypatch: pytest.MonkeyPatch) -> None:
    put_behind_apply(Loader, monkeypatch)


class Data(Dataset[Any]):
    """Samples of about half a millisecond."""

    def __init__(self, add: float = 0.0) -> None:
        self.add = add
        self.table = np.zeros(10_000)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = np.arange(2000, dtype=np.float64) + i
        for _ in range(40):
            x = np.log(np.exp(x / 5000)) * 5000
        return torch.from_numpy(x) + self.add + self.table[i]


def known(loader: DataLoader[Any]) -> managed_dataset.ManagedDataset:
    return next(x for x in apply._datasets if x.dataset is loader.dataset)


@pytest.mark.parametrize(
    ("sample_s", "digest_s", "waited_s"),
    [(1.0, 0.0, 5.0), (0.1, 0.0, 0.5 * 0.1 * N), (0.001, 0.0, 0.25), (math.inf, 0.0, 5.0), (math.inf, 0.1, 0.25)],
)
def test_a_trial_is_waited_for_half_an_epoch_at_most(
    monkeypatch: pytest.MonkeyPatch, sample_s: float, digest_s: float, waited_s: float
) -> None:
    monkeypatch.undo()
    now = [0.0]
    monkeypatch.setattr(managed_dataset, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds: float) -> bool:
        now[0] += seconds or 1e-6
        return False

    tried: Any = SimpleNamespace(sample_s=sample_s, wait=wait)
    managed: Any = SimpleNamespace(_samples=N, _workers=1, _digest_s=digest_s)
    assert not managed_dataset.ManagedDataset._has_ended(managed, tried, 0.0, 5.0, True)
    assert now[0] == pytest.approx(waited_s, abs=0.02)
    now[0] = 0.0
    assert not managed_dataset.ManagedDataset._has_ended(managed, tried, 0.0, 5.0, False)
    assert now[0] == pytest.approx(5.0, abs=0.02)


@pytest.mark.parametrize(
    ("compare_s", "begin_s", "pays"), [(0.01, 0.01, True), (0.4, 0.9, True), (0.6, 0.9, False), (0.4, 1.1, False)]
)
def test_what_comparing_costs_is_weighed_against_what_an_epoch_gains(
    monkeypatch: pytest.MonkeyPatch, compare_s: float, begin_s: float, pays: bool
) -> None:
    monkeypatch.undo()
    memo: Any = SimpleNamespace(served_s=0.0)
    found = TrialResult(None, [], "", sample_s=1 / N, memo=memo, compare_s=compare_s, begin_s=begin_s)
    assert (cache_pays.why_comparing_does_not_pay(found, N, 1) == "") is pays


def test_a_trial_tells_what_comparing_costs_and_how_long_a_sample_takes() -> None:
    loader = Loader(Data(), batch_size=4)
    list(loader)
    found = known(loader).found
    assert found is not None
    assert 0 < found.compare_s <= found.begin_s
    started = managed_dataset.start_trial(Data(), 30.0)
    assert started.wait(30.0)
    assert 0 < started.sample_s < 5
    assert started.result().plan is not None


@pytest.mark.slow
def test_after_a_change_another_trial_runs_beside_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data()
    loader = Loader(data, batch_size=4, num_workers=1)
    for _ in range(2):
        list(loader)
    assert known(loader).staged is not None
    wait, is_over = Trial.wait, [False]
    monkeypatch.setattr(Trial, "wait", lambda trial, s: is_over[0] and wait(trial, s))
    monkeypatch.setattr(apply, "WAIT_S", 0.0)
    data.table[7] = 3
    with pytest.warns(StokerWarning, match="Cache discarded, the dataset changed: table"):
        batches = list(loader)
    assert torch.equal(torch.cat(batches), torch.stack([data[i] for i in range(N)]))
    assert known(loader).staged is None
    assert known(loader).trial is not None
    is_over[0] = True
    for _ in range(200):
        batches = list(loader)
        assert torch.equal(torch.cat(batches), torch.stack([data[i] for i in range(N)]))
        staged = known(loader).staged
        if staged is not None and staged.account.filled == N:
            break
    else:
        pytest.fail("the cache was not filled")


def waves(k: int) -> Any:
    x = np.arange(2000, dtype=np.float64) + k
    for _ in range(40):
        x = np.log(np.exp(x / 5000)) * 5000
    return x


class Labelled(Data):
    """Only a call depends on nothing that the script changes; all of a sample is cached otherwise."""

    def __init__(self, depends: bool = False) -> None:
        self.samples = [(k, 0) for k in range(N)]
        self.depends = depends

    def __getitem__(self, i: int) -> Any:
        k, label = self.samples[i]
        total = label
        for j in range(40_000 * self.depends):
            total = (31 * total + j) % 10_007
        return torch.from_numpy(waves(k)), total


@pytest.mark.parametrize("depends", [False, True])
def test_after_a_change_the_cache_avoids_what_has_changed_if_that_costs_little(
    depends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels that change once may change in each epoch."""
    monkeypatch.setattr(trial, "NEARLY", 0.5 * depends)  # on a busy machine, too
    data = Labelled(depends)
    loader = Loader(data, batch_size=4)
    list(loader)
    assert known(loader).staged is not None

    def relabel(by: int) -> None:
        data.samples = [(k, k % by) for k in range(N)]
        for ours, theirs in zip(loader, DataLoader(data, batch_size=4), strict=True):
            assert all(map(torch.equal, ours, theirs))

    with pytest.warns(StokerWarning, match="Cache discarded, the dataset changed: samples"):
        relabel(2)
    found = known(loader).found
    assert found is not None
    assert (found.memo is None) is depends
    if not depends:
        for by in (3, 4):
            relabel(by)  # and the cache goes on
        assert known(loader).staged is not None
        assert known(loader).found is found


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """What is part of a reference cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("most", [0, pytest.param(1 << 30, marks=pytest.mark.slow)])
def test_a_large_dataset_goes_when_the_script_has_dropped_it(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(apply, "MOST_LEFT_BYTES", most)
    loader = Loader(Data(), batch_size=4)
    list(loader)
    first, dataset, ref = known(loader), weakref.ref(loader.dataset), weakref.ref(loader)
    assert first.staged is not None
    list(Loader(loader.dataset, batch_size=3))  # another loader of the same dataset, which ends before the first one
    it = iter(loader)
    next(it)
    del loader
    assert ref() is None  # torch's iterators do not refer to their loaders
    again = Loader(Data(2.0), batch_size=4)
    list(again)
    assert torch.equal(torch.cat(list(it)), torch.stack([Data()[i] for i in range(4, N)]))
    del it
    until = time.monotonic() + 20
    while gc.collect() or (dataset() is not None and not most and time.monotonic() < until):
        os.sched_yield()  # another thread may be about to drop it
    assert (dataset() is None) is (most == 0), [type(x) for x in gc.get_referrers(dataset())]
    apply.refresh()
    assert all(entry["cache"].get("kept") for entry, _, _ in apply._entries.values()), apply._entries
    assert torch.equal(torch.cat(list(again)), torch.stack([again.dataset[i] for i in range(N)]))


@pytest.mark.slow
@pytest.mark.usefixtures("_no_collection")
def test_where_datasets_are_dropped_at_once_the_next_one_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Trial.wait
    monkeypatch.setattr(Trial, "wait", lambda trial, s: False)
    monkeypatch.setattr(apply, "WAIT_S", 0.0)
    for k in range(apply.MOST_LOST + 1):
        list(Loader(Data(k), batch_size=4))
    monkeypatch.setattr(Trial, "wait", wait)
    loader = Loader(Data(), batch_size=4)
    list(loader)
    assert "has dropped other datasets" in known(loader).reason
    assert known(loader).trial is None
    monkeypatch.setattr(apply, "WAIT_S", 60.0)
    known(loader)._not_before = 0.0  # it has been in use for some time
    for _ in range(2):
        batches = list(loader)
    assert known(loader).staged is not None
    assert torch.equal(torch.cat(batches), torch.stack([loader.dataset[i] for i in range(N)]))


FACTORS = {"scale": 1}


def number(word: str, scale: int) -> int:
    out = 0
    for letter in word * 32:
        out = (out * 31 + ord(letter)) % 10_007
    return out * scale


def encode(text: str) -> Any:
    return torch.tensor([number(word, FACTORS["scale"]) for word in text.split()])


def collate(samples: list[Any]) -> Any:
    return torch.stack([encode(text) for text, _ in samples]), torch.tensor([x for _, x in samples])


class Drawn(Data):
    """Its first part is slow, its second one random."""

    def __getitem__(self, i: int) -> Any:
        x = super().__getitem__(i)
        return f"a b {i} " * 20, float(x[0]) + torch.rand(()).item()


@pytest.mark.slow
def test_workers_that_have_the_cache_get_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a trial ends in mid-epoch, because what the collate function reads has changed."""
    settings: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "timeout": 30, "collate_fn": collate}
    loader, torchs = Loader(Drawn(), **settings), DataLoader(Drawn(), **settings)
    monkeypatch.setitem(FACTORS, "scale", 1)
    monkeypatch.setattr(apply, "first_guess", lambda loader: (1, "as it has"))
    wait, is_over = Trial.wait, [True]
    monkeypatch.setattr(Trial, "wait", lambda trial, s: is_over[0] and wait(trial, 60))

    def check() -> None:
        state = torch.get_rng_state()
        theirs = list(torchs)
        torch.set_rng_state(state)
        for k, batch in enumerate(loader):
            is_over[0] |= k == 1
            assert all(map(torch.equal, batch, theirs[k]))

    for _ in range(3):
        check()
    assert known(loader).staged is not None
    assert known(loader).collated is not None
    monkeypatch.setattr(apply, "WAIT_S", 0.0)
    for scale in (2, 3):
        monkeypatch.setitem(FACTORS, "scale", scale)
        is_over[0] = False
        with pytest.warns(StokerWarning, match="Cache discarded"):
            check()
        check()


class Collates(Data):
    def collate(self, samples: list[Any]) -> Any:
        return torch.stack(samples)


def test_a_trial_that_nobody_asks_about_holds_up_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Collates()
    dropped = weakref.ref(data)
    monkeypatch.setattr(apply, "WAIT_S", 0.0)
    list(Loader(data, batch_size=4, collate_fn=data.collate))
    del data
    assert dropped() is None
    monkeypatch.setattr(apply, "WAIT_S", 60.0)
    waiting, loader = Loader(Data(1.0), batch_size=4), Loader(Data(2.0), batch_size=4)
    apply.loader_made(waiting)
    for _ in range(200):
        list(loader)
        if known(loader).staged is not None:
            return
    pytest.fail("no trial of the second dataset")


def test_a_longer_loader_of_the_same_dataset_is_weighed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data()
    monkeypatch.setattr(cache_pays, "MOST_BEGIN_SHARE", 0.0)
    monkeypatch.setattr(cache_pays, "LITTLE_S", 0.0)
    first = Loader(torch.utils.data.Subset(data, range(9)), batch_size=4)
    list(first)
    (managed,) = apply._datasets
    assert "would not pay off" in managed.reason
    monkeypatch.setattr(cache_pays, "LITTLE_S", math.inf)
    list(first)
    assert managed.staged is None
    list(Loader(data, batch_size=4))
    assert managed.staged is not None


def test_of_hundreds_of_small_datasets_few_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in episodes of few-shot learning. Those that were not tried do not make the others be forgotten."""
    monkeypatch.setattr(apply, "TRIAL_SHARE", 0.1)
    monkeypatch.setattr(apply, "_began", [time.monotonic()])
    forks: list[int] = []
    monkeypatch.setattr(managed_dataset, "start_trial", lambda *_: time.sleep(0.01) or forks.append(1) or no_process())
    for _ in range(400):
        list(Loader(torch.utils.data.TensorDataset(torch.rand(16, 4)), batch_size=8, shuffle=True))
    took_s = time.monotonic() - apply._began[0]
    assert 0.01 * len(forks) <= 0.1 * took_s + 0.01 * (apply.FEW_DATASETS + 1), (len(forks), took_s)
    assert len(apply._tried_s) <= apply.FEW_DATASETS + 1


def test_datasets_of_a_class_that_are_dropped_after_one_epoch_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task(Data):
        pass

    monkeypatch.setattr(apply, "TRIAL_SHARE", math.inf)
    tried: list[Any] = []
    monkeypatch.setattr(managed_dataset, "start_trial", lambda dataset, *_: tried.append(type(dataset)) or no_process())
    for k in range(40):
        list(Loader(Task(float(k)), batch_size=8, shuffle=True))
    assert tried.count(Task) <= apply.MOST_LOST
    other, loader = Data(1.0), Loader(Data(2.0), batch_size=8, shuffle=True)
    for _ in range(2):
        list(Loader(other, batch_size=8, shuffle=True))
        list(loader)
    assert tried.count(Data)  # of another class


def no_process() -> Any:
    raise OSError("on purpose")
