"""A pool with nodes, without Ray: each node is an actor object in this process, called by threads."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.errors import StokerWarning, UsageError
from stoker.loader.loader_state import state_of
from stoker_ray import cluster, node, nodes, pool
from stoker_ray.cluster import NodeInfo
from stoker_ray.node import NodeWorkers

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Ref:
    def __init__(self, future: Future) -> None:
        self._future = future

    def future(self) -> Future:
        return self._future


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: object) -> Ref:
        return Ref(self._actor.threads.submit(self._actor.call, self._name, args))


class Actor:
    """Looks like the handle of an actor."""

    def __init__(self, calls: int, ray: FakeRay) -> None:
        self.threads = ThreadPoolExecutor(calls)
        self.workers = NodeWorkers(own_process=False)
        self.ray, self.dead, self.made = ray, False, 0

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def call(self, name: str, args: tuple) -> object:
        if self.dead:
            raise ConnectionError("the actor died")
        if name == "make":
            self.ray.before_make(self)
            self.made += 1
        out = getattr(self.workers, name)(*args)
        if self.dead:
            raise ConnectionError("the actor died")
        return self.ray.changed(out) if name == "make" else out


class FakeRay:
    def __init__(self, count: int, cores: int = 2) -> None:
        self.infos = {str(i): NodeInfo(str(i), f"node {i}", cores, "127.0.0.1") for i in range(count)}
        self.actors: list[Actor] = []
        self.before_make = lambda actor: None
        self.changed = lambda answers: answers

    def put(self, x: object) -> object:
        return x

    def wait(self, refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        done, _ = concurrent.futures.wait([ref.future() for ref in refs], timeout)
        return [ref for ref in refs if ref.future() in done], []

    def get(self, ref: Ref) -> object:
        return ref.future().result()

    def is_initialized(self) -> bool:
        return True

    def kill(self, actor: Actor) -> None:
        actor.dead = True
        actor.workers.stop()

    def start_actor(self, ray: FakeRay, info: NodeInfo, calls: int) -> Actor:
        self.actors.append(Actor(calls, self))
        return self.actors[-1]


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay(2)
    monkeypatch.setattr(cluster, "check_installed", lambda: None)
    monkeypatch.setattr(cluster, "connect", lambda address, user: fake)
    monkeypatch.setattr(cluster, "beacon", lambda ray: None)
    monkeypatch.setattr(cluster, "own_store", lambda ray: 1 << 30)
    monkeypatch.setattr(cluster, "other_nodes", lambda ray: fake.infos)
    monkeypatch.setattr(cluster, "start_actor", fake.start_actor)
    monkeypatch.setattr(nodes, "LOOK_S", 0.05)
    yield fake
    for actor in fake.actors:
        actor.workers.stop()
        actor.threads.shutdown(wait=False)


class Drawn(Dataset):
    """Samples of three kinds of random numbers, which take a few milliseconds."""

    def __init__(self, n: int, ms: float = 4.0) -> None:
        self.n, self.ms = n, ms

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple:
        time.sleep(self.ms / 1000)
        return torch.rand(3000) + i, np.random.rand(), random.random()


class Kills(Drawn):
    def __getitem__(self, i: int) -> tuple:
        if i == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class OnlyHere(Drawn):
    """Cannot be loaded in the child of another process than this one; nodes' workers have another parent."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.pid = os.getpid()

    def __getitem__(self, i: int) -> tuple:
        if os.getppid() != self.pid:
            raise FileNotFoundError("/data/only/on/the/trainer.jpg")
        return super().__getitem__(i)


def loader_of(dataset: Dataset, method: str, **more: object) -> stoker.DataLoader:
    torch.manual_seed(3)
    return stoker.DataLoader(
        dataset, batch_size=4, shuffle=True, num_workers=1, worker_method=method, task_seeds=True, **more
    )


def bits(loader: stoker.DataLoader, epochs: int = 1) -> list[bytes]:
    return [b"".join(x.numpy().tobytes() for x in batch) for _ in range(epochs) for batch in loader]


def same_until(done, make, **options) -> None:
    """Compares epochs of a loader with nodes and of one without, until ``done`` of the first is true."""
    one, other = loader_of(make(), "ray", **options), loader_of(make(), "process", **options)
    deadline = time.monotonic() + 60
    while True:
        state = torch.get_rng_state()
        got = bits(one)
        torch.set_rng_state(state)
        assert got == bits(other)
        if done(one):
            return
        assert time.monotonic() < deadline, "; ".join(
            f"{node.state} {node.batches} {node.deaths} {list(node.recent_s)} {[call.probe for call in node.calls]}"
            for node in nodes_of(one).nodes.values()
        )


