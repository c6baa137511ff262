"""A trial that ends in the middle of an epoch: workers that run already serve and store what it found."""

from __future__ import annotations

import math
import os
import random
import signal
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from stoker.core.warn import StokerWarning
from stoker.loader.loader_state import state_of
from stoker.staging import trial
from stoker.staging.dataset import Staged
from stoker.staging.isolate import Trial
from stoker.staging.late_plan import LatePlan
from stoker.tuning import apply, cache_pays, managed_dataset

SAMPLES, BATCH = 48, 4
HELD = 3  # batches after which the trial may end
WAYS: dict[str, dict[str, Any]] = {
    "fork": {},
    "persistent": {"persistent_workers": True},
    "forkserver": {"multiprocessing_context": "forkserver"},
    "spawn, persistent": {"multiprocessing_context": "spawn", "persistent_workers": True},
}


class Drawn(Dataset[Any]):
    """Its first part is slow, its second one random."""

    def __init__(self) -> None:
        self.add = 0.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        x = slow(i) + self.add
        x = np.roll(x, random.randrange(1000)) * torch.rand(1).item()
        return torch.from_numpy(x), np.random.rand(), f"sample {i}"


class Plain(Drawn):
    def __getitem__(self, i: int) -> Any:
        return slow(i)


class Pairs(Drawn):
    """Of which calls are kept: each sample loads another one, too."""

    def load(self, i: int) -> Any:
        return slow(i) + self.add

    def __getitem__(self, i: int) -> Any:
        j = random.randrange(SAMPLES)
        return torch.from_numpy(self.load(i) + self.load(j)), np.random.rand(), f"sample {i}"


def slow(i: int) -> Any:
    """About half a millisecond."""
    x = np.arange(2000, dtype=np.float64) + i
    for _ in range(40):
        x = np.log(np.exp(x / 5000)) * 5000
    return x


class Loader(DataLoader[Any]):
    """What ``--apply`` is put behind."""


class Held:
    """Trials end when this says so, and not before."""

    over = False


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    for name, value in {"_datasets": [], "_entries": {}, "_made": deque(), "keep_freed_memory": lambda: None}.items():
        monkeypatch.setattr(apply, name, value)
    monkeypatch.setattr(apply, "_with_gradients", set())
    monkeypatch.setattr(apply, "WAIT_S", 0.0)
    monkeypatch.setattr(managed_dataset, "LEAST_WAIT_S", 1.0)
    monkeypatch.setattr(cache_pays, "LITTLE_S", math.inf)  # epochs take little time here
    monkeypatch.setattr(Loader, "_get_iterator", DataLoader._get_iterator)
    Loader._get_iterator = apply.begin({})
    out, wait, script = Held(), Trial.wait, os.getpid()
    monkeypatch.setattr(Trial, "wait", lambda trial, s: (out.over or os.getpid() != script) and wait(trial, 60))
    return out


def epochs(
    cls: type[DataLoader[Any]],
    data: Dataset[Any],
    count: int,
    at_batch: Callable[[int], None] = lambda k: None,
    num_workers: int = 2,
    **how: Any,
) -> list[Any]:
    """The batches of some epochs; ``at_batch`` is called after each one of the first epoch."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    loader = cls(data, batch_size=BATCH, shuffle=True, num_workers=num_workers, worker_init_fn=seed, **how)
    out = []
    for epoch in range(count):
        for k, batch in enumerate(loader):
            out.append(batch)
            if epoch == 0:
                at_batch(k)
    return out


def seed(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, (Drawn, Subset))
    random.seed(info.seed)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) and x[2] == y[2] for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("data", [Drawn, Pairs])
@pytest.mark.parametrize("part", [False, True])
def test_an_iterator_without_workers_gets_the_cache_in_mid_epoch(data: type[Drawn], part: bool, held: Held) -> None:
    filled = []

    def at_batch(k: int) -> None:
        held.over = k >= HELD
        (known,) = apply._datasets
        filled.append(0 if known.staged is None else known.staged.account.filled)

    def made() -> Any:
        return Subset(data(), list(range(SAMPLES // 2, SAMPLES))) if part else data()

    found = epochs(Loader, made(), 3, at_batch, num_workers=0)
    assert same(found, epochs(DataLoader, made(), 3, num_workers=0))
    (known,) = apply._datasets
    assert known.staged is not None, known.reason
    assert known.staged.usable
    assert filled[: HELD + 1] == [0] * (HELD + 1)
    assert len(filled) == HELD + 1 or filled[-1] > 0  # within the first epoch
    assert known.staged.account.filled >= SAMPLES // (1 + part)


@pytest.mark.parametrize("at", [HELD - 1, HELD, HELD + 1, HELD + 2])
def test_an_iterator_without_workers_sees_what_the_loop_changes(at: int, held: Held) -> None:
    data, other = Drawn(), Drawn()

    def at_batch(k: int) -> None:
        held.over = k >= HELD
        data.add = 5.0 * (k >= at)

    def change(k: int) -> None:
        other.add = 5.0 * (k >= at)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StokerWarning)
        found = epochs(Loader, data, 3, at_batch, num_workers=0)
    assert same(found, epochs(DataLoader, other, 3, change, num_workers=0))


def test_where_handing_it_over_fails_without_workers_the_epoch_goes_on(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Staged, *args: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(Staged, "_stoker_batches", fail)
        found = epochs(Loader, Drawn(), 1, lambda k: setattr(held, "over", k >= HELD), num_workers=0)
    assert same(found, epochs(DataLoader, Drawn(), 1, num_workers=0))


class OwnSampler(torch.utils.data.RandomSampler):
    """Of the script's own: workers would ask it ahead of time."""


