"""Nodes of a cluster ask each other for prepared samples. Two nodes in this process, over the loopback device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.core.compare import equal_bits
from stoker.core.errors import StokerWarning
from stoker.staging.store.decode import layout
from stoker.staging.store.encode import take
from stoker.staging.store.store import Store
from stoker.workers.protocol import WorkerSpec
from stoker_ray.cluster_cache import CacheOfWorker, NodeCache, new_cache
from stoker_ray.shipment import pickled_spec

N = 40
SECRET = b"s" * 32


def sample(i: int, kind: str) -> Any:
    x = torch.arange(6.0) * i
    return (x, i) if kind == "rows" else {"x": x[: i % 5], "name": f"sample {i}", "y": np.float32(i)}


def node() -> NodeCache:
    cache = new_cache(N, None, 1 << 20, 1)
    assert cache is not None
    return cache


def worker_of(cache: NodeCache) -> tuple[CacheOfWorker, Store]:
    made, arguments = cache.__reduce__()
    worker = made(*arguments)
    return worker, Store(worker.memories[0], N, 0)


@pytest.fixture
def nodes():
    made = [node() for _ in range(3)]
    addresses = [("127.0.0.1", cache.serve("127.0.0.1", SECRET)) for cache in made]
    for k, cache in enumerate(made):
        cache.set_peers(addresses[:k] + addresses[k + 1 :])
    yield made
    for cache in made:
        cache.close()


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_what_another_node_has_arrives_to_the_bit(nodes, kind):
    for k in (1, 2):
        _, store = worker_of(nodes[k])
        store.admit({i: take(sample(i, kind)) for i in range(16 * (k - 1), 16 * k)})
        assert store.account.filled == 16
    worker, _ = worker_of(nodes[0])
    found = worker.fetch([*range(10, 40)], 0.1)
    assert sorted(found) == [*range(10, 32)]
    for i, (type_spec, leaves) in found.items():
        assert equal_bits(layout(type_spec, False).put(leaves), sample(i, kind))


def test_a_store_that_is_shut_sends_nothing(nodes):
    _, store = worker_of(nodes[1])
    store.admit({i: take(sample(i, "rows")) for i in range(N)})
    worker, _ = worker_of(nodes[0])
    assert worker.fetch([1], 0.1)
    store.shut("a sample differs from when it was cached")
    assert worker.fetch([1], 0.1) == {}


def test_asking_that_does_not_pay_is_paused(nodes, monkeypatch):
    _, store = worker_of(nodes[1])
    worker, _ = worker_of(nodes[0])

    asked, ask = [], nodes[0]._ask_nodes
    monkeypatch.setattr(nodes[0], "_ask_nodes", lambda indices: asked.append(batch) or ask(indices))
    for batch in range(200):  # noqa: B007
        worker.fetch([1], 0.1)
    assert asked == [0, 2, 5, 10, 19, 36, 69, 134, 199]
    worker.look_again()
    store.admit({i: take(sample(i, "rows")) for i in range(N)})
    assert worker.fetch([1], 0.1)  # nobody makes a sample in less time than that
    assert worker.fetch([1], 1e-9)  # it pays less, and is paused
    assert worker.fetch([1], 0.1) == {}


def test_nodes_that_have_gone_are_not_asked_again(nodes):
    worker, _ = worker_of(nodes[0])
    for cache in nodes[1:]:
        cache.close()
    assert worker.fetch([1, 2], 0.1) == {}
    nodes[0].close()
    worker.look_again()
    assert worker.fetch([1, 2], 0.1) == {}


def test_no_cache_is_wanted():
    assert new_cache(0, None, 0, 1) is None


def test_a_cache_that_is_discarded_here_is_pickled_as_another_dataset():
    pytest.importorskip("cloudpickle")
    staged = stoker.Staged(range(N), prepare=abs)
    spec = WorkerSpec(0, staged, True, list, False, 0, None, 1, None, True)
    before = pickled_spec(spec).data
    staged._begin()
    assert [staged[i] for i in range(N)] == list(range(N))
    assert pickled_spec(spec).data == before  # what is in the cache is of this machine
    with pytest.warns(StokerWarning, match="Cache discarded"):
        staged._disable("a sample differs from when it was cached")
    assert pickled_spec(spec).data != before
