"""What things cost on this machine, and runs of the pool that the model has to reproduce. Each in its own process.

All nodes are on this machine (``ray.cluster_utils.Cluster``), each with two cores as far as Ray knows. *Bare* is Ray
without stoker: an actor on another node, calls in flight as the pool has them. *Pool* is ``worker_method="ray"``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import stoker
from stoker.loader.loader_state import state_of
from stoker.sampling.order import Permutation

CORES = 2  # of a node
BATCH, SLEEP_S = 8, 0.01
SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20, "64 MB": 64 << 20}
IN_FLIGHT = 8
READY_S = 120  # until all nodes have to make batches
LENGTHS = [10**n for n in (6, 7, 8)]  # of a permutation that is drawn whole
KEYED = [10**n for n in (6, 8, 10)]  # of one whose places are computed
STATES = 2000


class Sleeps(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that take a while and no processor time.

    Args:
        n, nbytes, seconds: how many, how large, how long.
        slow: how many times as long on one node: the one whose actor writes its id to ``file`` first.
        file: see ``slow``.
    """

    def __init__(self, n: int, nbytes: int = 4096, seconds: float = SLEEP_S, slow: float = 1.0, file: str = "") -> None:
        self.n, self.nbytes, self.seconds = n, nbytes, seconds
        self.slow, self.file = slow, file
        self.process, self.times = 0, 1.0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.seconds:
            if self.file and self.process != os.getpid():
                self.process, self.times = os.getpid(), self.slow if on_slow_node(self.file) else 1.0
            time.sleep(self.seconds * self.times)
        return torch.full((self.nbytes,), i % 251, dtype=torch.uint8)


def on_slow_node(file: str) -> bool:
    """Whether this process is a worker of the node that is slow."""
    actor = next((p.pid for p in psutil.Process().parents() if "ray::" in " ".join(p.cmdline())), None)
    if actor is None:
        return False
    with contextlib.suppress(FileExistsError), open(file, "x") as out:
        out.write(str(actor))
    return Path(file).read_text() in ("", str(actor))


def nodes_of(what: str) -> tuple[int, float]:
    """How many nodes a run of the pool has, and how many times as long one of them takes."""
    kind, _, count = what.partition(" ")
    return {"sleep": (int(count), 1.0), "slow": (2, float(count))}[kind] if kind in ("sleep", "slow") else (1, 1.0)


def data_of(what: str) -> tuple[Sleeps, int]:
    """The dataset of a run of the pool, and its batch size."""
    if what not in SIZES:
        return Sleeps(BATCH * 100 * (1 + 2 * nodes_of(what)[0])), BATCH
    nbytes = SIZES[what]
    return Sleeps(4000 if nbytes < 1 << 20 else 800 if nbytes < 32 << 20 else 150, nbytes, 0.0), 1


def rate(loader: Any, skip: int) -> float:
    """Batches a second, the first ``skip`` left out."""
    began, count = 0.0, 0
    for k, _ in enumerate(loader):
        if k == skip:
            began = time.perf_counter()
        count += k > skip
    return count / (time.perf_counter() - began)


# -- a cluster


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[None]:
    """A head, and so many other nodes, with folders of their own: another cluster of this user may be there."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        import ray
        from ray.cluster_utils import Cluster

        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2 << 30})
        try:
            for _ in range(nodes):
                found.add_node(num_cpus=CORES, object_store_memory=1 << 30)
            os.environ["RAY_ADDRESS"] = found.address
            yield
        finally:
            ray.shutdown()
            found.shutdown()


def other_node(ray: Any) -> Any:
    """Puts an actor on the node that is not this one."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    there = next(n["NodeID"] for n in ray.nodes() if n["NodeID"] != here)
    return NodeAffinitySchedulingStrategy(there, soft=False)


def maker() -> tuple[Any, Any]:
    """``ray``, and an actor on another node that answers with arrays which it has."""
    import ray

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)

    @ray.remote(num_cpus=1, max_concurrency=2 * IN_FLIGHT)
    class Maker:
        def __init__(self) -> None:
            self.arrays: dict[int, Any] = {}

        def make(self, nbytes: int, tasks: list[list[int]]) -> list[Any]:
            array = self.arrays.setdefault(nbytes, np.full(nbytes, 7, np.uint8))
            return [(b"meta", array) for _ in tasks]

    return ray, Maker.options(scheduling_strategy=other_node(ray)).remote()  # type: ignore[attr-defined]


def answers(ray: Any, actor: Any, nbytes: int, packed: int, n: int, in_flight: int) -> Iterator[Any]:
    """What ``n`` calls answer, so many of them in flight, in order."""
    tasks = [list(range(64))] * packed
    refs = deque(actor.make.remote(nbytes, tasks) for _ in range(in_flight))
    for i in range(n):
        found = ray.get(refs.popleft())
        if i + in_flight < n:
            refs.append(actor.make.remote(nbytes, tasks))
        yield found
        del found


def calls() -> Iterator[dict[str, Any]]:
    """Seconds of a call that answers with one small batch or with eight, and its way when nothing else is."""
    ray, actor = maker()
    for packed in (1, 8):
        list(answers(ray, actor, 4096, packed, 200, IN_FLIGHT))
        n, began, cpu = 2000, time.perf_counter(), time.process_time()
        for _ in answers(ray, actor, 4096, packed, n, IN_FLIGHT):
            pass
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        yield {"packed": packed, "call_s": took / n, "processor_s": cpu / n}
    ways = []
    for _ in range(200):
        began = time.perf_counter()
        ray.get(actor.make.remote(4096, [[0]]))
        ways.append(time.perf_counter() - began)
    yield {"packed": 0, "way_s": statistics.median(ways)}


