"""The ring: a batch is yours. Writable, aliased by nobody, never changed by later work, alive as long as it is held."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.options import Budget
from stoker.loader import engine
from stoker.loader.loader_state import state_of
from stoker.transport import ordering, slots
from stoker.transport.arena import MAX_SLOTS, Arena
from stoker.transport.slots import SlotReader, SlotWriter

SEED = int(os.environ.get("STOKER_SEED", "0"))


def noise(i: int, floats: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(i).standard_normal(floats, dtype=np.float32))


@functools.lru_cache(maxsize=2000)
def checksum(i: int, floats: int) -> int:
    return zlib.crc32(noise(i, floats).numpy().tobytes())


class Noise(Dataset):
    """Sample ``i`` is noise that only ``i`` decides, and ``i``."""

    def __init__(self, n: int, floats: int) -> None:
        self.n, self.floats = n, floats

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return noise(i, self.floats), i


def intact(batch: Any, first: int) -> bool:
    """Whether these are the samples from ``first`` on. What is expected comes from outside the batch: one that was
    overwritten as a whole by a later one is well-formed, too."""
    return batch[1].tolist() == list(range(first, first + len(batch[1]))) and all(
        zlib.crc32(x.numpy().tobytes()) == checksum(first + k, len(x)) for k, x in enumerate(batch[0])
    )


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "budget", lambda loader: Budget(lease_bytes=1 << 20, lease_slots=16))


@pytest.mark.few(1)
@pytest.mark.parametrize(("floats", "persistent"), [(5000, False), (5000, True), (10, False)])
def test_batches_are_intact_whatever_is_kept_and_dropped(floats: int, persistent: bool, small_budget: None) -> None:
    """Hundreds of random keep and drop patterns; every kept batch is checked when it is dropped, and again at the end."""
    seed = f"{SEED}/{floats}/{persistent}"
    print(f"seed {seed}")
    rng = random.Random(seed)
    loader = stoker.DataLoader(Noise(480, floats), batch_size=4, num_workers=2, persistent_workers=persistent)
    kept: list[Any] = []
    for _ in range(3):
        keep = rng.choice([0.05, 0.3, 0.9])
        for i, batch in enumerate(loader):
            assert intact(batch, 4 * i), f"seed {seed}"
            if rng.random() < keep:
                kept.append((batch, 4 * i))
            del batch
            while (kept and rng.random() < 0.4) or len(kept) > 60:
                assert intact(*kept.pop(rng.randrange(len(kept)))), f"seed {seed}"
    del loader
    gc.collect()
    assert all(intact(*k) for k in kept), f"seed {seed}"


def test_writing_to_a_batch_changes_no_other() -> None:
    loader = stoker.DataLoader(Noise(80, 5000), batch_size=2, num_workers=2)
    batches = []
    for i, batch in enumerate(loader):
        assert intact(batch, 2 * i)
        batch[0].fill_(float("nan"))
        batches.append(batch)
    assert all(torch.isnan(b[0]).all() for b in batches)
    assert all(intact(b, 2 * i) for i, b in enumerate(loader))


@pytest.mark.slow
def test_every_third_batch_is_kept(small_budget: None) -> None:
    loader = stoker.DataLoader(Noise(360, 20_000), batch_size=3, num_workers=2)
    kept = [b for i, b in enumerate(loader) if i % 3 == 0]
    assert len(kept) == 40
    assert all(intact(b, 9 * i) for i, b in enumerate(kept))


@pytest.mark.slow
def test_a_list_of_half_a_gigabyte() -> None:
    """More than a slot a worker, less than the machine: nothing blocks and every bit is right."""
    loader = stoker.DataLoader(Noise(14, 10_000_000), batch_size=2, num_workers=2)
    batches = list(loader)
    assert sum(b[0].nbytes for b in batches) >= 500_000_000
    assert all(intact(b, 2 * i) for i, b in enumerate(batches))


@pytest.mark.slow
def test_a_batch_outlives_its_loader_and_its_workers() -> None:
    loader = stoker.DataLoader(Noise(8, 5000), batch_size=2, num_workers=2)
    it = iter(loader)
    batch = next(it)
    view = batch[0][1:, 5:].numpy()
    expected = view.copy()
    del batch, it, loader
    gc.collect()
    other = stoker.DataLoader(Noise(40, 5000), batch_size=2, num_workers=2)
    assert all(intact(b, 2 * i) for i, b in enumerate(other))
    assert np.array_equal(view, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("hold", ["row", "numpy", "detach", "memoryview", "dlpack", "storage"])
def test_any_view_holds_the_slot(hold: str) -> None:
    """Whatever is made of a tensor without a copy keeps its memory from being used again."""
    loader = stoker.DataLoader(Noise(100, 5000), batch_size=2, num_workers=1)
    it = iter(loader)
    batch = next(it)
    expected = batch[0].clone()
    made: Any = {
        "row": lambda t: t[0],
        "numpy": lambda t: t.numpy().reshape(-1)[:5000],
        "detach": lambda t: t.detach().view(-1)[:5000],
        "memoryview": lambda t: memoryview(t.numpy().reshape(-1)),
        "dlpack": lambda t: torch.from_dlpack(t),
        "storage": lambda t: t.untyped_storage(),
    }[hold](batch[0])
    del batch
    for _ in it:
        pass
    found = torch.tensor([], dtype=torch.float32)
    if hold == "storage":
        found = torch.empty(0).set_(made, 0, (2, 5000), (5000, 1))
    else:
        found = torch.as_tensor(np.asarray(made))
    assert torch.equal(found.reshape(-1)[:5000], expected.reshape(-1)[:5000])


class Hoarder(Dataset):
    """Its collate function keeps what it made, in the worker, and hands an old one out again."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3000,), float(i))


