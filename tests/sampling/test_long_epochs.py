"""An epoch over ten billion samples: what a state dict takes, and that it leads back to its place."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

import stoker
from stoker.sampling.order import Permutation

N = 10**10
BATCH = 64
MOST_BYTES = 10_000


class Shard(DistributedSampler[int]):
    """Every so manyth place of a permutation that nobody holds in memory."""

    def places(self, first: int) -> Iterator[int]:
        order = Permutation(N, self.seed + self.epoch)
        for place in range(self.rank + first * self.num_replicas, N, self.num_replicas):
            yield int(order.at(np.array([place]))[0])

    def __iter__(self) -> Iterator[int]:
        return self.places(0)


class ShardWithPlace(Shard):
    """It remembers how much it has given, so that nothing is drawn again."""

    given = 0

    def __iter__(self) -> Iterator[int]:
        first, self.given = self.given, 0
        for i, index in enumerate(self.places(first), first + 1):
            self.given = i
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


OF_RANK: dict[str, Any] = {"num_replicas": 8, "rank": 3, "seed": 5}
ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "feistel": lambda: {"shuffle": "feistel"},
    "feistel, generator": lambda: {"shuffle": "feistel", "generator": torch.Generator().manual_seed(1)},
    "shard": lambda: {"sampler": Shard(range(N), **OF_RANK)},
    "shard with place": lambda: {"sampler": ShardWithPlace(range(N), **OF_RANK)},
}


def loader_of(order: str, workers: int) -> stoker.DataLoader[Any]:
    return stoker.DataLoader(range(N), BATCH, num_workers=workers, worker_method="thread", **ORDERS[order]())


@pytest.mark.few(6)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_state_is_small_and_leads_back(order: str, workers: int, draws: bool) -> None:
    loader = loader_of(order, workers)
    it = iter(loader)
    for _ in range(5):
        next(it)
        if draws:
            torch.rand(1000)
    state = loader.state_dict()
    text = json.dumps(state)
    assert len(text) < MOST_BYTES
    assert len(pickle.dumps(state)) < MOST_BYTES
    wanted = [batch.tolist() for batch in islice(it, 3)]
    again = loader_of(order, workers)
    again.load_state_dict(json.loads(text))
    assert [batch.tolist() for batch in islice(again, 3)] == wanted
    assert sum(map(len, wanted)) == 3 * BATCH


@pytest.mark.parametrize("order", ["in order", "feistel", "shard with place"])
def test_a_place_in_the_middle_is_reached_at_once(order: str) -> None:
    """The test's time limit would not do for the indices before it."""
    loader = loader_of(order, 0)
    next(iter(loader))
    state = loader.state_dict()
    batches = N // BATCH // 16
    state["next"], state["samples"] = batches, batches * BATCH
    if order == "shard with place":
        own = json.loads(state["sampler_state"])
        state["sampler_state"] = json.dumps({**own, "given": batches, "sampler": {"given": batches * BATCH}})
    again = loader_of(order, 0)
    again.load_state_dict(state)
    found = next(iter(again)).tolist()
    if order == "in order":
        assert found == list(range(batches * BATCH, (batches + 1) * BATCH))
    elif order == "shard with place":
        assert found == list(islice(Shard(range(N), **OF_RANK).places(batches * BATCH), BATCH))
    assert len(set(found)) == BATCH
