"""``num_workers="auto"``: what it begins with, and what it comes to."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

import stoker
from stoker.core import numpy_state
from stoker.core.handles import held
from stoker.loader.auto import in_process, limits
from stoker.loader.auto.limits import first_guess
from tests.helpers import children_left


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(limits.resources, "cores_granted", lambda: 8)
    monkeypatch.setattr(limits.resources, "memory_available", lambda: 16 << 30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


def test_the_first_guess_is_a_worker_for_each_core(eight_cores: pytest.MonkeyPatch) -> None:
    loader = torch.utils.data.DataLoader(range(64))
    assert first_guess(loader) == (8, "8 workers: a first guess from 8 cores granted")


@pytest.mark.parametrize(("ranks", "workers"), [("1", 8), ("2", 4), ("3", 2), ("8", 1), ("16", 1), ("", 8), ("two", 8)])
def test_ranks_of_a_node_divide_its_cores(eight_cores: pytest.MonkeyPatch, ranks: str, workers: int) -> None:
    eight_cores.setenv("LOCAL_WORLD_SIZE", ranks)
    n, why = first_guess(torch.utils.data.DataLoader(range(64)))
    assert n == workers
    assert ("ranks" in why) == (ranks in ("2", "3", "8", "16"))


def test_ranks_of_a_node_divide_its_memory(eight_cores: pytest.MonkeyPatch) -> None:
    eight_cores.setattr(limits.resources, "memory_available", lambda: 8 * limits.resources.WORKER_BYTES)
    eight_cores.setenv("LOCAL_WORLD_SIZE", "2")
    eight_cores.setattr(limits, "cores_here", lambda: 64)
    n, why = first_guess(torch.utils.data.DataLoader(range(64)))
    assert n == 4
    assert "memory" in why
    assert "2 ranks" in why


def test_no_more_workers_than_batches_or_memory_for_them(eight_cores: pytest.MonkeyPatch) -> None:
    assert first_guess(torch.utils.data.DataLoader(range(6), batch_size=2))[0] == 3
    eight_cores.setattr(limits.resources, "memory_available", lambda: 0)
    assert first_guess(torch.utils.data.DataLoader(range(64)))[0] == 1


def test_an_iterable_dataset_gets_one(eight_cores: pytest.MonkeyPatch) -> None:
    n, why = first_guess(stoker.DataLoader(Stream(), num_workers="auto"))
    assert n == 1
    assert "iterable" in why


# ------------------------------------------------------------------------------------- workers, or none, while it runs


N = 240


class Where(Dataset):
    """Index, random numbers, and the process in which each sample was made."""

    def __init__(self, n: int = N) -> None:
        self.n = n
        self.asked = torch.zeros(n, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.asked[i] += 1
        drawn = [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]
        return torch.tensor([i, *drawn], dtype=torch.float64), os.getpid()


def epoch(loader: Any) -> tuple[torch.Tensor, list[bool]]:
    """The batches of an epoch, and of each whether it was made in this process."""
    torch.manual_seed(3)
    batches, where = [], []
    for batch, pids in loader:
        batches.append(batch.clone())
        where.append(bool((pids == os.getpid()).all()))
        assert where[-1] or not bool((pids == os.getpid()).any())
    return torch.cat(batches), where


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Epochs are made here after one of workers, whatever they cost, and it stays so."""
    monkeypatch.setattr(in_process, "DELIVERY_NS", 1 << 60)
    monkeypatch.setattr(in_process, "TINY_NS", 1 << 60)
    monkeypatch.setattr(in_process, "SMALL_NS", 0)
    return monkeypatch


@pytest.fixture
def restless(eager: pytest.MonkeyPatch) -> None:
    """And it never does: to and fro."""
    eager.setattr(in_process, "SLACK_NS", -(1 << 60))
    eager.setattr(in_process, "DEARER", 0)


def auto(dataset: Any, **kw: Any) -> Any:
    return stoker.DataLoader(dataset, **{"batch_size": 3, "shuffle": True, "num_workers": "auto", **kw})


