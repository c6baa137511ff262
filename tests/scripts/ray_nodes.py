"""What tests of a cluster share: the processes of its nodes, nodes that several loaders use, epochs to compare."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import numpy as np
import psutil
import ray
import torch

import stoker
from stoker.loader.loader_state import state_of
from stoker_ray.checks import digests
from stoker_ray.entry import RayNodes
from stoker_ray.nodes import Nodes, NodeState, RayNode

from .drawn_loaders import Drawn

NODES = 3
STORE = 300 << 20  # bytes, of a node


def until(done: Callable[[], bool], what: Callable[[], object] = lambda: None) -> None:
    """Waits; nobody tells when a process of Ray's has started or gone."""
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def until_ready(loader: stoker.DataLoader, count: int = NODES) -> None:
    deadline = time.monotonic() + 120
    while True:
        for _ in loader:
            pass
        nodes = state_of(loader).nodes
        if nodes is not None and len(nodes.with_state(NodeState.READY)) >= count:
            return
        assert time.monotonic() < deadline, nodes and nodes.nodes


class Limited(RayNodes):
    """The nodes as one loader after the other uses them, some of them at a time."""

    most = 0

    def _compare(self, found):
        super()._compare(dict(sorted(found.items())[: self.most]))

    def made(self) -> int:
        return sum(node.batches for node in self.nodes.values())


def processes(cluster, *nodes: RayNode) -> list[psutil.Process]:
    """A raylet, then all that Ray has started on it, of these nodes, or of all."""
    ids = {node.info.id for node in nodes}
    out = []
    for one in cluster.list_all_nodes():
        if one.node_id in ids or not ids:
            for found in one.all_processes.get("raylet", ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    raylet = psutil.Process(found.process.pid)
                    out += [raylet, *raylet.children(recursive=True)]
    return out


def actors(cluster, *nodes: RayNode) -> list[psutil.Process]:
    out = []
    for p in processes(cluster, *nodes):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "NodeWorkers" in " ".join(p.cmdline()):
                out.append(p)
    return out


def workers(cluster, *nodes: RayNode) -> list[psutil.Process]:
    """The processes that make batches; not the interpreter that they are forked from."""
    out = []
    for actor in actors(cluster, *nodes):
        with contextlib.suppress(psutil.NoSuchProcess):
            out += [p for p in actor.children(recursive=True) if not p.children()]
    return out


def send(targets: list[psutil.Process], number: int) -> None:
    for p in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            p.send_signal(number)


def raylet(cluster, node: RayNode) -> list[psutil.Process]:
    return processes(cluster, node)[:1]


class Epochs:
    """Two epochs with nodes or without; the same dataset each time, so that nodes keep their workers."""

    dataset = Drawn(400, 4, 40_000)

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.expected = self.run("process", lambda k: None)

    def run(self, method: str, happens: Callable[[int], None]) -> list[str]:
        """The batches. ``happens`` is called with the number of each."""
        loader = stoker.DataLoader(
            self.dataset, 2, shuffle=True, num_workers=1, worker_method=method, task_seeds=True, persistent_workers=True
        )
        state_of(loader).nodes = self.nodes if method == "ray" else None
        torch.manual_seed(7)
        out: list[str] = []
        for _ in range(2):
            it = iter(loader)
            if method == "ray":
                until(lambda: bool(self.nodes.with_state(NodeState.READY)), lambda: self.nodes.nodes)
            for batch in it:
                out.append(str(digests(batch)))
                happens(len(out))
        return out

    def busy(self) -> RayNode | None:
        """A node that makes batches at this moment."""
        return next((node for node in self.nodes.with_state(NodeState.READY) if node.calls), None)


class Fills:
    """An actor that takes all of its node's object store."""

    def fill(self, nbytes: int) -> int:
        held = [ray.put(np.ones(16 << 20, np.uint8)) for _ in range(nbytes // (16 << 20) + 1)]
        self.held = held, [ray.get(ref) for ref in held]  # what is looked at is not spilled to a disk
        return len(held)