def objects() -> Iterator[dict[str, Any]]:
    """Seconds of an answer that goes through the object stores, and of the copy out of this one."""
    ray, actor = maker()
    for size in list(SIZES)[1:]:
        nbytes, n = SIZES[size], 60 if SIZES[size] >= 32 << 20 else 300
        list(answers(ray, actor, nbytes, 1, 10, 4))
        began = time.perf_counter()
        for _ in answers(ray, actor, nbytes, 1, n, 4):
            pass
        took, out, copies = (time.perf_counter() - began) / n, np.zeros(nbytes, np.uint8), []
        for found in answers(ray, actor, nbytes, 1, n // 2, 1):
            began = time.perf_counter()
            np.copyto(out, found[0][1])
            copies.append(time.perf_counter() - began)
        yield {"size": size, "nbytes": nbytes, "object_s": took, "copy_s": statistics.median(copies)}


def pool(what: str) -> Iterator[dict[str, Any]]:
    """Batches a second of the pool: ``sleep N`` with N nodes, ``slow N`` with two, one of which takes N times as long,
    or of one node with batches of a size."""
    nodes, slow = nodes_of(what)
    data, batch = data_of(what)
    if slow != 1.0:
        data.slow, data.file = slow, str(Path(os.environ["RAY_TMPDIR"], "slow"))
    loader: Any = stoker.DataLoader(data, batch, num_workers=1, worker_method="ray", task_seeds=True)
    deadline = time.monotonic() + READY_S
    while len(ready(loader)) < nodes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{nodes} nodes did not come")
        for _ in loader:
            if len(ready(loader)) == nodes:
                break
    before = sum(node.batches for node in ready(loader))
    found = rate(loader, 20)
    yield {"rate": found, "by_nodes": sum(node.batches for node in ready(loader)) - before}


def ready(loader: Any) -> list[Any]:
    """The nodes that make batches."""
    nodes: Any = getattr(state_of(loader), "nodes", None)
    return [] if nodes is None else [node for node in list(nodes.nodes.values()) if node.state.name == "READY"]


# -- this process alone


def here() -> Iterator[dict[str, Any]]:
    """The training thread for a batch of its own workers; and one worker for batches as the pool is given them."""
    loader: Any = stoker.DataLoader(Sleeps(64 * 4000, 8, 0.0), 64, num_workers=2, persistent_workers=True)
    for _ in range(2):
        cpu, n = time.thread_time(), 0
        for _ in loader:
            n += 1
    yield {"batch_s": (time.thread_time() - cpu) / n}
    del loader
    datasets = {"sleep": data_of("sleep 1"), **{size: data_of(size) for size in SIZES}}
    for what, (data, batch) in datasets.items():
        yield {"what": what, "make_s": 1 / rate(stoker.DataLoader(data, batch, num_workers=1, task_seeds=True), 10)}


def shuffles() -> Iterator[dict[str, Any]]:
    """Seconds of a processor to draw a permutation as torch's samplers do, and to compute places of one."""
    for n in LENGTHS:
        generator = torch.Generator().manual_seed(n)
        began = time.process_time()
        order = torch.randperm(n, generator=generator)
        drawn = time.process_time() - began
        began = time.process_time()
        if n <= 10**7:  # DistributedSampler makes a list of it, of 36 bytes an index
            order.tolist()
        yield {"randperm": n, "drawn_s": drawn, "list_s": time.process_time() - began if n <= 10**7 else None}
        del order
    for n in KEYED:
        began = time.process_time()
        permutation = Permutation(n, 7)
        made, places = time.process_time() - began, np.arange(4096) + n // 2
        took = _median(lambda p=permutation, at=places: p.at(at), 200)  # type: ignore[misc]
        yield {"feistel": n, "begin_s": made, "index_s": took / len(places)}


def states() -> Iterator[dict[str, Any]]:
    """``state_dict()`` in the middle of an epoch over 10^10 samples: seconds, and bytes as JSON and pickled."""
    import json

    for draws in (False, True):
        loader: Any = stoker.DataLoader(range(10**10), 64, shuffle="feistel")
        took = []
        for k, _ in enumerate(loader):
            if draws:
                torch.rand(())
            began = time.perf_counter()
            state = loader.state_dict()
            took.append(time.perf_counter() - began)
            if k == STATES:
                break
        sizes = {"json": len(json.dumps(state)), "pickle": len(pickle.dumps(state))}
        yield {"draws": draws, "state_s": statistics.median(took), **sizes}


def _median(act: Callable[[], object], n: int) -> float:
    took = []
    for _ in range(n):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


ALONE = {"here": here, "shuffles": shuffles, "states": states}
BARE = {"calls": calls, "objects": objects}
POOL = [*(f"sleep {n}" for n in (1, 2, 4)), "slow 3", "slow 10", *SIZES]
NAMES = [*ALONE, *(f"bare {name}" for name in BARE), *(f"pool {name}" for name in POOL)]


def one(name: str) -> Iterator[dict[str, Any]]:
    """The lines of a measurement."""
    if name in ALONE:
        yield from ALONE[name]()
        return
    kind, _, what = name.partition(" ")
    with cluster(nodes_of(what)[0]):
        yield from pool(what) if kind == "pool" else BARE[what]()
