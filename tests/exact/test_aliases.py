"""Samples that change data under another name than that by which they read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.compare import equal_bits
from stoker.core.errors import UsageError

N = 200
LEVEL = np.zeros(3, "f4")


def features(i: int) -> Any:
    x = np.full((24, 24), i / N)
    for _ in range(60):
        x = np.sin(x) + 0.1
    return torch.from_numpy(x.astype("f4"))


class Holder:
    def __init__(self, array: Any) -> None:
        self.array = array

    def set(self, value: float) -> None:
        self.array[0] = value


class View(Dataset[Any]):
    def __init__(self) -> None:
        self.marks = [float(i in (37, 101, 150, 188)) for i in range(N)]
        self.state = np.zeros(4, "f4")
        self.current: Any = self.state[1:2]
        LEVEL[:] = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = features(i) * (1 + float(self.state.sum()))
        self.current[0] = self.marks[i]
        return x, i


class OfTensor(View):
    def __init__(self) -> None:
        super().__init__()
        self.current = torch.from_numpy(self.state)


class Buffer(View):
    def __init__(self) -> None:
        super().__init__()
        self.current = memoryview(self.state)


class Held(View):
    def __init__(self) -> None:
        super().__init__()
        self.current = Holder(self.state)

    def __getitem__(self, i: int) -> Any:
        x = features(i) * (1 + float(self.state.sum()))
        self.current.set(self.marks[i])
        return x, i


class List(View):
    def __init__(self) -> None:
        super().__init__()
        self.items = [0.0, 0.0]
        self.current = self.items

    def __getitem__(self, i: int) -> Any:
        x = features(i) * (1 + sum(self.items))
        self.current[0] = self.marks[i]
        return x, i


def put(array: Any, value: float) -> None:
    array[0] = value


class Argument(View):
    def __getitem__(self, i: int) -> Any:
        x = features(i) * (1 + float(self.state.sum()))
        put(self.state[:2], self.marks[i])
        return x, i


class OfGlobal(View):
    def __getitem__(self, i: int) -> Any:
        x = features(i) * (1 + float(LEVEL.sum()))
        put(LEVEL[:1], self.marks[i])
        return x, i


class Fresh(View):
    """A function that changes what belongs to the sample."""

    def __getitem__(self, i: int) -> Any:
        x = features(i)
        put(x, 2.0)
        return x * (1 + float(self.state.sum())), torch.rand(())


def epochs(data: Any, cls: Any) -> list[Any]:
    torch.manual_seed(0)
    loader = cls(data, batch_size=8, shuffle=True)
    return [list(loader) for _ in range(4)]


@pytest.mark.parametrize("kind", [View, OfTensor, Buffer, Held, List, Argument, OfGlobal])
def test_what_a_sample_changes_under_another_name(kind: type[View]) -> None:
    expected = epochs(kind(), torch.utils.data.DataLoader)
    data = kind()
    try:
        staged: Any = stoker.Staged(data, cache="ram")
    except UsageError:
        return  # nothing is cached
    assert equal_bits(epochs(staged, stoker.DataLoader), expected)


def test_what_belongs_to_the_sample_may_change() -> None:
    assert "the same each time" in str(stoker.Staged(Fresh(), cache="ram").split)
