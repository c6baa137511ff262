"""Batches are as plain as torch's: no views to autograd, on the CPU, aligned, and samples are read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stoker

LOADERS = [pytest.param(DataLoader, id="torch"), pytest.param(stoker.DataLoader, id="stoker")]


class Fours(Dataset):
    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2, self.width), float(i)), "none": torch.zeros(0, 4)}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("width", [3, 5000])  # in the message, and in a slot
def test_what_autograd_makes_of_them(loader: Any, width: int) -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    it = iter(loader(Fours(width), batch_size=1, num_workers=1))
    first = next(it)["x"]
    assert not first._is_view()
    (first.requires_grad_() * 2).sum().backward()
    assert first.detach_().grad_fn is None
    with torch.no_grad():
        second = next(it)["x"]
    assert second.mul_(weight).detach_().eq(1).all()
    with torch.inference_mode():
        assert next(it)["x"].add_(1).eq(3).all()


@pytest.mark.parametrize("loader", LOADERS)
def test_a_default_device_moves_no_part_of_them(loader: Any) -> None:
    it = iter(loader(Fours(3), batch_size=2, num_workers=1))
    with torch.device("meta"):
        batch = next(it)
    assert {t.device.type for t in batch.values()} == {"cpu"}
    assert batch["none"].shape == (2, 0, 4)


class Drawn(Mapping[str, Any]):
    """Draws when it is read."""

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.rand(2)


class DrawnList(list[Any]):
    """Draws when its items are read."""

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.rand(2), torch.rand(2)])


class Lazy(Dataset):
    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return self.kind() if self.kind is Drawn else self.kind([0, 0])


@pytest.mark.parametrize("kind", [Drawn, DrawnList])
def test_samples_that_draw_when_they_are_read_are_read_as_often(kind: Any) -> None:
    def batches(loader: Any) -> list[Any]:
        torch.manual_seed(3)
        found = list(loader(Lazy(kind), batch_size=4, num_workers=1))
        return [t for b in found for t in (b.values() if isinstance(b, dict) else b)]

    theirs, ours = batches(DataLoader), batches(stoker.DataLoader)
    assert len(theirs) == len(ours) == 4
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


class Overlapping(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> list[torch.Tensor]:
        memory = torch.arange(8192, dtype=torch.int64).to(torch.uint8)
        return [memory[i + 1 : 2000], memory[8:4008].view(torch.float64)]


def test_tensors_that_share_memory_stay_aligned_and_shared() -> None:
    for i, (odd, even) in enumerate(stoker.DataLoader(Overlapping(), batch_size=None, num_workers=1)):
        assert even.data_ptr() % 8 == 0
        assert even.numpy().flags.aligned
        assert odd.tolist() == [k % 256 for k in range(i + 1, 2000)]
        even.zero_()
        assert odd[7 - i :].eq(0).all()
