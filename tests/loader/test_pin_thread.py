"""Pinning by a thread, with a stand-in for the accelerator: what it does to batches, errors, slots and the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import stoker
from stoker.loader.loader_state import state_of
from tests.contract import datasets as d
from tests.helpers import pretend_device

pinned: list[Any] = []


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that there is one, and copies instead of page-locking."""
    from stoker.loader import pin_thread

    def copy(data: Any, device: Any = None) -> Any:
        pinned.append(threading.current_thread().name)
        if isinstance(data, torch.Tensor):
            return data.clone()
        return type(data)(copy(x) for x in data) if isinstance(data, (list, tuple)) else data

    pinned.clear()
    pretend_device(monkeypatch)
    monkeypatch.setattr(pin_thread, "pin", copy)


@pytest.mark.few(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned_by_the_thread_and_slots_come_back(persistent: bool) -> None:
    loader = stoker.DataLoader(
        d.Map(60, "big"), batch_size=4, num_workers=2, pin_memory=True, persistent_workers=persistent
    )
    for _ in range(2):
        it = iter(loader)
        assert it._pin_memory_thread.is_alive()
        kept = list(it)
        assert [int(i) for b in kept for i in b[1]] == list(range(60))
        assert all(float(x[0, 0, 0]) == float(i) for b in kept for x, i in zip(*b, strict=True))
    assert set(pinned) == {"stoker_pin"}
    thread = it._pin_memory_thread
    it._shutdown_workers()
    assert not thread.is_alive()
    assert all(not r.leases for r in state_of(loader).arenas)


def test_errors_come_through_and_iteration_goes_on() -> None:
    it = iter(stoker.DataLoader(d.Map(9, "tensor", "value", (4,)), batch_size=3, num_workers=2, pin_memory=True))
    next(it)
    with pytest.raises(ValueError, match="bad sample 4"):
        next(it)
    assert next(it).shape == (3, 2, 3)
    with pytest.raises(StopIteration):
        next(it)


def test_an_error_of_pinning_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.loader import pin_thread

    def fail(*_: Any) -> Any:
        raise RuntimeError("no page-locked memory left")

    monkeypatch.setattr(pin_thread, "pin", fail)
    it = iter(stoker.DataLoader(d.Map(4, "tensor"), num_workers=1, pin_memory=True))
    with pytest.raises(RuntimeError, match=r"in pin memory thread for device 0[\s\S]*no page-locked memory left"):
        next(it)


def test_the_timeout_and_streams() -> None:
    loader = stoker.DataLoader(d.Stream(30, "int"), batch_size=4, num_workers=2, pin_memory=True, timeout=30)
    assert sorted(int(i) for b in loader for i in b) == list(range(30))


def test_a_copy_that_hangs_does_not_hang_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.loader import pin_thread

    hangs, goes_on = threading.Event(), threading.Event()

    def hang(*_: Any) -> Any:
        hangs.set()
        goes_on.wait()

    monkeypatch.setattr(pin_thread, "pin", hang)
    monkeypatch.setattr(pin_thread, "LEAVE_S", 0.2)
    it = iter(stoker.DataLoader(d.Map(4, "tensor"), num_workers=1, pin_memory=True))
    assert hangs.wait(60)
    thread, workers = it._pin_memory_thread, it._workers
    it._shutdown_workers()  # which would wait for ever
    assert thread.is_alive()
    assert not any(w.is_alive() for w in workers)
    goes_on.set()
    thread.join(60)
    assert not thread.is_alive()
