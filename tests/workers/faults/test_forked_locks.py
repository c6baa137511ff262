"""A lock that another thread holds while workers are forked: recognised, said, and started anew where that can be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.errors import StokerWarning
from stoker.workers import fork_lock_detector, process_pool

LOCK = threading.Lock()  # as a native library's, which one interpreter has once


class Locks(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        with LOCK:
            return torch.full((3,), i)


class Unpickled(Locks):
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another thread has the lock while workers are forked, and gives it back at the end."""
    monkeypatch.setattr(fork_lock_detector, "DEADLOCK_S", 0.5)
    monkeypatch.setattr(process_pool, "PARENT_POLL_S", 0.2)
    has, done = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            has.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait(60)
    yield
    done.set()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, "auto"])
def test_workers_are_started_anew(held: None, workers: Any) -> None:
    loader = stoker.DataLoader(Locks(), batch_size=4, num_workers=workers, multiprocessing_context="fork")
    if workers == "auto":
        loader.resize(2)
    with pytest.warns(StokerWarning, match=r"is deadlocked on a lock .* \d+ threads\. Restarting it with forkserver"):
        seen = [int(v) for batch in loader for v in batch[:, 0]]
    assert seen == list(range(24))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dataset": Unpickled()}, marks=pytest.mark.slow),
        pytest.param({"dataset": Locks(), "on_worker_death": "raise"}, marks=pytest.mark.slow),
    ],
)
def test_where_that_may_not_be_it_is_said(held: None, settings: dict[str, Any]) -> None:
    it = iter(stoker.DataLoader(**settings, batch_size=4, num_workers=1, multiprocessing_context="fork", timeout=2))
    with pytest.warns(StokerWarning, match="forkserver"), pytest.raises(RuntimeError, match="timed out"):
        next(it)
    it._shutdown_workers()


def test_a_worker_that_only_takes_its_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_lock_detector, "DEADLOCK_S", 0.05)
    monkeypatch.setattr(process_pool, "PARENT_POLL_S", 0.02)
    loader = stoker.DataLoader(Naps(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert [int(v) for batch in loader for v in batch] == list(range(4))


class Naps(Dataset[Any]):
    """Sleeps in a system call that is no lock's: the sample's own time, not a way to synchronise."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        import select

        select.select([], [], [], 0.3)
        return i
