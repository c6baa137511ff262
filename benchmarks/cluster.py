"""Nodes of a Ray cluster: ``python -m benchmarks.cluster run|table`` (with the extra ``ray``).

All nodes are on this machine (``ray.cluster_utils.Cluster``), each with two cores as far as Ray knows. So samples sleep
for 10 ms: work that this machine's cores do not limit. *Rate* is samples per second of the middle of an epoch.
*Transport*: batches of several sizes from one node against a bare loop of ``ray.get`` and a copy into memory that is
used again, in turns in one process. The samples are there already, for both, so only their way is measured. What this
machine's own worker makes meanwhile is left out; it waits most of the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .command import Line, in_turns, main

Samples = np.ndarray[Any, np.dtype[np.uint8]]
NODES = (0, 1, 2, 4)
SLEEP_S = 0.01
BATCH = 8
CORES = 2
SIZES = {"1 MB": 1 << 20, "8 MB": 8 << 20, "64 MB": 64 << 20}
BATCHES = {"1 MB": 400, "8 MB": 200, "64 MB": 60}  # of one turn
TURNS = 4
IN_FLIGHT = 4  # calls of the bare loop; as many as a loader has for a node with two cores
PARTS = ("nodes", "transport")
_kept: dict[int, Samples] = {}


class Sleeps(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that take a while and no processor time."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(SLEEP_S)
        return torch.full((4096,), i % 251, dtype=torch.uint8)


def kept(nbytes: int) -> Samples:
    """A sample that this process makes once. Made anew it would cost a page fault for each 4 KB, a third of all."""
    if nbytes not in _kept:
        _kept[nbytes] = np.full(nbytes, 7, np.uint8)
    return _kept[nbytes]


class Kept(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are there already; in workers of the trainer's own machine they take ``here_s``."""

    def __init__(self, n: int, nbytes: int, here_s: float = 0.0) -> None:
        self.n, self.nbytes, self.here_s, self.trainer = n, nbytes, here_s, os.getpid()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if os.getppid() == self.trainer:
            time.sleep(self.here_s)
        return torch.from_numpy(kept(self.nbytes))


def _cluster(nodes: int) -> Any:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 if nothing is said: other programs would stop it
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2 << 30})
    for _ in range(nodes):
        cluster.add_node(num_cpus=CORES, object_store_memory=1 << 30)
    os.environ["RAY_ADDRESS"] = cluster.address
    return cluster


def wait_for(loader: Any, count: int) -> None:
    """Iterates until so many nodes make batches."""
    from stoker.loader.loader_state import state_of
    from stoker_ray.nodes import NodeState

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for _ in loader:
            nodes = state_of(loader).nodes
            if nodes is not None and len(nodes.with_state(NodeState.READY)) == count:
                return
    raise RuntimeError(f"{count} nodes did not come")


def _rate(loader: Any, batch: int, skip: int) -> float:
    began, count = 0.0, 0
    for k, _ in enumerate(loader):
        if k == skip:
            began = time.perf_counter()
        count += k > skip
    return count * batch / (time.perf_counter() - began)


def one(name: str) -> None:
    """Measures one contestant: ``sleep 2``: two nodes; ``local``: as many workers here as one node has;
    ``1 MB``: batches of that size from one node, and the bare loop."""
    import stoker

    if name == "local":
        loader = stoker.DataLoader(Sleeps(1600), BATCH, num_workers=CORES, task_seeds=True)
        print(json.dumps({"rate": _rate(loader, BATCH, 20)}))
        return
    count = int(name.removeprefix("sleep ")) if name not in SIZES else 1
    cluster = _cluster(count)
    try:
        if name in SIZES:
            _transport(name)
        else:
            method = "ray" if count else "process"
            data = Sleeps(1600 * (1 + count))
            loader = stoker.DataLoader(data, BATCH, num_workers=1, worker_method=method, task_seeds=True)
            if count:
                wait_for(loader, count)
            print(json.dumps({"rate": _rate(loader, BATCH, 20)}))
    finally:
        import ray

        ray.shutdown()
        with contextlib.suppress(ValueError):  # the node of this process cannot be removed
            cluster.shutdown()


