"""The memory of a store: given back at any moment, under readers and writers, without one wrong sample."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.core import reclaim, resources
from stoker.core.errors import StokerWarning
from stoker.staging.late_plan import LatePlan
from stoker.staging.store import store as store_module
from stoker.staging.store.encode import CacheError, take
from stoker.staging.store.memory import Lock, MemoryTables
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
    store = Store(MemoryTables(size_of(N, BUDGET)), N, BUDGET)
    store.admit({i: take(sample(i, kind)) for i in range(N)})
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
    assert isinstance(store.medium, MemoryTables)
    return os.fstat(store.medium.fd).st_blocks * 512


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_is_written_meanwhile_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled("rows")
    other = Store(MemoryTables(size_of(N, BUDGET)), N, BUDGET)
    other.admit({i: take(sample(i, "rows")) for i in range(4)})
    write = MemoryTables.write

    def late(self: MemoryTables, *args: Any) -> None:
        if self is other.medium:
            other.give_back("short")
        write(self, *args)

    monkeypatch.setattr(MemoryTables, "write", late)
    other.admit({i: take(sample(i, "rows")) for i in range(4, N)})
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


@pytest.mark.slow
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
    assert "memory was freed" in dataset.report
    assert dataset._store is not None
    assert used(dataset._store) < 1 << 20


def test_caches_that_nobody_reads_are_given_back() -> None:
    store = filled("rows")
    assert reclaim.give_back("short") > 10 << 20
    assert "short" in store.account.reason
    assert not reclaim.give_back("short")


def gets_lock(path: str) -> bool:
    """Whether another process has a lock of this file at once."""

    def attempt() -> bool:
        lock = Lock(os.open(path, os.O_RDWR))
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # ends this process
        with lock():
            return True

    return os.waitpid(in_child(attempt), 0)[1] == 0


def test_the_lock_holds_while_other_descriptors_are_closed(tmp_path: Path) -> None:
    """A second cache of the same folder is collected; multiprocessing closes a duplicate."""
    (path := tmp_path / "lock").touch()
    lock, other = (Lock(os.open(path, os.O_RDWR)) for _ in range(2))
    memory = MemoryTables(1 << 20)
    with other():
        pass
    with lock(), memory.lock():
        os.close(other._fd)
        del other
        gc.collect()
        os.close(os.dup(memory.fd))
        assert not gets_lock(str(path))
        assert not gets_lock(f"/proc/{os.getpid()}/fd/{memory.fd}")
    assert gets_lock(str(path))
    assert gets_lock(f"/proc/{os.getpid()}/fd/{memory.fd}")


def test_a_child_that_outlives_a_holder_does_not_keep_its_lock(tmp_path: Path) -> None:
    (path := tmp_path / "lock").touch()
    read, write = os.pipe()

    def die_with_lock() -> bool:
        lock = Lock(os.open(path, os.O_RDWR))
        with lock():
            if not os.fork():
                os.close(write)
                os.read(read, 1)  # until the test ends
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    os.waitpid(in_child(die_with_lock), 0)
    assert gets_lock(str(path))
    os.close(write)
    os.close(read)


def as_it_is(part: Any) -> Any:
    return part


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["nothing", "file", "fifo"])
def test_a_worker_does_not_take_another_file_for_the_cache(what: str, tmp_path: Path) -> None:
    """The cache is closed before a worker opens it by number, and the script opens its own file."""
    data = Numbers()
    staged = stoker.Staged(data, prepare=as_it_is, cache="ram", cache_budget=BUDGET)
    for i in range(8):
        staged[i]
    assert staged._store is not None
    assert isinstance(staged._store.medium, MemoryTables)
    fd, late = staged._store.medium.fd, LatePlan(lambda _: False)
    late.publish(staged)
    taken = late.read(data)
    assert isinstance(taken, stoker.Staged)
    assert taken.account.filled == 8
    del taken, staged
    gc.collect()
    path = tmp_path / "own"
    if what == "file":
        path.write_bytes(bytes(8 << 20))
    elif what == "fifo":
        os.mkfifo(path)
    if what != "nothing":
        own = os.open(path, os.O_RDWR)
        if own != fd:
            os.dup2(own, fd)
            os.close(own)
    with pytest.raises((CacheError, FileNotFoundError)):
        late.read(data)
    if what == "file":
        assert not any(path.read_bytes())
    if what != "nothing":
        os.close(fd)


def test_without_proc_there_is_a_lock_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "lock").touch()
    lock = Lock(os.open(path, os.O_RDWR))
    monkeypatch.setattr(Lock, "_opened", lambda _: -1)
    with lock():
        assert not gets_lock(str(path))
    assert gets_lock(str(path))
