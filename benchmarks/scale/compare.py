"""Fits the model's costs to what was measured, compares the two, and asks the model what cannot be measured here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .measure import CORES, LENGTHS, POOL, SIZES, data_of, nodes_of
from .model import AHEAD, MOST_PACKED, PACK_BYTES, Costs, Node, Plan, Simulation

Line = dict[str, Any]
GBIT = 1e9 / 8
NIC = 25 * GBIT
SHARE = 0.9  # of a NIC that large answers reach (measured at 1 and 4 Gbit/s; unknown above)
NETWORK_S = 100e-6  # one way in a data centre
SAMPLES = 10**10
# Batches of 64: bytes, and seconds of a core.
WORK = {"text, 8 KB": (8 << 10, 0.02), "pictures, 9.6 MB": (64 * 150_528, 0.5)}
NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
RANK_COUNTS = (1, 10, 100, 1000, 10_000)
NODE_CORES, LOCAL = 16, 4
SLOWNESS = (2.0, 3.0, 10.0)
VARIED = ((0.1, AHEAD), (0.3, AHEAD), (1.0, AHEAD), (1.0, 8))  # spread of a batch's time, tasks ahead of each core
FAULTS = {  # what happens to one node of one rank, one second after the beginning
    "3 times as slow": {"slow": 3.0, "slow_from": 1.0},
    "10 times as slow": {"slow": 10.0, "slow_from": 1.0},
    "hangs": {"slow": 1e5, "slow_from": 1.0},
    "actor killed (noticed after 0.03 s)": {"dies": 1.0, "notice": 0.03},
    "raylet killed (2 s)": {"dies": 1.0, "notice": 2.0},
    "link down (65 s)": {"dies": 1.0, "notice": 65.0},
}


# -- fitting


def read(path: Path) -> list[Line]:
    """Raw lines, without the first, which is about the machine."""
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def best(lines: Iterable[Line], key: str, **like: Any) -> float:
    """The least of the lines that have these values: other work on the machine only adds to it."""
    return min(x[key] for x in lines if key in x and all(x.get(k) == v for k, v in like.items()))


def fitted(lines: list[Line]) -> Costs:
    """The costs of this machine, from what was measured without the pool."""
    alone, packed = (best(lines, "call_s", packed=n) for n in (1, MOST_PACKED))
    small, large = (best(lines, "object_s", size=size) for size in ("1 MB", "64 MB"))
    wire_s = (large - small) / (SIZES["64 MB"] - SIZES["1 MB"])
    return Costs(
        call_s=alone,
        batch_s=best(lines, "batch_s") + max(0.0, packed - alone) / (MOST_PACKED - 1),
        copy_s=best(lines, "copy_s", size="8 MB") / SIZES["8 MB"],
        object_s=max(0.0, small - SIZES["1 MB"] * wire_s),
        wire_s=wire_s,
        latency_s=max(0.0, best(lines, "way_s") - alone) / 2,
    )


def plan_of(what: str, lines: list[Line]) -> Plan:
    """The run of the pool that was measured under this name."""
    (n, slow), (data, batch) = nodes_of(what), data_of(what)
    make_s = best(lines, "make_s", what=what if what in SIZES else "sleep")
    nodes = (Node(CORES, slow), *(Node(CORES),) * (n - 1))
    return Plan(len(data) // batch, make_s, batch * data.nbytes, nodes, local=1)


def compared(lines: list[Line]) -> Iterator[Line]:
    """Measured and modelled batches a second of each run of the pool."""
    costs = fitted(lines)
    for what in POOL:
        measured = [x["rate"] for x in lines if x.get("name") == f"pool {what}"]
        if measured:
            model = Simulation(plan_of(what, lines), costs).run().rate(20)
            yield {"run": what, "measured": max(measured), "spread": measured, "model": model}


# -- asking


def network(lines: list[Line], nbytes_s: float = NIC) -> Costs:
    """Costs of the same driver where nodes are machines: the wire is a NIC, and what else a call takes is theirs."""
    costs = fitted(lines)
    return replace(
        costs,
        call_s=best(lines, "processor_s", packed=1),
        wire_s=1 / (SHARE * nbytes_s),
        latency_s=costs.latency_s + NETWORK_S,
    )


def more_nodes(costs: Costs) -> Iterator[Line]:
    """One rank and more and more nodes."""
    for work, (nbytes, make_s) in WORK.items():
        for gather in (False, True)[: 1 + (PACK_BYTES // nbytes > 1)]:
            for n in NODE_COUNTS:
                batches = 6 * AHEAD * NODE_CORES * n + 200
                plan = Plan(
                    batches, make_s, nbytes, (Node(NODE_CORES),) * n, LOCAL, spread=0.1, gather=gather, store=64 << 30
                )
                found = Simulation(plan, costs).run()
                yield {
                    "simulated": "nodes",
                    "work": work,
                    "gather": gather,
                    "nodes": n,
                    "rate": found.rate(batches // 3, batches // 3),
                    "cores": (n * NODE_CORES + LOCAL) / make_s,
                    "driver": found.driver_s / found.times[-1],
                    "wire": found.wire_s / found.times[-1],
                    "per_call": (found.made - LOCAL / make_s * found.times[-1]) / max(1, found.calls),
                }


def more_ranks(costs: Costs) -> Iterator[Line]:
    """Ranks that step together, each with a small node and cores of its own that could make 1.25 batches a step."""
    (nbytes, make_s), cores, local = WORK["pictures, 9.6 MB"], 4, 2
    step_s = 1.25 * make_s / (cores + local)
    for spread, ahead in VARIED:
        for ranks in RANK_COUNTS:
            batches = 3 * ahead * (cores + local) + (24 if ranks > 100 else 480)
            plan = Plan(batches, make_s, nbytes, (Node(cores),), local, ahead, ranks, step_s, spread)
            waits = Simulation(plan, costs).run().waits[batches // 3 :]
            share = sum(waits) / (sum(waits) + step_s * len(waits))
            yield {"simulated": "ranks", "spread": spread, "ahead": ahead, "ranks": ranks, "waiting": share}


def faults(costs: Costs) -> Iterator[Line]:
    """What a node that fails costs a rank with four, whose cores could make 1.6 batches a step: three would do.
    Batches are small, so that nothing else is in the way."""
    nbytes, make_s = 8 << 10, 0.5
    for cores in (NODE_CORES, 4 * NODE_CORES):
        nodes = (Node(cores),) * 4
        step_s = 1.6 * make_s / (4 * cores + LOCAL)
        batches = int(90 / step_s)
        plan = Plan(batches, make_s, nbytes, nodes, LOCAL, step_s=step_s, spread=0.3)
        usual = Simulation(plan, costs).run()
        for drop_slow in (False, True):
            for name, what in FAULTS.items():
                broken = replace(plan, fault=Node(cores, **what), drop_slow=drop_slow)
                found = Simulation(broken, costs).run()
                yield {
                    "simulated": "fault",
                    "fault": name,
                    "cores": cores,
                    "drop_slow": drop_slow,
                    "lost_s": sum(found.waits) - sum(usual.waits),
                    "longest_s": max(found.waits[1:]),
                    "twice": found.made - batches,
                }


def slow_nodes(costs: Costs) -> Iterator[Line]:
    """A training loop that takes batches as fast as they come, from nodes of which one is slow."""
    for n in (2, 4, 16):
        batches, nodes = 40 * NODE_CORES * n, (Node(NODE_CORES),) * n
        plan = Plan(batches, 0.5, 8 << 10, nodes, LOCAL, spread=0.1)
        without = Simulation(replace(plan, nodes=nodes[1:]), costs).run().rate(batches // 3)
        for times in SLOWNESS:
            for drop in (False, True):
                fault = Node(NODE_CORES, times)
                found = Simulation(replace(plan, fault=fault, drop_slow=drop), costs).run().rate(batches // 3)
                yield {"simulated": "slow", "nodes": n, "times": times, "drop_slow": drop, "share": found / without}


def simulated(lines: list[Line]) -> Iterator[Line]:
    """All that the model is asked, with costs from measured lines."""
    costs = fitted(lines)
    yield {"simulated": "costs", **asdict(costs)}
    for line in compared(lines):
        yield {"simulated": "compared", **line}
    beyond = network(lines)
    yield {"simulated": "network", **asdict(beyond)}
    for ask in (more_nodes, more_ranks, faults, slow_nodes):
        yield from ask(beyond)


# -- tables


def rows(head: str, body: Iterable[Iterable[object]]) -> str:
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns, *("| " + " | ".join(map(str, row)) + " |" for row in body)]
    return "\n".join(lines)


def seconds(s: float) -> str:
    """With two digits and a unit."""
    for unit, size in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if s < {"us": 1e-3, "ms": 1.0, "s": 120.0, "min": 7200.0, "h": math.inf}[unit]:
            return f"{s / size:.2g} {unit}" if s < 100 * size else f"{s / size:.0f} {unit}"
    raise AssertionError


def of(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line.get("simulated") == kind]


def costs_table(lines: list[Line]) -> str:
    c = of(lines, "costs")[0]
    return rows(
        "what | takes",
        [
            ("a call and its answer, of the training thread, 8 in flight", seconds(c["call_s"])),
            ("a batch: its indices, order, delivery, of the training thread", seconds(c["batch_s"])),
            ("an answer over 100 KB: object stores", seconds(c["object_s"])),
            ("and each MB of it", seconds(c["wire_s"] * 1e6)),
            ("a MB out of the object store into a slot, of the training thread", seconds(c["copy_s"] * 1e6)),
        ],
    )


def compared_table(lines: list[Line]) -> str:
    body = []
    for x in of(lines, "compared"):
        n, slow = nodes_of(x["run"])
        name = f"{n} node{'s' * (n > 1)}, " + (x["run"] if x["run"] in SIZES else "sleeping")
        name += f", one of them {slow:g} times as long" if slow != 1 else ""
        off = x["model"] / x["measured"] - 1
        spread = f"{min(x['spread']):,.0f} to {max(x['spread']):,.0f}"
        body.append((name, f"{x['measured']:,.1f}", spread, f"{x['model']:,.1f}", f"{off:+.0%}"))
    return rows("run | measured, batches/s | rounds | model | off by", body)


def consumer_table(lines: list[Line]) -> str:
    """The training thread's cost of a batch that a node made, by its size."""
    c, body = of(lines, "network")[0], []
    for nbytes, name in ((4 << 10, "4 KB"), (1 << 20, "1 MB"), (64 * 150_528, "9.6 MB"), (64 << 20, "64 MB")):
        pack = max(1, min(MOST_PACKED, PACK_BYTES // nbytes))
        each = [c["call_s"] / n + c["batch_s"] + nbytes * c["copy_s"] for n in (1, pack)]
        nic = SHARE * NIC / nbytes
        body.append((name, seconds(each[0]), seconds(each[1]), f"{1 / each[1]:,.0f}", f"{nic:,.0f}"))
    return rows("batch | one a call | packed | batches/s, one driver at most | one NIC of 25 Gbit/s", body)


def nodes_table(lines: list[Line]) -> str:
    found, body = of(lines, "nodes"), []
    for n in NODE_COUNTS[:5] + NODE_COUNTS[-1:]:
        row: list[str] = [str(n)]
        for work in WORK:
            for gather in (False, True):
                if gather and PACK_BYTES // WORK[work][0] < 2:
                    continue
                (x,) = (x for x in found if (x["nodes"], x["work"], x["gather"]) == (n, work, gather))
                bound = max(("driver", x["driver"]), ("transfer", x["wire"]), key=lambda b: b[1])
                full = x["rate"] / x["cores"]
                row.append(f"{x['rate']:,.0f} ({full:.0%}{f', {bound[0]}' if bound[1] > 0.9 and full < 0.9 else ''})")
        body.append(row)
    return rows("nodes of 16 cores | text, one task a call | text, calls filled | pictures", body)


def ranks_table(lines: list[Line]) -> str:
    by = {(x["ranks"], (x["spread"], x["ahead"])): x["waiting"] for x in of(lines, "ranks")}
    body = [(f"{n:,}", *(f"{by[n, varied]:.1%}" for varied in VARIED)) for n in RANK_COUNTS]
    return rows("ranks, waiting at | " + " | ".join(f"spread {s}, {a} ahead" for s, a in VARIED), body)


def faults_table(lines: list[Line]) -> str:
    by = {(x["fault"], x["cores"], x["drop_slow"]): x for x in of(lines, "fault")}
    body = []
    for name in FAULTS:
        row = [name]
        for cores in (NODE_CORES, 4 * NODE_CORES):
            for drop in (False, True):
                x = by[name, cores, drop]
                row.append(f"{x['lost_s']:.1f} s, {x['longest_s']:.1f} s")
        body.append(row)
    return rows(
        "one of four nodes | 16 cores, asked as others | left alone | 64 cores, asked as others | left alone",
        body,
    )


def slow_table(lines: list[Line]) -> str:
    by = {(x["nodes"], x["times"], x["drop_slow"]): x["share"] for x in of(lines, "slow")}
    cases = [(times, drop) for times in SLOWNESS for drop in (False, True)]
    body = [(n, *(f"{by[(n, *case)]:.0%}" for case in cases)) for n in (2, 4, 16)]
    return rows(
        "nodes, one of them | " + " | left alone | ".join(f"{t:g} times as slow" for t in SLOWNESS) + " | left alone",
        body,
    )


def shuffle_table(lines: list[Line]) -> str:
    """What was measured, and ten billion: linear in the largest measured."""
    n, body = LENGTHS[-1], []
    body.append((f"torch, 10^{round(math.log10(n))}", seconds(best(lines, "drawn_s", randperm=n)), gb(8 * n), ""))
    each = best(lines, "drawn_s", randperm=n) / n
    listed = best(lines, "list_s", randperm=LENGTHS[1]) / LENGTHS[1]
    body.append(("torch, 10^10, extrapolated", f"over {seconds(each * SAMPLES)}", gb(8 * SAMPLES), ""))
    more = f"over {seconds((each + listed) * SAMPLES)}"
    body.append(("torch's DistributedSampler, 10^10, extrapolated", more, gb((8 + 40) * SAMPLES), ""))
    begin, index = (best(lines, key, feistel=SAMPLES) for key in ("begin_s", "index_s"))
    body.append(('`shuffle="feistel"`, 10^10', seconds(begin + 4096 * index), "under 1 MB", seconds(64 * index)))
    return rows("order of an epoch | to its first index | memory of each rank | then, for 64 indices", body)


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3g} GB"


def states_table(lines: list[Line]) -> str:
    body = []
    for draws in (False, True):
        took, text, pickled = (best(lines, key, draws=draws) for key in ("state_s", "json", "pickle"))
        name = "draws random numbers" if draws else "draws none"
        body.append((name, seconds(took), f"{text / 1e3:.1f} KB", f"{pickled / 1e3:.1f} KB"))
    return rows("10^10 samples, the script between two batches | `state_dict()` | as JSON | pickled", body)


TABLES = {
    "costs": costs_table,
    "compared": compared_table,
    "consumer": consumer_table,
    "nodes": nodes_table,
    "ranks": ranks_table,
    "faults": faults_table,
    "slow": slow_table,
    "shuffle": shuffle_table,
    "states": states_table,
}
