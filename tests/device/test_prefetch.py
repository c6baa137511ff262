"""Batches on the device ahead of the consumer, with a stand-in that copies late and runs out of memory."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core import nested as walk
from stoker.core.errors import UsageError
from stoker.device.accelerator import accelerator
from stoker.device.prefetch import DeviceIter, OutOfMemory, checked
from tests.contract import datasets as d
from tests.device.helpers import LateCopies


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("room", [1, 2, 100])
def test_batches_come_in_order_and_whole(depth: int, room: int) -> None:
    for seed in range(50):
        lane = LateCopies(room, seed)
        it = DeviceIter(iter([torch.tensor([i, i]) for i in range(20)]), lane, depth)
        assert [x.tolist() for x in it] == [[i, i] for i in range(20)], (depth, room, seed)
        assert lane.most <= min(room, max(1, depth))


def test_a_full_device_means_fewer_ahead_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    lane = LateCopies(room=2)
    with caplog.at_level(logging.WARNING, "stoker.device.prefetch"):
        got = list(DeviceIter(iter(map(torch.tensor, range(9))), lane, 4))
    assert [int(x) for x in got] == list(range(9))
    assert [r.getMessage() for r in caplog.records][-1].startswith("the device is out of memory: copying 2 batch(es)")
    assert not lane.spared


def test_one_batch_that_does_not_fit_is_tried_again_and_then_an_error() -> None:
    class Never(LateCopies):
        def send(self, batch: Any) -> tuple[Any, Any]:
            raise OutOfMemory("injected: out of memory")

    lane = Never()
    with pytest.raises(OutOfMemory):
        next(DeviceIter(iter([torch.zeros(1)]), lane, 3))
    assert lane.spared == 1


def test_an_error_comes_in_its_turn_and_iteration_goes_on() -> None:
    def source() -> Any:
        return iter(stoker.DataLoader(d.Map(9, "tensor", "value", (4,)), batch_size=3, num_workers=1))

    it = DeviceIter(source(), LateCopies(), 3)
    assert next(it).shape == (3, 2, 3)
    with pytest.raises(ValueError, match="bad sample 4"):
        next(it)
    assert next(it).shape == (3, 2, 3)
    with pytest.raises(StopIteration):
        next(it)


class Gated(Dataset[Any]):
    """Each sample wants a file that the consumer makes when it has the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        end = time.monotonic() + 30
        while i and not (self.folder / str(i - 1)).exists():
            assert time.monotonic() < end, "the consumer was made to wait for what it had not asked for"
            time.sleep(1e-3)  # threads that ask all the time keep the GIL from the consumer: 30 s under Python 3.12
        return torch.tensor(i)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 2},
        {"num_workers": 2, "worker_method": "thread"},
        {"num_workers": 3, "persistent_workers": True},
        {"num_workers": 2, "in_order": False},
    ],
    ids=["process", "thread", "persistent", "out of order"],
)
def test_nobody_waits_for_a_batch_that_was_not_asked_for(tmp_path: Path, settings: dict[str, Any]) -> None:
    loader = stoker.DataLoader(Gated(tmp_path), batch_size=None, **settings)
    for i, x in enumerate(DeviceIter(iter(loader), LateCopies(), 3)):
        assert int(x) == i
        (tmp_path / str(i)).touch()


@pytest.mark.parametrize("method", ["process", "thread"])
@pytest.mark.few(1)
def test_what_goes_wrong_meanwhile_comes_in_its_turn(method: str) -> None:
    """Errors, the end, and batches that come out of order, with somebody who asks all the time."""
    for seed in range(4):
        rng = random.Random(seed)
        it = iter(
            stoker.DataLoader(d.Map(9, "tensor", "value", (4,)), batch_size=1, num_workers=3, worker_method=method)
        )
        seen: list[Any] = []
        while True:
            for _ in range(rng.randrange(4)):
                it.arrived()
            try:
                seen.append(int(next(it)[0, 0, 0]))
            except ValueError:
                seen.append("bad")
            except StopIteration:
                break
        assert it.arrived()
        assert len(seen) == 9
        assert seen.index("bad") == 4


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: list[torch.Tensor]


class Own:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Own:
        return Own(self.x.to(device))


def test_what_is_moved() -> None:
    meta = torch.device("meta")
    out = walk.move({"a": Batch(torch.ones(2), [torch.ones(3)]), "b": (Own(torch.ones(1)), "word", 3)}, meta)
    found = list(walk.tensors(out))
    assert [t.device.type for t in found] == ["meta"] * 3
    assert out["b"][1:] == ("word", 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_on_the_cpu_nothing_is_done(workers: int) -> None:
    want = list(torch.utils.data.DataLoader(d.Map(20, "tensor"), batch_size=3))
    loader = stoker.DataLoader(d.Map(20, "tensor"), batch_size=3, num_workers=workers, device="cpu")
    assert len(loader) == 7
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(want, loader, strict=True))
    it = iter(loader)
    assert it._auto_collation  # whoever asks for torch's private names is answered
    wrapped = stoker.to_device(torch.utils.data.DataLoader(d.Map(20, "tensor"), batch_size=3), "cpu")
    assert (len(wrapped), wrapped.batch_size) == (7, 3)
    assert all(torch.equal(x, y) for x, y in zip(want, wrapped, strict=True))


def test_a_transform_runs_on_each_batch() -> None:
    loader = stoker.DataLoader(d.Map(6, "tensor"), batch_size=3, device="cpu", transform_on_device=torch.neg)
    want = [-x for x in torch.utils.data.DataLoader(d.Map(6, "tensor"), batch_size=3)]
    assert all(torch.equal(x, y) for x, y in zip(want, loader, strict=True))


def test_devices_that_are_not_here() -> None:
    with pytest.raises(UsageError, match="device='nonsense'"):
        stoker.to_device([], "nonsense")
    with pytest.raises(UsageError, match="depth must be a positive number"):
        stoker.to_device([], "cpu", depth=0)
    with pytest.raises(UsageError, match="transform_on_device= needs device="):
        stoker.DataLoader(range(3), transform_on_device=torch.neg)  # type: ignore[arg-type]
    if accelerator() is None:
        with pytest.raises(UsageError, match="no such device 'cuda'; found only the CPU"):
            stoker.DataLoader(range(3), device="cuda")  # type: ignore[arg-type]
        assert checked(None) == torch.device("cpu")