def _transport(name: str) -> None:
    """Prints a line for each turn: GB/s of the bare loop, and of a loader's batches from the node."""
    import ray

    import stoker

    n, size = BATCHES[name], SIZES[name]
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    makers = _makers(size)
    here_s = 3 * size / 1e9 / _bare(makers, size, n // 2)
    data = Kept(n, size, here_s)
    loader = stoker.DataLoader(
        data, 1, num_workers=1, worker_method="ray", task_seeds=True, prefetch_factor=8, persistent_workers=True
    )
    wait_for(loader, 1)
    for turn in range(TURNS):
        for what in ("bare", "rate") if turn % 2 == 0 else ("rate", "bare"):
            rate = _bare(makers, size, n) if what == "bare" else from_node(loader, size)
            print(json.dumps({"turn": turn, what: rate}))


def from_node(loader: object, size: int) -> float:
    """GB/s that came from the node, of an epoch; what the local worker made is left out."""
    from stoker.loader.loader_state import state_of

    nodes = state_of(loader).nodes
    assert nodes is not None
    (node,) = nodes.nodes.values()
    before, began = node.batches, time.perf_counter()
    for _ in loader:  # type: ignore[attr-defined]
        pass
    return (node.batches - before) * size / (time.perf_counter() - began) / 1e9


def _makers(nbytes: int) -> list[Any]:
    """Actors on the other node, one for each of its cores."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    class Maker:
        def make(self) -> Samples:
            return kept(nbytes)

    here = ray.get_runtime_context().get_node_id()
    other = next(n["NodeID"] for n in ray.nodes() if n["NodeID"] != here)
    actor = ray.remote(Maker).options(num_cpus=0, scheduling_strategy=On(other, soft=False))
    makers = [actor.remote() for _ in range(CORES)]
    ray.get([maker.make.remote() for maker in makers])  # they have started, and have their sample
    return makers


def _bare(makers: list[Any], nbytes: int, n: int) -> float:
    """GB/s of a loop of ``ray.get`` and a copy."""
    import ray

    out = np.zeros(nbytes, np.uint8)
    out += 1  # its pages are there
    began = time.perf_counter()
    refs = [makers[i % CORES].make.remote() for i in range(IN_FLIGHT)]
    for i in range(n):
        ref = refs.pop(0)
        if i + IN_FLIGHT < n:
            refs.append(makers[i % CORES].make.remote())
        np.copyto(out, ray.get(ref))
        del ref
    return n * nbytes / (time.perf_counter() - began) / 1e9


def measure(rounds: int, only: list[str]) -> Iterator[Line]:
    parts = {"nodes": ["local", *(f"sleep {n}" for n in NODES)], "transport": list(SIZES)}
    yield from in_turns("cluster", "contestant", [name for part in only for name in parts[part]], rounds)


def table(lines: list[Line]) -> str:
    """Samples per second by number of nodes, and GB/s by size of batch."""
    by: dict[str, list[Line]] = {}
    for line in lines:
        by.setdefault(line["contestant"], []).append(line)
    out = []
    if "local" in by:
        rates = {name: [line["rate"] for line in by[name]] for name in by if name not in SIZES}
        rate = {name: statistics.median(values) for name, values in rates.items()}
        out += ["| nodes | samples/s | more than none, of one node's rate | spread |", "|---|---|---|---|"]
        for n in NODES:
            values = rates[f"sleep {n}"]
            more = (rate[f"sleep {n}"] - rate["sleep 0"]) / rate["local"]
            out.append(f"| {n} | {rate[f'sleep {n}']:,.0f} | {more:.2f} | {min(values):,.0f} to {max(values):,.0f} |")
        out += ["", f"Two workers here, without Ray: {rate['local']:,.0f} samples/s.", ""]
    sizes = [size for size in SIZES if size in by]
    if sizes:
        out += ["| batch | stoker, GB/s | bare, GB/s | of bare | of each turn |", "|---|---|---|---|---|"]
        out += [_row(size, by[size]) for size in sizes]
    return "\n".join(out)


def _row(size: str, lines: list[Line]) -> str:
    got, bare = ([line[what] for line in lines if what in line] for what in ("rate", "bare"))
    of = [g / b for g, b in zip(got, bare, strict=True)]
    medians = f"{statistics.median(got):.2f} | {statistics.median(bare):.2f} | {statistics.median(of):.0%}"
    return f"| {size} | {medians} | {min(of):.0%} to {max(of):.0%} |"


if __name__ == "__main__":
    sys.exit(main("cluster", __doc__, measure, table, one, 3, PARTS))
