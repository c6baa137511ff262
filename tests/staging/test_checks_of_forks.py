"""When a forked worker compares the dataset with the cached one: whenever the user's code may have run since its parent did."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import stoker
from stoker.staging.change_watch import ChangeWatch

checks = multiprocessing.Value("i", 0)
pytestmark = [pytest.mark.filterwarnings("ignore::stoker.StokerWarning"), pytest.mark.timeout(60)]


class Rows(Dataset):
    def __init__(self) -> None:
        self.gain = 1.0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> torch.Tensor:
        row = torch.arange(64.0).reshape(8, 8) * i
        for _ in range(20):
            row = (row * 1.0001 + self.gain).sin()
        return row + torch.rand(())


def change(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.gain = 2.0 + torch.initial_seed() % 7  # another one in each epoch


def seed(worker: int) -> None:
    torch.manual_seed(torch.initial_seed() % 1000)


def epochs(loader: DataLoader, n: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.cat([batch.clone() for batch in loader]) for _ in range(n)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often workers have compared the dataset since the last call."""
    compare = ChangeWatch._compare

    def counting(self: ChangeWatch) -> list[str]:
        if get_worker_info() is not None:
            with checks.get_lock():
                checks.value += 1
        return compare(self)

    def taken() -> int:
        found, checks.value = checks.value, 0
        return int(found)

    monkeypatch.setattr(ChangeWatch, "_compare", counting)
    monkeypatch.setattr("stoker.staging.change_watch.CHECK_S", 3600.0)  # none because time has passed
    taken()
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("init", [*(pytest.param(x, marks=pytest.mark.slow) for x in (None, seed)), change])
def test_batches_are_torchs_whatever_worker_init_fn_does(
    init: Callable[[int], None] | None, counted: Callable[[], int]
) -> None:
    kw: dict[str, Any] = {"batch_size": 8, "num_workers": 2, "worker_init_fn": init}
    plain = epochs(DataLoader(Rows(), **kw))
    staged = stoker.Staged(Rows())
    served = epochs(stoker.DataLoader(staged, **kw))
    assert all(torch.equal(a, b) for a, b in zip(plain, served, strict=True))
    assert (counted() > 0) == (init is change)
    assert staged.account.filled or init is change


@pytest.mark.slow
def test_a_thread_of_the_script_may_change_the_dataset_before_the_fork(counted: Callable[[], int]) -> None:
    staged, end = stoker.Staged(Rows()), threading.Event()
    thread = threading.Thread(target=lambda: end.wait(60))  # a frame of the user's code
    thread.start()
    try:
        epochs(stoker.DataLoader(staged, batch_size=8, num_workers=2), 2)
    finally:
        end.set()
        thread.join()
    assert counted() == 4


@pytest.mark.slow
def test_persistent_workers_check_in_each_epoch_after_their_first(counted: Callable[[], int]) -> None:
    loader = stoker.DataLoader(stoker.Staged(Rows()), batch_size=8, num_workers=2, persistent_workers=True)
    epochs(loader, 3)
    assert counted() == 4
