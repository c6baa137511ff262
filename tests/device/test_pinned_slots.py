"""Page-locked slots, with a stand-in for the device's runtime that counts, fails when told and finishes late."""

from __future__ import annotations

import gc
import os
import random
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.core import nested as walk
from stoker.core.errors import StokerWarning
from stoker.device import pin_policy
from stoker.device.pinned_slots import Locker
from stoker.loader.loader_state import state_of
from stoker.transport.arena import Arena
from stoker.transport.mapping import map_shared
from stoker.transport.slots import SlotReader, SlotWriter
from stoker.transport.thread_slots import HeapWriter
from tests.contract import datasets as d
from tests.helpers import pretend_device


class LateFence:
    """Done when the test says so."""

    def __init__(self, device: FakeDevice) -> None:
        self.reads, self.device, self.over = list(device.under_way), device, False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        for read in self.reads:
            self.device.finish(read)
        self.over = True


class FakeDevice:
    """A runtime, and copies that read their source only when they are finished."""

    def __init__(self, fail_after: int = 1 << 30) -> None:
        self.registered: dict[int, int] = {}
        self.calls = {"register": 0, "unregister": 0, "fence": 0}
        self.fail_after = fail_after
        self.under_way: list[tuple[Any, bytes]] = []
        self.fences: list[LateFence] = []
        self.owner = os.getpid()

    def register(self, address: int, nbytes: int) -> str:
        assert os.getpid() == self.owner
        self.calls["register"] += 1
        if self.calls["register"] > self.fail_after:
            return "injected"
        assert address not in self.registered
        self.registered[address] = nbytes
        return ""

    def unregister(self, address: int) -> None:
        assert os.getpid() == self.owner
        self.calls["unregister"] += 1
        del self.registered[address]

    def fence(self) -> LateFence:
        self.calls["fence"] += 1
        self.fences.append(LateFence(self))
        return self.fences[-1]

    def copy_later(self, source: Any) -> None:
        """A copy that nothing keeps the source alive for, as with memory that torch does not know."""
        address = source.ctypes.data if isinstance(source, np.ndarray) else source.data_ptr()
        nbytes = source.nbytes
        self.under_way.append(((address, nbytes), bytes(memoryview(np.asarray(source)).cast("B"))))

    def finish(self, read: Any) -> None:
        if read in self.under_way:
            import ctypes

            (address, nbytes), want = read
            assert ctypes.string_at(address, nbytes) == want, "a slot was written while the device read it"
            self.under_way.remove(read)

    def go_on(self, rng: random.Random) -> None:
        """Some copies end, in any order; a fence is done when all before it are."""
        for read in list(self.under_way):
            if rng.random() < 0.3:
                self.finish(read)
        for fence in self.fences:
            fence.over = not any(read in self.under_way for read in fence.reads)


def move(rng: random.Random, what: float, device: FakeDevice, locker: Locker, held: list[Any]) -> None:
    """One move of a consumer, ``what`` from 0.25 on: a late copy, a batch let go of, a look at fences, the device."""
    if what < 0.45 and held:
        device.copy_later(rng.choice(held))
    elif what < 0.75 and held:
        del held[rng.randrange(len(held))]
    elif what < 0.9:
        locker.sweep()
    else:
        device.go_on(rng)


def let_go(rng: random.Random, device: FakeDevice, locker: Locker, held: list[Any]) -> None:
    """Of all batches; the device finishes what it was asked for."""
    held.clear()
    while locker.sweep():
        device.go_on(rng)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.few(1)
def test_no_slot_is_written_before_the_device_has_read_it(seed: int) -> None:
    rng = random.Random(seed)
    print("seed", seed)
    device = FakeDevice()
    locker = Locker(device, 1 << 40)
    arena = Arena()
    writer, reader = SlotWriter(arena), SlotReader(arena)
    reader.lock_with(locker)
    held: list[Any] = []
    for step in range(1500):
        what = rng.random()
        if what < 0.25 and writer.take(rng.choice([100, 70_000])):
            assert writer.whole is not None
            writer.whole[:100] = step % 251
            slot = writer.slot
            writer.sent()
            held.append(reader.lease(slot, 100))
        else:
            move(rng, what, device, locker, held)
    assert device.calls["fence"] > 20
    assert arena.slots < 200  # slots do come back
    let_go(rng, device, locker, held)
    for slot in range(arena.slots):
        assert arena.stamps[slot]
    assert locker.locked == sum(device.registered.values())
    del reader, writer, held
    gc.collect()
    assert not device.registered
    assert locker.locked == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.few(1)
def test_no_slot_of_a_thread_is_written_before_the_device_has_read_it(seed: int) -> None:
    rng = random.Random(seed)
    print("seed", seed)
    device = FakeDevice()
    locker = Locker(device, 1 << 40)
    writer = HeapWriter(1 << 40)
    writer.locker = locker
    held: list[Any] = []
    for step in range(1500):
        what = rng.random()
        if what < 0.25:
            assert writer.take(rng.choice([70_000, 700_000]))
            assert writer.whole is not None
            writer.whole[:100] = step % 251
            if rng.random() < 0.9:
                held.append(writer.whole[:100])
            writer.sent()
        else:
            move(rng, what, device, locker, held)
    assert device.calls["fence"] > 20
    assert writer.slots < 100  # slots do come back
    let_go(rng, device, locker, held)
    assert not writer._locked_in_use
    assert locker.locked == sum(device.registered.values()) > 0
    del writer, held
    gc.collect()
    assert not device.registered
    assert locker.locked == 0