class KeepingCollate:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, batch: list[torch.Tensor]) -> Any:
        made = torch.utils.data.default_collate(batch)
        self.kept.append(made)
        return made, self.kept[len(self.kept) // 2], self.kept[0][1:]


def test_what_a_worker_keeps_is_not_written_again() -> None:
    loader = stoker.DataLoader(Hoarder(), batch_size=2, num_workers=1, collate_fn=KeepingCollate())
    for i, (new, middle, first) in enumerate(loader):
        j = (i + 1) // 2
        assert new[:, 0].tolist() == [2 * i, 2 * i + 1]
        assert middle.eq(torch.tensor([[2.0 * j], [2.0 * j + 1]])).all()
        assert first.eq(1.0).all()


@contextlib.contextmanager
def another_thread_starts_a_worker() -> Iterator[None]:
    started, end = threading.Event(), threading.Event()

    def start() -> None:
        with slots.own_fork():
            started.set()
            end.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    started.wait(60)
    with slots.own_fork():  # as this one did before
        pass
    yield
    end.set()
    thread.join()


@pytest.mark.few(1)
@pytest.mark.parametrize("beside", [contextlib.nullcontext, another_thread_starts_a_worker])
def test_a_fork_of_the_users_sees_its_batch_unchanged(beside: Any) -> None:
    """torch's batches survive in a forked child, because their memory is never used again."""
    loader = stoker.DataLoader(Noise(100, 5000), batch_size=2, num_workers=1)
    it = iter(loader)
    with beside():
        fork_and_go_on(it)


def fork_and_go_on(it: Any) -> None:
    batch = next(it)
    read, write = os.pipe()
    done, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(done, 1)  # until the parent has gone through the whole epoch
        os.write(write, b"ok" if intact(batch, 0) else b"no")
        os._exit(0)
    del batch
    for _ in it:
        pass
    os.write(go, b"x")
    assert os.read(read, 2) == b"ok"
    os.waitpid(pid, 0)
    for fd in (read, write, done, go):
        os.close(fd)


def test_what_a_fork_drops_is_still_the_parents() -> None:
    it = iter(stoker.DataLoader(Noise(200, 5000), batch_size=2, num_workers=1))
    batch = next(it)
    pid = os.fork()
    if pid == 0:
        del batch
        os._exit(0)
    os.waitpid(pid, 0)
    for _ in it:
        pass
    assert intact(batch, 0)


def test_a_reader_orders_what_it_read_before_it_frees_a_slot() -> None:
    """It can be seen only on another processor; here, that it is called and ends."""
    ordering.barrier(ordered=False)


@pytest.mark.slow
@pytest.mark.parametrize("kw", [{}, {"persistent_workers": True}, {"worker_method": "thread"}], ids=str)
def test_a_fork_uses_the_loader_as_well(kw: dict[str, Any]) -> None:
    """Both go on with a loader that was used before, each with memory and workers of its own."""
    loader = stoker.DataLoader(Noise(60, 5000), batch_size=2, num_workers=1, timeout=60, **kw)
    next(iter(loader))
    read, write = os.pipe()
    done, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        kept = list(loader)
        os.write(write, b"1")
        os.read(done, 1)  # until the parent has gone through its epochs
        again = list(loader)
        fine = len(kept) == len(again) == 30 and all(intact(b, 2 * i) for e in (kept, again) for i, b in enumerate(e))
        os.write(write, b"ok" if fine else b"no")
        os._exit(0)
    for epoch in range(3):
        for i, batch in enumerate(loader):
            assert intact(batch, 2 * i)
            batch[0].fill_(-1)
        if not epoch:
            assert os.read(read, 1) == b"1"
    os.write(go, b"x")
    assert os.read(read, 2) == b"ok"
    os.waitpid(pid, 0)
    for fd in (read, write, done, go):
        os.close(fd)


@pytest.mark.slow
def test_a_consumer_that_forks_for_each_batch_takes_no_more_and_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_PINNED_BY_FORK", 100_000)  # five batches
    loader = stoker.DataLoader(Noise(60, 5000), batch_size=1, num_workers=1)
    for _ in range(2):
        it = iter(loader)
        for i, batch in enumerate(it):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            assert intact(batch, i)
            if i == 55:
                assert it._scheduler._pool.slots() < 20
        assert not state_of(loader).arenas


class Emptied(Noise):
    """Makes its samples in what it gets from stoker.empty, and keeps one."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        sample = stoker.empty((self.floats,)).copy_(noise(i, self.floats))
        if i == 5:
            self.kept = sample
        assert not hasattr(self, "kept") or torch.equal(self.kept, noise(5, self.floats))
        return sample, i


@pytest.mark.parametrize("method", ["process", "thread"])
def test_a_dataset_that_asks_for_a_part_of_the_batch(method: str) -> None:
    it = iter(stoker.DataLoader(Emptied(100, 5000), batch_size=2, num_workers=1, worker_method=method))
    assert all(intact(batch, 2 * i) for i, batch in enumerate(it))
    assert it._scheduler._pool.slots() < 20


@pytest.mark.slow
def test_more_batches_are_kept_than_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "budget", lambda loader: Budget(lease_bytes=1 << 40, lease_slots=1 << 30))
    kept = list(stoker.DataLoader(Noise(MAX_SLOTS + 100, 1500), batch_size=1, num_workers=1))
    assert all(intact(b, i) for i, b in enumerate(kept))


def test_slots_are_used_again_and_last_in_first_out() -> None:
    arena = Arena()
    writer, reader = SlotWriter(arena), SlotReader(arena)
    used = []
    for _ in range(3):
        assert writer.take(100_000)
        used.append(writer.slot)
        writer.sent()
    assert used == [0, 1, 2]
    reader.release(1)
    reader.release(0)
    assert writer.take(100_000)
    assert writer.slot == 0
    writer.sent()
    assert writer.take(100_000)
    assert writer.slot == 1


def test_a_slot_that_is_too_small_is_replaced() -> None:
    arena = Arena()
    writer, reader = SlotWriter(arena), SlotReader(arena)
    assert writer.take(1000)
    writer.sent()
    lease = reader.lease(0, 1000)
    del lease
    assert writer.take(10_000_000)
    assert writer.slot == 0
    assert writer.whole is not None
    writer.whole[:] = 7
    writer.sent()
    assert arena.slots == 1
    assert reader.lease(0, 10_000_000).min() == 7


def test_no_slot_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "no space")

    arena = Arena()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert not SlotWriter(arena).take(1000)


class Reluctant(Noise):
    """As if the system had no memory for slots: the worker's fallocate fails."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        def refuse(*_: object) -> None:
            raise OSError(28, "no space")

        os.posix_fallocate = refuse  # only this worker process
        return super().__getitem__(i)


def test_batches_arrive_when_there_is_no_memory_for_slots() -> None:
    loader = stoker.DataLoader(Reluctant(40, 50_000), batch_size=4, num_workers=2)
    assert all(intact(b, 4 * i) for i, b in enumerate(loader))


@pytest.mark.few(1)
@pytest.mark.parametrize("everywhere", [True, False])
def test_batches_arrive_when_no_more_can_be_mapped(everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux grants a process some 65,000 mappings. The workers are forked, so what is patched first holds there too."""

    def refuse(*_: object) -> None:
        raise OSError(12, "no memory")

    if everywhere:
        monkeypatch.setattr(Arena, "map", refuse)
    it = iter(stoker.DataLoader(Noise(40, 50_000), batch_size=4, num_workers=2))
    monkeypatch.setattr(Arena, "map", refuse)
    kept = list(it)
    assert len(kept) == 10
    assert all(intact(b, 4 * i) for i, b in enumerate(kept))


@pytest.mark.slow
def test_the_ring_does_not_grow_with_epochs_left_early() -> None:
    loader = stoker.DataLoader(Noise(400, 5000), batch_size=2, num_workers=2)
    for _ in range(20):
        for batch in loader:
            del batch
            break
    assert all(r.arena.slots <= 6 for r in state_of(loader).arenas)


@pytest.mark.slow
def test_the_ring_does_not_grow_with_the_epoch() -> None:
    loader = stoker.DataLoader(Noise(200, 5000), batch_size=2, num_workers=2)
    for batch in loader:
        del batch
    arenas = state_of(loader).arenas
    assert len(arenas) == 2
    assert all(r.arena.slots <= 6 for r in arenas)  # two in flight, one leased, one being filled, and a little luck
    assert all(not r.leases for r in arenas)
    for _ in loader:
        pass
    assert all(a is b for a, b in zip(sorted(arenas, key=id), sorted(state_of(loader).arenas, key=id), strict=True))


def test_a_batch_may_outlive_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end the interpreter sets the variables of modules to None, and a script's own batch dies later."""
    (batch,) = stoker.DataLoader(torch.zeros(8, 4096), 8, num_workers=1)
    failed: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", failed.append)
    with monkeypatch.context() as ending:
        ending.setattr("stoker.transport.slots.os", None)
        del batch
    assert not failed
