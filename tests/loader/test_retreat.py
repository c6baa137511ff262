"""Workers that stoker has chosen itself, where they cannot do their work: the script is no worse off than without."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.loader import pool_iterator
from stoker.loader.loader_state import state_of
from stoker.tuning import apply
from stoker.workers import can_start, fork_lock_detector, process_pool

LOCK = threading.Lock()


class Locks(Dataset[Any]):
    """Samples from ``first`` on take a lock, and all draw."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        if i >= self.first:
            with LOCK:
                return i, random.random(), torch.rand(2)
        return i, random.random(), torch.rand(2)


class Exact(Exception):
    """An error that only the script's own process can raise as it is: its constructor takes two arguments."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"{why} at {index}")
        self.index = index


class Fails(Locks):
    def __getitem__(self, i: int) -> Any:
        if i == 20:
            raise Exact(i, "broken")
        return i


class Unpicklable(Locks):
    """Batches hold what no pickle can carry."""

    def __getitem__(self, i: int) -> Any:
        return i, random.random(), lambda: i


def plain(samples: list[Any]) -> list[Any]:
    return samples


class Applied(DataLoader[Any]):
    """Made without workers by a script; ``stoker run --apply`` has given it two."""

    def __init__(self, dataset: Dataset[Any], **kw: Any) -> None:
        super().__init__(dataset, batch_size=4, **kw)
        apply._use_workers(self, 2, by_task=False)

    def _get_iterator(self) -> Any:
        return stoker.loader.engine.get_iterator(self)


def auto(dataset: Dataset[Any]) -> stoker.DataLoader[Any]:
    return stoker.DataLoader(dataset, batch_size=4, num_workers="auto", multiprocessing_context=None)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_lock_detector, "RETREAT_S", 0.3)
    monkeypatch.setattr(process_pool, "LOOK_S", 0.1)
    monkeypatch.setattr(can_start, "_failed", [])


@pytest.fixture
def held() -> Iterator[Callable[[], None]]:
    """Another thread has the lock, until the function is called."""
    has, done = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            has.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait(60)
    yield done.set
    done.set()
    thread.join()


def epoch(loader: Any, begun: Callable[[], None] = lambda: None) -> list[Any]:
    torch.manual_seed(1)
    random.seed(1)
    it = iter(loader)
    begun()  # the workers have been forked
    return [[x.tolist() for x in batch] for batch in it]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "first"), [(auto, 0), (auto, 30), (Applied, 0)])
def test_workers_that_hang_on_a_lock_go_away(
    make: Any, first: int, held: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Order and draws of the epoch are those that workers would have made, or the script's own process, for a loader
    that it made without; later loaders of the process get none."""
    loader = make(Locks(first))
    got = epoch(loader, held)
    assert capsys.readouterr().err.count("without workers: Worker (pid ") == 1
    expected = seeded_as_by_workers(Locks(first)) if make is auto else DataLoader(Locks(first), batch_size=4)
    assert got == epoch(expected)
    assert int(loader.num_workers) == 0
    assert len(epoch(loader)) == 12  # no worker hangs again
    other = auto(Locks(first))
    assert len(epoch(other)) == 12
    assert int(other.num_workers) == 0
    assert capsys.readouterr().err == ""


def seeded_as_by_workers(dataset: Dataset[Any]) -> stoker.DataLoader[Any]:
    torch.manual_seed(1)
    random.seed(1)
    return stoker.DataLoader(dataset, batch_size=4, task_seeds=True)


def test_errors_are_those_of_the_scripts_process() -> None:
    it = iter(Applied(Fails()))
    got = [int(x) for batch in itertools.islice(it, 5) for x in batch]
    with pytest.raises(Exact, match="broken at 20") as raised:
        next(it)
    assert raised.value.index == 20
    assert got == list(range(20))
    assert [int(x) for batch in it for x in batch] == list(range(24, 48))  # as torch goes on without workers


def test_batches_that_no_worker_can_send_are_made_here(capsys: pytest.CaptureFixture[str]) -> None:
    loader = Applied(Unpicklable(), collate_fn=plain)
    random.seed(1)
    rows = [row for batch in loader for row in batch]
    assert [(i, f()) for i, _, f in rows] == [(i, i) for i in range(48)]
    assert capsys.readouterr().err.count("without workers") == 1
    random.seed(1)
    other = DataLoader(Unpicklable(), batch_size=4, collate_fn=plain)  # as the script made it
    assert [x for _, x, _ in rows] == [x for batch in other for _, x, _ in batch]


class Keys(Locks):
    def __getitem__(self, key: Any) -> Any:
        return key()


def test_indices_that_no_worker_can_be_sent_stay_here(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [lambda i=i: i for i in range(8)]
    assert [x.tolist() for x in Applied(Keys(), sampler=keys)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert capsys.readouterr().err.count("without workers") == 1


@pytest.mark.parametrize("make", [auto, Applied])
def test_a_start_that_fails_leaves_the_loader_as_it_was(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--apply`` the draws are the script's own ones, too."""

    def fail(*args: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(pool_iterator, "start", fail)
    loader = make(Locks())
    got = epoch(loader)
    assert "no more processes" in capsys.readouterr().err
    own = DataLoader(Locks(), batch_size=4) if make is Applied else seeded_as_by_workers(Locks())
    assert got == epoch(own)
    assert state_of(loader).no_workers == "OSError: no more processes"


def in_a_daemon(result: Any) -> None:
    loader = auto(Locks())
    result.put((epoch(loader), int(loader.num_workers)))


def test_in_a_daemonic_process_there_are_none() -> None:
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    process = context.Process(target=in_a_daemon, args=(result,), daemon=True)
    process.start()
    batches, count = result.get(timeout=60)
    process.join(60)
    assert count == 0
    assert batches == [[x.tolist() for x in batch] for batch in seeded_as_by_workers(Locks())]