class Own(Sampler):
    """An order of the user's own, which is begun once an epoch."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(N - 1, -1, -1))

    def __len__(self) -> int:
        return N


@pytest.mark.few(1)
@pytest.mark.parametrize("own", [False, True])
def test_nothing_is_loaded_but_the_batches(own: bool) -> None:
    sampler = Own()
    loader = auto(Where(), **({"sampler": sampler, "shuffle": None} if own else {}))
    got, _ = epoch(loader)
    assert loader.dataset.asked.eq(1).all()
    assert sorted(got[:, 0].tolist()) == list(range(N))
    assert sampler.begun == own
    assert "first guess" in loader.decisions[0]


@pytest.mark.slow
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("own", [False, True])
def test_bits_and_order_stay_when_it_moves_to_and_fro(own: bool) -> None:
    kw: dict[str, Any] = {"sampler": Own(), "shuffle": None} if own else {}
    fixed = auto(Where(), **kw)
    fixed.resize(2)
    moving = auto(Where(), **kw)
    made_here = []
    for _ in range(4):
        random.seed(1)
        np.random.seed(1)
        np.random.randn()
        want, _ = epoch(fixed)
        after = random.random(), np.random.randn(), float(torch.rand(()))
        random.seed(1)
        np.random.seed(1)
        np.random.randn()
        got, where = epoch(moving)
        assert torch.equal(got, want)
        assert (random.random(), np.random.randn(), float(torch.rand(()))) == after
        assert len(set(where)) == 1
        made_here.append(where[0])
    assert made_here == [False, True, False, True]
    assert moving.dataset.asked.eq(4).all()
    assert not children_left()


@pytest.mark.usefixtures("eager")
def test_it_goes_on_without_workers_in_later_epochs() -> None:
    loader = auto(Where())
    fixed = auto(Where())
    fixed.resize(2)
    assert torch.equal(epoch(loader)[0], epoch(fixed)[0])
    got, where = epoch(loader)
    assert int(loader.num_workers) == 0
    assert "-> 0 workers" in loader.decisions[-1]
    assert all(where)
    assert torch.equal(got, epoch(fixed)[0])
    assert int(auto(Where(), num_workers=loader.num_workers).num_workers) > 0  # as frameworks rebuild a loader


def as_it_is(samples: list[int]) -> list[list[int]]:
    """A batch that is there already, and takes milliseconds to cross."""
    return TABLE


TABLE = [[i] for i in range(20_000)]


@pytest.mark.slow
def test_what_costs_nothing_to_make_ends_without_workers() -> None:
    loader = stoker.DataLoader(range(200), num_workers="auto", batch_size=2, collate_fn=as_it_is)
    for _ in range(3):
        assert sum(1 for batch in loader if batch == TABLE) == 100
    assert int(loader.num_workers) == 0
    assert not children_left()


def test_a_small_epoch_is_made_here_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "SMALL_NS", 10_000_000_000)  # however busy the machine is
    data = Where(6)
    loader = auto(data)
    assert not any(epoch(loader)[1])
    assert all(epoch(loader)[1])
    assert int(loader.num_workers) == 0


@pytest.mark.slow
def test_one_that_is_peeked_at_is_not_taken_for_small() -> None:
    loader = auto(Where(600))
    next(iter(loader))
    assert not epoch(loader)[1][0]


class Slowing(Where):
    slow = False

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        until = time.thread_time() + 0.02 * self.slow
        while time.thread_time() < until:
            pass
        return super().__getitem__(i)


@pytest.mark.slow
def test_one_that_becomes_slow_gets_workers_again(eager: pytest.MonkeyPatch) -> None:
    eager.setattr(in_process, "DELIVERY_NS", 1_000_000)
    data = Slowing(60)
    loader = auto(data)
    epoch(loader)
    data.slow = True
    assert all(epoch(loader)[1])
    eager.setattr(in_process, "TINY_NS", 0)
    assert not any(epoch(loader)[1])
    assert "0 -> " in loader.decisions[-1]


class Held(Where):
    """Its samples come from a file that is open: both processes would move its offset."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.inner = {"files": [file]}


