"""Which iterable datasets are seen to divide their samples among workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data as data
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import get_worker_info as which
from torch.utils.data.datapipes.iter import IterableWrapper

import stoker
from stoker.core.division import divides


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Asks(Stream):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(info.id if info else 0, 8, info.num_workers if info else 1))


class AsksByAnotherName(Stream):
    def __iter__(self) -> Iterator[int]:
        info = which()
        yield from range(info.id if info else 0, 8, info.num_workers if info else 1)


def part() -> slice:
    info = data.get_worker_info()
    return slice(info.id if info else 0, None, info.num_workers if info else 1)


class Helped(Stream):
    def __iter__(self) -> Iterator[int]:
        yield from self._mine()

    def _mine(self) -> list[int]:
        return list(range(8))[part()]


class ByShard(Stream):
    def __iter__(self) -> Iterator[int]:
        mine = stoker.shard()
        yield from range(mine.id, 8, mine.num_shards)


def of_worker(items: list[int]) -> list[int]:
    return items[part()]


def all_of_them(items: list[int]) -> list[int]:
    return items


class Pipeline(Stream):
    """As webdataset: a list of functions."""

    def __init__(self, *stages: Callable[[list[int]], list[int]]) -> None:
        self.stages = stages

    def __iter__(self) -> Iterator[int]:
        items = list(range(8))
        for stage in self.stages:
            items = stage(items)
        return iter(items)


class Wrapper(Stream):
    def __init__(self, inner: IterableDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        yield from self.inner


class Table(Dataset):
    """A map-style dataset with a method that is never called."""

    def __getitem__(self, i: int) -> int:
        return i

    def __len__(self) -> int:
        return 8

    def to_stream(self) -> Any:
        return part(), Asks()


class OverTable(Stream):
    def __init__(self, table: object) -> None:
        self.table = table

    def __iter__(self) -> Iterator[int]:
        return (self.table[i] for i in range(8))  # type: ignore[index]


STREAMS: list[tuple[Any, bool]] = [
    (Stream(), False),
    (Asks(), True),
    (AsksByAnotherName(), True),
    (Helped(), True),
    (ByShard(), True),
    (Pipeline(all_of_them), False),
    (Pipeline(all_of_them, of_worker), True),
    (Pipeline(functools.partial(of_worker)), True),
    (Wrapper(Stream()), False),
    (Wrapper(Asks()), True),
    (OverTable(Table()), False),
    (OverTable(stoker.Staged(list(range(8)))), False),
    (IterableWrapper(range(8), deepcopy=False), False),
    (IterableWrapper(range(8), deepcopy=False).sharding_filter(), True),
]


@pytest.mark.parametrize(("dataset", "yes"), STREAMS)
def test_what_is_seen_to_divide_itself(dataset: Any, yes: bool) -> None:
    assert divides(dataset) == yes


@pytest.mark.few(2)
@pytest.mark.parametrize("dataset", [d for d, yes in STREAMS if yes and not isinstance(d, data.IterDataPipe)])
def test_what_is_seen_to_gives_each_sample_once(dataset: Any) -> None:
    seen = [int(i) for batch in DataLoader(dataset, batch_size=2, num_workers=2) for i in batch]
    assert sorted(seen) == list(range(8))