@pytest.mark.parametrize(("own", "draws", "waits"), [(True, False, False), (False, True, False), (False, False, True)])
def test_who_gets_no_workers_does_not_wait(
    own: bool, draws: bool, waits: bool, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "WAIT_S", 0.05)
    waited = []
    monkeypatch.setattr(Trial, "wait", lambda trial, s: bool(waited.append(s)))
    data = Drawn() if draws else Plain()
    list(Loader(data, batch_size=BATCH, sampler=(OwnSampler if own else torch.utils.data.RandomSampler)(data)))
    assert (max(waited) > 0) is waits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "way"),
    [
        (Drawn, "persistent"),
        (Pairs, "fork"),
        pytest.param(Drawn, "spawn, persistent", marks=pytest.mark.slow),
        pytest.param(Pairs, "forkserver", marks=pytest.mark.slow),
    ],
)
def test_workers_get_the_cache_in_mid_epoch(data: type[Drawn], way: str, held: Held) -> None:
    filled = []

    def at_batch(k: int) -> None:
        held.over = k >= HELD
        (known,) = apply._datasets
        filled.append(0 if known.staged is None else known.staged.account.filled)

    found = epochs(Loader, data(), 2, at_batch, **WAYS[way])
    forked = {**WAYS[way], "multiprocessing_context": "fork"}  # how workers start changes no bit
    assert same(found, epochs(DataLoader, data(), 2, **forked))
    (known,) = apply._datasets
    assert known.staged is not None, known.reason
    assert known.staged.usable
    assert filled[: HELD + 1] == [0] * (HELD + 1)
    assert filled[-1] > 0  # within the first epoch
    assert known.staged.account.filled == SAMPLES


@pytest.mark.slow
def test_a_subset_gets_the_cache_in_mid_epoch(held: Held) -> None:
    def part() -> Any:
        return Subset(Drawn(), list(range(SAMPLES // 2, SAMPLES)))

    found = epochs(Loader, part(), 2, lambda k: setattr(held, "over", k >= HELD), persistent_workers=True)
    assert same(found, epochs(DataLoader, part(), 2, persistent_workers=True))
    (known,) = apply._datasets
    assert known.staged is not None, known.reason
    assert known.staged.account.filled == SAMPLES // 2


@pytest.mark.slow
def test_with_task_seeds(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader with one worker gets more, whose random numbers are set for each task."""
    monkeypatch.setattr(apply, "first_guess", lambda loader: (2, "two"))
    found = epochs(Loader, Drawn(), 2, lambda k: setattr(held, "over", k >= HELD), num_workers=1)
    assert apply._datasets.pop().staged is not None
    assert same(found, epochs(Loader, Drawn(), 2, num_workers=1))  # its trial ends before the first batch


@pytest.mark.slow
@pytest.mark.parametrize(("at_first", "later"), [(0.0, 5.0), (5.0, 0.0)])
def test_what_the_loop_changes_before_that_is_not_served(
    at_first: float, later: float, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have the dataset as it was when they started. The trial saw what the loop changes (first case), or what
    is there again after that (second case)."""
    monkeypatch.setattr(trial, "NEARLY", math.inf)  # the cache depends on what changes, although it need not
    data, other = Drawn(), Drawn()
    apply.loader_made(Loader(data, batch_size=BATCH))
    data.add = other.add = at_first

    def at_batch(k: int) -> None:
        if k == HELD:
            data.add = later
            held.over = True
        (known,) = apply._datasets
        assert known.staged is None or not known.staged.account.filled

    def change(k: int) -> None:
        other.add = later if k >= HELD else at_first

    assert same(epochs(Loader, data, 2, at_batch), epochs(DataLoader, other, 2, change))
    assert apply._datasets[0].staged is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["publish", "read"])
def test_where_it_fails_the_epoch_goes_on(name: str, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(LatePlan, name, fail)
    found = epochs(Loader, Drawn(), 2, lambda k: setattr(held, "over", k >= HELD))
    assert same(found, epochs(DataLoader, Drawn(), 2))
    (known,) = apply._datasets
    assert known.staged is not None, known.reason
    assert known.staged.account.filled == SAMPLES  # in the second epoch


@pytest.mark.slow
def test_a_worker_that_is_killed_after_that(held: Held) -> None:
    """The one that takes its place has the cache, too."""
    loaders: list[Any] = []

    class Kept(Loader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.on_worker_death = "restart"
            loaders.append(self)

        def __iter__(self) -> Any:
            self.it = super().__iter__()
            return self.it

    def at_batch(k: int) -> None:
        held.over = k >= HELD
        if k == HELD + 4:
            os.kill(loaders[0].it._workers[0].pid, signal.SIGKILL)

    found = epochs(Kept, Drawn(), 2, at_batch)
    assert same(found, epochs(DataLoader, Drawn(), 2))


@pytest.mark.slow
def test_a_copy_of_a_loader_whose_epoch_runs(held: Held) -> None:
    """Frameworks copy attributes of loaders: what is only for one epoch is none of them."""
    loader = Loader(Drawn(), batch_size=BATCH, num_workers=2)
    it = iter(loader)
    assert state_of(loader).late is None
    assert len(list(it)) == SAMPLES // BATCH