@pytest.mark.parametrize("kind", ["file", "socket", "database", "closure", "lock"])
def test_what_a_dataset_holds_is_found(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("x")
    ends = socket.socketpair()
    with (tmp_path / "rows").open() as file, contextlib.closing(sqlite3.connect(":memory:")) as database:
        things = {"file": file, "socket": ends[0], "database": database, "lock": threading.Lock()}
        assert "inner" in held(Held(things.get(kind, lambda: file)))
    for end in ends:
        end.close()


@pytest.mark.usefixtures("restless")
def test_what_holds_a_file_is_called_in_one_process_only(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("x")
    with (tmp_path / "rows").open() as file:
        loader = auto(Held(file))
        where = [*epoch(loader)[1], *epoch(loader)[1]]
    assert not any(where)


class Opens(Where):
    """Opens its file when it is first used, as is done so that each worker has its own."""

    file: Any = None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.file = self.file or self.path.open()
        return super().__getitem__(i)


@pytest.mark.usefixtures("restless")
def test_what_workers_open_is_not_opened_here(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("x")
    data = Opens(tmp_path / "rows")
    loader = auto(data)
    for _ in range(2):
        assert not any(epoch(loader)[1])
    assert data.file is None


@pytest.mark.usefixtures("restless")
def test_once_a_file_is_open_here_no_worker_is_forked(eager: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("x")
    eager.setattr("stoker.loader.pool_iterator.opened", lambda pids: "")
    data = Opens(tmp_path / "rows")
    loader = auto(data)
    epoch(loader)
    for _ in range(2):
        assert all(epoch(loader)[1])
        assert data.file is not None
    assert any("would have to share it" in d for d in loader.decisions)
    data.file.close()


@pytest.mark.usefixtures("eager")
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kw",
    [
        {"persistent_workers": True},
        {"timeout": 60},
        {"worker_init_fn": int},
        {"on_error": "skip"},
        {"sample_timeout": 60},
        {"multiprocessing_context": "fork"},
    ],
    ids=lambda kw: next(iter(kw)),
)
def test_what_asks_for_workers_has_them(kw: dict[str, Any]) -> None:
    loader = auto(Where(), **kw)
    for _ in range(2):
        assert not any(epoch(loader)[1])


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_resize_brings_workers_in_mid_epoch() -> None:
    loader = auto(Where(600))
    epoch(loader)
    fixed = auto(Where(600))
    fixed.resize(2)
    epoch(fixed)
    torch.manual_seed(4)
    got, where = [], []
    for i, (batch, pids) in enumerate(loader):
        if i == 20:
            loader.resize(2)
        got.append(batch.clone())
        where.append(int(pids[0]) == os.getpid())
    assert all(where[:20])
    assert not any(where[-100:])
    torch.manual_seed(4)
    assert torch.equal(torch.cat(got), torch.cat([b for b, _ in fixed]))
    assert int(loader.num_workers) == 2


@pytest.mark.usefixtures("eager")
@pytest.mark.few(1)
@pytest.mark.parametrize("later", ["auto", 0, 2])
def test_a_state_taken_without_workers_goes_on_to_the_bit(later: Any) -> None:
    loader = auto(Where())
    epoch(loader)
    it = iter(loader)
    for _ in range(40):
        next(it)
    assert int(loader.num_workers) == 0
    state = loader.state_dict()
    want = torch.cat([b.clone() for b, _ in it])
    other = auto(Where(), num_workers=later, task_seeds=True)
    other.load_state_dict(state)
    assert torch.equal(torch.cat([b.clone() for b, _ in other]), want)


class Informed(Where):
    """Works in workers only."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        assert get_worker_info().id >= 0
        return super().__getitem__(i)


@pytest.mark.usefixtures("eager")
def test_what_fails_here_is_left_to_a_worker() -> None:
    loader = auto(Informed())
    for _ in range(3):
        got, where = epoch(loader)
        assert sorted(got[:, 0].tolist()) == list(range(N))
        assert not any(where)


class Broken(Where):
    bad = 180

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == self.bad:
            raise KeyError(f"sample {i}")
        return super().__getitem__(i)


@pytest.mark.usefixtures("eager")
def test_a_sample_that_fails_is_told_as_ever() -> None:
    loader = auto(Broken(), shuffle=False)
    with pytest.raises(KeyError):
        list(loader)
    it = iter(loader)
    seen = [next(it)[0] for _ in range(60)]
    with pytest.raises(KeyError, match=r"in DataLoader worker process[\s\S]*sample 180"):
        next(it)
    seen += [batch for batch, _ in it]
    assert torch.cat(seen)[:, 0].tolist() == [i for i in range(N) if not 180 <= i < 183]


@pytest.mark.usefixtures("eager")
def test_the_last_sample_of_an_epoch_that_is_made_here_fails() -> None:
    dataset = Broken()
    dataset.bad = -1
    loader = auto(dataset, shuffle=False)
    list(loader)
    dataset.bad = N - 1
    it = iter(loader)
    assert all(next(it)[1][0] == os.getpid() for _ in range(79))
    with pytest.raises(KeyError, match=r"in DataLoader worker process[\s\S]*sample 239"):
        next(it)


@pytest.mark.usefixtures("eager")
def test_an_epoch_that_is_left_without_workers_leaves_nothing() -> None:
    loader = auto(Where())
    epoch(loader)
    for _ in range(2):
        for i, _ in enumerate(loader):
            if i == 50:
                break
    assert int(loader.num_workers) == 0
    assert not children_left()


# ---------------------------------------------------------------------------------------------------- NumPy's generator


def test_numpys_generator_is_put_back_as_it_was() -> None:
    for before in (lambda: None, np.random.randn, lambda: np.random.rand(7), lambda: np.random.randn(2)):
        np.random.seed(7)
        for _ in range(3):
            before()
            want = np.random.get_state()
            saved = numpy_state.save()
            np.random.seed(1)
            np.random.randn()
            numpy_state.restore(saved)
            got = np.random.get_state()
            assert str(got) == str(want)
            assert (got[1] == want[1]).all()
            own = np.random.RandomState()
            own.set_state(want)
            assert (np.random.randn(), np.random.rand()) == (own.randn(), own.rand())
