"""Functions that only rare samples call, found under another name than their own: what they read is an input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import stoker
from tests.exact.cases import assert_as_made

N, RARE = 80, 37


class Rare(Dataset[Any]):
    """Some samples, none of them in a trial, are made by a function that an attribute holds."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.gain = 1.0
        self.rare = make(self)
        self.makers = {"rare": self.rare}
        self.held = Holder(self.rare)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((500,), i / N).exp().log().exp()
        if i % 40 == RARE:
            x = x * self.find()(self)
        return x + torch.rand(500)

    def find(self) -> Any:
        return self.rare


class OfDict(Rare):
    def find(self) -> Any:
        return self.makers["rare"]


class Held(Rare):
    def find(self) -> Any:
        return self.held.function


class Holder:
    def __init__(self, function: Any) -> None:
        self.function = function


def times_gain(data: Any) -> Any:
    return data.gain


def times(factor: int, data: Any) -> Any:
    return factor * data.gain


class Times:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __call__(self, data: Any) -> Any:
        return self._gain(self.data)

    def _gain(self, data: Any) -> Any:
        return data.gain

    def method(self, data: Any) -> Any:
        return data.gain


def closure(data: Any) -> Any:
    def read(_: Any) -> Any:
        return data.gain

    return read


MAKE = {
    "function": lambda data: times_gain,
    "lambda": lambda data: _LAMBDA,
    "partial": lambda data: functools.partial(times, 2),
    "object": Times,
    "method": lambda data: Times(data).method,
    "closure": closure,
}
_LAMBDA = lambda data: data.gain  # noqa: E731


@pytest.mark.parametrize("kind", [Rare, OfDict, Held])
@pytest.mark.parametrize("name", MAKE)
def test_what_a_rare_function_reads_is_an_input(name: str, kind: type[Rare]) -> None:
    data = kind(MAKE[name])
    staged = stoker.Staged(data, cache="ram")
    for epoch in range(3):
        if epoch == 2:
            data.gain = 3.0
        staged._begin()
        assert_as_made(staged, data, epoch)
        assert epoch or staged.account.filled