def are(state: nodes.NodeState, count: int = 2):
    """That so many nodes have this state, and that the loader has told what it had to say about them."""

    def done(loader: stoker.DataLoader) -> bool:
        of = nodes_of(loader)
        with of.lock:
            return len(of.with_state(state)) == count and not of.messages

    return done


def nodes_of(loader: stoker.DataLoader) -> nodes.Nodes:
    found = state_of(loader).nodes
    assert found is not None
    return found


def wait_for(loader: stoker.DataLoader) -> None:
    """Until workers have been started on the nodes."""
    deadline = time.monotonic() + 60
    while any(node.state is nodes.NodeState.STARTING for node in nodes_of(loader).nodes.values()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_batches_are_those_of_this_machine_wherever_they_are_made(ray):
    same_until(lambda _: all(actor.made > 5 for actor in ray.actors), lambda: Drawn(200))
    assert len(ray.actors) == 2


def test_batches_that_are_made_quickly_travel_together(ray, monkeypatch):
    monkeypatch.setattr(pool, "PACK_S", 100.0)
    sizes: list[int] = []

    def changed(answers):
        sizes.append(len(answers))
        return answers

    ray.changed = changed
    same_until(
        lambda _: len(sizes) > 20 and max(sizes) >= pool.MOST_PACKED, lambda: Drawn(400, 0.1), persistent_workers=True
    )
    assert max(sizes) == pool.MOST_PACKED


def test_a_node_that_makes_other_bits_is_not_used(ray):
    def changed(answers):
        return [a._replace(leaves=np.frombuffer(bytes(a.leaves), np.uint8) ^ 1) for a in answers]

    ray.changed = changed
    with pytest.warns(StokerWarning, match=r"other bits than the same batch made here, at batch\[0\]"):
        same_until(are(nodes.NodeState.UNUSABLE), lambda: Drawn(100))


def test_a_node_that_cannot_load_is_named(ray):
    with pytest.warns(StokerWarning, match=r"this machine can \(.*only/on/the/trainer.*have to exist there"):
        same_until(are(nodes.NodeState.UNUSABLE), lambda: OnlyHere(100))


def test_actors_that_die_change_nothing(ray, monkeypatch):
    monkeypatch.setattr(nodes, "MAX_DEATHS", 1)

    def before_make(actor: Actor) -> None:
        if actor.made > 10:
            actor.dead = True

    ray.before_make = before_make
    with pytest.warns(StokerWarning, match="ConnectionError: the actor died"):
        same_until(are(nodes.NodeState.UNUSABLE), lambda: Drawn(200))
    assert len(ray.actors) == 4  # each was started again, once


def test_a_task_that_is_asked_for_twice_is_answered_twice(ray, monkeypatch):
    """A call that is late is repeated, perhaps by the node that is late."""
    asked: dict[str, list[Future]] = {}

    def call(actor: Actor, name: str, args: tuple) -> object:
        if name == "make" and args[0] not in asked:
            asked[args[0]] = [actor.threads.submit(actor.workers.make, *args) for _ in range(2)]
        return one(actor, name, args)

    one = Actor.call
    monkeypatch.setattr(Actor, "call", call)
    same_until(lambda _: bool(asked), lambda: Drawn(40, ms=50))
    for first, second in asked.values():
        assert [x.number for x in first.result(60)] == [x.number for x in second.result(60)]


def test_a_node_that_hangs_is_not_waited_for(ray, monkeypatch):
    from stoker_ray import pool

    monkeypatch.setattr(pool, "HANGS_S", 0.5)
    hang = threading.Event()

    def before_make(actor: Actor) -> None:
        if actor.made > 5:
            hang.wait(60)

    ray.before_make = before_make
    try:
        same_until(are(nodes.NodeState.DOUBTED), lambda: Drawn(200))
    finally:
        hang.set()


def test_a_sample_that_kills_is_blamed_wherever_it_is_loaded(ray):
    with pytest.warns(StokerWarning):
        same_until(
            lambda _: sum(actor.made for actor in ray.actors) > 100,
            lambda: Kills(200),
            on_error="skip",
            quarantine=None,
        )


def test_an_epoch_that_is_left_early_is_not_mixed_with_the_next(ray):
    dataset = Drawn(200)

    def run(method: str) -> list[bytes]:
        loader, out = loader_of(dataset, method), []
        for k in range(4):
            for n, batch in enumerate(loader):
                out.append(batch[0].numpy().tobytes())
                if n == 5 + 7 * k:
                    break
        return out

    assert run("ray") == run("process")


def test_iterators_of_one_loader_may_overlap(ray):
    """Nodes work for the one that was begun last, and the others lose nothing; also when an older one is dropped."""

    def run(method: str) -> list[bytes]:
        loader, out = loader_of(Drawn(200), method), []
        for _ in range(2):
            one = iter(loader)
            out += [next(one)[0].numpy().tobytes() for _ in range(10)]
            other = iter(loader)
            for a, b in zip(one, other, strict=False):
                out += [a[0].numpy().tobytes(), b[0].numpy().tobytes()]
            one = iter(loader)
            out += [next(one)[0].numpy().tobytes() for _ in range(10)]
            one = iter(loader)  # the one before is dropped now
            out += [batch[0].numpy().tobytes() for batch in one]
            if method == "ray":
                wait_for(loader)
        return out

    assert run("ray") == run("process")


def test_a_dataset_that_changes_between_epochs(ray):
    def run(method: str) -> list[bytes]:
        dataset, out = Drawn(200), []
        loader = loader_of(dataset, method)
        for n in (200, 80, 120):
            dataset.n = n
            loader.dataset.ms = 3 + n / 100
            out += bits(loader)
        return out

    assert run("ray") == run("process")


def test_what_nodes_cannot_do_is_said(ray):
    class State(Drawn):
        def state_dict(self) -> dict:
            return {}

        def load_state_dict(self, state: dict) -> None:
            pass

    with pytest.warns(StokerWarning, match=r"No workers on other nodes: the dataset has a state_dict"):
        bits(loader_of(State(16), "ray"))
    with pytest.raises(UsageError, match="a Ray client copies each batch"):
        loader_of(Drawn(8), "ray:ray://host:10001")


def test_other_versions_are_named(ray, monkeypatch):
    ray.infos.pop("1")
    theirs = node.versions() | {"torch": "1.0.0"}
    monkeypatch.setattr(NodeWorkers, "facts", lambda *_: node.Facts("host", 1, 2, theirs))
    with pytest.warns(StokerWarning, match=r"it has torch 1.0.0 \(here .*install the same there"):
        same_until(are(nodes.NodeState.UNUSABLE, 1), lambda: Drawn(100))


class OnDevice(Drawn):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.held = {"mean": [torch.zeros(3, device="meta")]}


@pytest.mark.parametrize("case", ["no Ray", "no cluster", "small store", "small /dev/shm", "device"])
def test_what_is_missing_is_said_and_this_machine_goes_on_alone(case, monkeypatch):
    there = SimpleNamespace(is_initialized=lambda: True, init=lambda **_: None, shutdown=lambda: None)
    monkeypatch.setattr(cluster.atexit, "register", lambda _: None)
    monkeypatch.setitem(sys.modules, "ray", there)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda _: None if case == "no Ray" else there)
    monkeypatch.setattr(cluster, "own_store", lambda _: (64 if case == "small store" else 999) << 20)
    monkeypatch.setattr(cluster, "shared_memory", lambda: (64 if case == "small /dev/shm" else 999) << 20)
    if case == "no cluster":
        there.is_initialized = lambda: False
    said = {
        "no Ray": r'Ray is not installed: pip install "stoker\[ray\]"',
        "no cluster": r"no Ray cluster at '127.0.0.1:1' \(Connection refused\); `ray start --head`",
        "small store": r"object store has 64 MB and batches need 256: ray start --object-store-memory",
        "small /dev/shm": r"/dev/shm has 64 MB.*docker run --shm-size",
        "device": r"has a tensor on meta, and other nodes have no such device: keep it on the CPU",
    }
    dataset = OnDevice(40) if case == "device" else Drawn(40)
    match = f"No workers on other nodes: .*{said[case]}.*Only this machine loads batches"
    with pytest.warns(StokerWarning, match=match):  # noqa: PT031
        loader = loader_of(dataset, "ray:127.0.0.1:1")
        got = bits(loader)
        if nodes_of(loader)._thread is not None:
            nodes_of(loader)._thread.join(30)
        got += bits(loader)
    assert got == bits(loader_of(dataset, "process"), 2)
