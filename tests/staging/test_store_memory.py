"""The memory of a store: given back at any moment, under readers and writers, without one wrong sample."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.core import reclaim, resources
from stoker.core.errors import StokerWarning
from stoker.staging.store import store as store_module
from stoker.staging.store.encode import take
from stoker.staging.store.memory import Memory
from stoker.staging.store.store import Gone, Store, size_of

N = 24
BUDGET = 64 << 20


class Own:
    """Is pickled."""

    def __init__(self, data: Any) -> None:
        self.data = data


def sample(i: int, kind: str, size: int = 1 << 17) -> Any:
    x = torch.full((size,), float(i + 1))
    return (x, i) if kind == "rows" else (x, f"name {i}", Own(np.full(1 << 16, i + 1)))


def is_right(found: Any, i: int) -> bool:
    x, name, *own = found
    # NumPy: torch's threads do not survive a fork
    right = bool((x.numpy() == i + 1).all()) and name == (f"name {i}" if own else i)
    return right and all(bool((o.data == i + 1).all()) for o in own)


def filled(kind: str) -> Store:
    store = Store(Memory(size_of(N, BUDGET)), N, BUDGET)
    store.admit({i: take(sample(i, kind)) for i in range(N)}, 0)
    assert store.complete
    return store


def in_child(work: Callable[[], bool]) -> int:
    pid = os.fork()
    if not pid:
        right = False
        try:
            right = work()
        finally:
            os._exit(0 if right else 1)
    return pid


def used(store: Store) -> int:
    assert isinstance(store.medium, Memory)
    return os.fstat(store.medium.fd).st_blocks * 512


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_no_reader_sees_memory_that_was_given_back(kind: str) -> None:
    for _ in range(4):
        store = filled(kind)
        started = torch.zeros(2, dtype=torch.uint8).share_memory_()

        def read(k: int, store: Store = store, started: torch.Tensor = started) -> bool:
            indices = np.arange(N)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                started[k] = 1
                where = store.where(indices)
                if not where.any():
                    return True
                try:
                    if not all(is_right(store.read(int(at)), i) for i, at in enumerate(where.tolist())):
                        return False
                except Gone:
                    return True
            return False

        children = [in_child(lambda k=k: read(k)) for k in range(2)]
        while not started.all():
            time.sleep(0.001)
        assert store.give_back("short") > 10 << 20
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
        assert used(store) < 1 << 20
        assert not store.account.filled


def test_a_reader_in_the_middle_of_a_copy_drops_it() -> None:
    store = filled("rows")
    (row,) = store.where(np.array([3])).tolist()

    def copy() -> torch.Tensor:
        store.give_back("short")
        return store.columns[0][row - 1].clone()

    with pytest.raises(Gone):
        store.copied(copy)
    with pytest.raises(Gone):
        store.read(row)
    assert used(store) < 1 << 20


def test_what_is_written_meanwhile_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled("rows")
    other = Store(Memory(size_of(N, BUDGET)), N, BUDGET)
    other.admit({i: take(sample(i, "rows")) for i in range(4)}, 0)
    write = Memory.write

    def late(self: Memory, *args: Any) -> None:
        if self is other.medium:
            other.give_back("short")
        write(self, *args)

    monkeypatch.setattr(Memory, "write", late)
    other.admit({i: take(sample(i, "rows")) for i in range(4, N)}, 0)
    assert used(other) < 1 << 20
    assert not other.account.filled
    assert store.account.filled == N  # another one


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, kind: str = "rows") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        return sample(i, self.kind, 1 << 15)[:2]


def noisy(part: Any) -> Any:
    x, *rest = part
    return (x + torch.rand(()), *rest)


@pytest.mark.parametrize("loader", [stoker.DataLoader, torch.utils.data.DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "augment"), [("rows", None), ("rows", noisy), ("blocks", noisy)])
def test_an_epoch_goes_on_to_the_bit(
    loader: Any, workers: int, kind: str, augment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs short in the second epoch. Each process that reads looks at it."""
    short = torch.zeros(1, dtype=torch.uint8).share_memory_()
    monkeypatch.setattr(resources, "memory_available", lambda: 1 << 20 if short[0] else 1 << 40)
    monkeypatch.setattr(store_module, "LOOK_S", 0.0)

    def epochs(dataset: Any, at: int) -> list[Any]:
        short[0] = 0
        torch.manual_seed(3)
        made = loader(dataset, batch_size=4, num_workers=workers)
        out = []
        for n, (x, y) in enumerate(batch for _ in range(3) for batch in made):
            out.append((x.clone(), list(y)))
            short[0] = n >= at
        return out

    def staged(cache: Any) -> stoker.Staged:
        return stoker.Staged(Numbers(kind), prepare=lambda s: s, augment=augment, cache=cache, cache_budget=BUDGET)

    want = epochs(staged(None), 1000)
    dataset = staged("ram")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StokerWarning)  # that it was given back
        got = epochs(dataset, 16)
    assert len(got) == len(want) == 36
    for (x, y), (a, b) in zip(got, want, strict=True):
        assert torch.equal(x, a)
        assert y == b
    assert "memory was given back" in dataset.report
    assert dataset._store is not None
    assert used(dataset._store) < 1 << 20


def test_caches_that_nobody_reads_are_given_back() -> None:
    store = filled("rows")
    assert reclaim.give_back("short") > 10 << 20
    assert "short" in store.account.reason
    assert not reclaim.give_back("short")
