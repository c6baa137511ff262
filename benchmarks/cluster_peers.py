"""stoker's nodes beside Ray Data and tf.data service: ``python -m benchmarks.cluster_peers run|table``.

The same 1,000 pictures and two nodes for each, all on this machine. ``python -m benchmarks.peers setup ray tf`` makes
the environments of Ray Data and tf.data service; one that is not there is named. What a run does: ``peers/nodes.py``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from .command import ROOT, Line, in_turns, main
from .peers.__main__ import HOME
from .peers.nodes import CONTESTANTS, EPOCHS

LIMIT_S = 280
ENVIRONMENT = {"Ray Data": "ray", "Ray Data, preserve_order": "ray", "tf.data service": "tf"}


def one(name: str) -> None:
    """Measures one contestant, in its environment: a line for each epoch."""
    python = str(HOME / ENVIRONMENT[name] / "bin" / "python") if name in ENVIRONMENT else sys.executable
    if not os.path.exists(python):
        print(json.dumps({"absent": "not installed here"}))
        return
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]) if name == "stoker" else str(ROOT)}
    command = [python, "-W", "ignore", "-m", "benchmarks.peers.nodes", name]
    p = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if p.stdout.count('{"epoch"') < len(EPOCHS):
        raise RuntimeError(p.stderr)
    print(p.stdout)


def measure(rounds: int) -> Iterator[Line]:
    yield from in_turns("cluster_peers", "contestant", CONTESTANTS, rounds)


def table(lines: list[Line]) -> str:
    """Rate and memory of second epochs; order and samples of all epochs, the worst one."""
    out = ["| | samples/s | range | memory, MB | order, each sample once | the same, a worker killed |"]
    out.append("|---|---|---|---|---|---|")
    for name in CONTESTANTS:
        own = [line for line in lines if line["contestant"] == name]
        if not own:
            continue
        if "absent" in own[0]:
            out.append(f"| {name} | absent: {own[0]['absent']} | | | | |")
            continue
        second = [line for line in own if line["epoch"] == EPOCHS[1]]
        rates = [line["rate"] for line in second]
        megabytes = statistics.median(line["memory"] for line in second) / 1e6
        killed = [line for line in own if line["epoch"] == EPOCHS[2] and line["killed"]]
        calm = [line for line in own if line["epoch"] != EPOCHS[2]]
        rate = f"{statistics.median(rates):,.0f} | {min(rates):,.0f}..{max(rates):,.0f}"
        row = f"| {name} {own[0]['version']} | {rate} | {megabytes:,.0f}"
        out.append(f"{row} | {_verdict(calm)} | {_verdict(killed)} |")
    return "\n".join(out)


def _verdict(lines: list[Line]) -> str:
    """Order, and what is missing or came twice; of several epochs the worst."""
    if not lines:
        return "nothing was killed"
    missing, twice = (max(line[key] for line in lines) for key in ("missing", "twice"))
    parts = ["in order" if all(line["in order"] for line in lines) else "not in order"]
    parts.append(", ".join(f"{n:,} {what}" for n, what in ((missing, "missing"), (twice, "twice")) if n) or "each once")
    parts += sorted({line["error"] for line in lines if line["error"]})
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main("cluster_peers", __doc__, measure, table, one, 3))
