"""Streams that read a map-style dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from stoker.staging.subsets import dataset_inside


class Stream(IterableDataset[Any]):
    """detectron2's ToIterableDataset."""

    def __init__(self, dataset: Dataset[Any], **others: Any) -> None:
        self.dataset = dataset
        self.__dict__.update(others)

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self.dataset)):  # type: ignore[arg-type]
            yield self.dataset[i]


class Changes(Stream):
    def __iter__(self) -> Iterator[Any]:
        self.dataset.epoch = 1  # type: ignore[attr-defined]
        yield self.dataset[0]


class Passes(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(self.dataset, self.dataset, strict=True)  # type: ignore[call-overload]


class Renames(Stream):
    def __iter__(self) -> Iterator[Any]:
        inside = vars(self)["dataset"]
        inside.epoch = 1
        yield inside[0]


def test_a_stream_may_read_a_cache_if_it_only_asks_for_samples() -> None:
    assert dataset_inside(Stream(TensorDataset(torch.rand(3)))) == "dataset"


@pytest.mark.parametrize("kind", [Changes, Passes, Renames])
def test_a_stream_that_does_more_with_its_dataset_may_not(kind: type[Stream]) -> None:
    assert dataset_inside(kind(TensorDataset(torch.rand(3)))) == ""


def test_it_must_be_clear_which_dataset_is_read() -> None:
    data = TensorDataset(torch.rand(3))
    assert dataset_inside(Stream(data, other=data)) == ""
    assert dataset_inside(Stream(Stream(data))) == ""
    assert dataset_inside(data) == ""