def test_memory_is_unlocked_before_it_is_unmapped_and_after_the_device_is_done() -> None:
    device, order = FakeDevice(), []
    locker = Locker(device, 1 << 30)
    arena = Arena()
    arena.add(1 << 16)
    memory = arena.map(0)
    locker.lock(memory)
    device.copy_later(np.frombuffer(memory, np.uint8, 64))
    unregister = device.unregister

    def noted(address: int) -> None:
        with open("/proc/self/maps") as file:
            order.append(
                any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in file)
            )
        assert not device.under_way
        unregister(address)

    device.unregister = noted  # type: ignore[method-assign]
    del memory
    gc.collect()
    assert order == [True]


def test_over_the_budget_slots_stay_as_they_are() -> None:
    device = FakeDevice()
    locker = Locker(device, 200_000)
    arena = Arena()
    for _ in range(4):
        arena.add(1 << 16)
    maps = [arena.map(i) for i in range(4)]
    for memory in maps:
        locker.lock(memory)
    assert [locker.is_locked(m) for m in maps] == [True, True, True, False]
    assert (locker.locked, locker.over) == (3 << 16, 1)


def test_in_a_forked_child_nothing_is_asked_of_the_device() -> None:
    device = FakeDevice()
    locker = Locker(device, 1 << 30)
    arena = Arena()
    arena.add(1 << 16)
    memory = arena.map(0)
    locker.lock(memory)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            before = dict(device.calls)
            locker.release_later(weakref.WeakMethod(arena.punch), 0)
            locker.sweep()
            other = map_shared(arena.fd, 4096)
            locker.lock(other)
            del memory, other
            gc.collect()
            code = 0 if device.calls == before else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locker.is_locked(memory)


# -- a loader


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A loader that takes this machine for one with a device."""
    fake = FakeDevice()
    pretend_device(monkeypatch)
    monkeypatch.setattr(pin_policy, "unified", lambda _: False)
    monkeypatch.setattr(pin_policy, "runtime", lambda: fake)
    monkeypatch.setattr(walk, "pin_tensor", lambda t, _=None: t if locked(fake, t) else t.clone())
    return fake


def locked(fake: FakeDevice, t: torch.Tensor) -> bool:
    return any(a <= t.data_ptr() < a + n for a, n in fake.registered.items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [{}, {"persistent_workers": True, "multiprocessing_context": "spawn"}, {"worker_method": "thread"}],
    ids=str,
)
def test_what_the_user_gets_lies_in_locked_slots(device: FakeDevice, settings: dict[str, Any]) -> None:
    loader = stoker.DataLoader(d.Map(40, "big"), batch_size=4, num_workers=2, pin_memory=True, **settings)
    rng = random.Random(1)
    for _ in range(2):
        seen = []
        for x, i in loader:
            assert locked(device, x)
            assert [float(v) for v in x[:, 0, 0, 0]] == i.tolist()
            device.copy_later(x)
            device.go_on(rng)
            seen += i.tolist()
        assert seen == list(range(40))
    assert device.calls["register"] < 40  # slots, not batches
    assert not hasattr(iter(loader), "_pin_memory_thread")
    while device.under_way:
        device.go_on(rng)
    del loader, x, i
    gc.collect()
    assert not device.registered


def test_where_nothing_can_be_locked_a_thread_copies_and_that_is_said_once(device: FakeDevice) -> None:
    device.fail_after = 0
    loader = stoker.DataLoader(d.Map(20, "big"), batch_size=4, num_workers=1, pin_memory=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            it = iter(loader)
            assert it._pin_memory_thread.is_alive()
            assert [v for _, i in it for v in i.tolist()] == list(range(20))
    assert ["injected" in str(w.message) for w in said if w.category is StokerWarning] == [True]


def test_a_runtime_that_fails_later_leaves_batches_whole(device: FakeDevice) -> None:
    device.fail_after = 2  # the page that is tried, and one slot
    loader = stoker.DataLoader(d.Map(60, "big"), batch_size=4, num_workers=2, pin_memory=True)
    kept = list(loader)
    assert [v for _, i in kept for v in i.tolist()] == list(range(60))
    assert state_of(loader).pinning.locker.failed == "injected"  # type: ignore[union-attr]


def test_over_its_budget_a_loader_goes_on_unpinned(device: FakeDevice) -> None:
    loader = stoker.DataLoader(d.Map(60, "big"), batch_size=4, num_workers=2, pin_memory=True, budget="3MB")
    for x, i in loader:
        assert [float(v) for v in x[:, 0, 0, 0]] == i.tolist()
    assert sum(device.registered.values()) <= 3_000_000


def test_auto_says_why(device: FakeDevice) -> None:
    loader = stoker.DataLoader(d.Map(20, "big"), batch_size=4, num_workers=1, pin_memory="auto")
    assert loader.pin_memory is True
    for _ in range(2):
        assert locked(device, next(iter(loader))[0])
    assert any(words.startswith("pin_memory=True: cuda reads page-locked") for words in loader.decisions)
