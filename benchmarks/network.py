"""Batches from a node behind a slow network: ``python -m benchmarks.network run|table`` (root, ip, tc, stoker[ray]).

Two network namespaces on this machine, a trainer and a node, are joined by a veth pair whose rate ``tc tbf`` limits.
*Bare*: the bytes of a TCP connection between the two, read into memory that is used again. The trainer's own worker
takes three times as long for a batch as the link; what it makes is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from .cluster import SIZES, Kept, from_node, wait_for
from .command import Line, in_turns, main

TRAINER, NODE = "stoker-trainer", "stoker-node"
ADDRESS = {TRAINER: "10.213.0.1", NODE: "10.213.0.2"}
RATES = {"1 Gbit": "1gbit", "4 Gbit": "4gbit"}
SECONDS = 6.0  # of one measurement, about
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def namespaces(rate: str) -> Iterator[None]:
    """Makes both, with the rate of the link between them; removed at the end."""
    remove()
    for name in ADDRESS:
        _run("ip", "netns", "add", name)
    _run("ip", "link", "add", "st0", "netns", TRAINER, "type", "veth", "peer", "name", "st0", "netns", NODE)
    for name, address in ADDRESS.items():
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "st0")
        _run("ip", "-n", name, "link", "set", "st0", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        tbf = ("tbf", "rate", rate, "burst", "512kb", "latency", "50ms")
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "st0", "root", *tbf)
    try:
        yield
    finally:
        remove()


def remove() -> None:
    """Removes what is there of them."""
    for name in ADDRESS:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def one(name: str) -> None:
    """Measures one contestant: ``1 Gbit: 8 MB``, ``1 Gbit: bare``."""
    rate, _, what = name.partition(": ")
    with namespaces(RATES[rate]):
        if what == "bare":
            print(json.dumps({"rate": _in(TRAINER, "tcp")}))
            return
        env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        inside = ("ip", "netns", "exec")
        head = [
            *inside,
            TRAINER,
            *RAY,
            "--head",
            f"--node-ip-address={ADDRESS[TRAINER]}",
            "--port=6379",
            "--num-cpus=1",
        ]
        other = [*inside, NODE, *RAY, f"--node-ip-address={ADDRESS[NODE]}", f"--address={ADDRESS[TRAINER]}:6379"]
        store = f"--object-store-memory={1 << 30}"
        started = []
        try:
            for command in (head, [*other, "--num-cpus=2"]):
                started.append(subprocess.Popen([*command, store], env=env, stdout=subprocess.DEVNULL))
                time.sleep(8)  # ``ray start`` has no sign that it is up; the node would give up otherwise
            print(json.dumps({"rate": _in(TRAINER, "loader", what, RATES[rate])}))
        finally:
            for p in started:
                p.terminate()
            for p in started:
                p.wait(30)


def _in(namespace: str, *args: str) -> float:
    """Runs this module inside of a namespace. Returns the GB/s that it prints."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-W", "ignore", "-m", "benchmarks.network", "inside"]
    env = {**os.environ, "RAY_ADDRESS": f"{ADDRESS[TRAINER]}:6379", "RAY_AUTH_MODE": "disabled"}
    p = subprocess.run([*command, *args], env=env, capture_output=True, text=True, timeout=240)
    if p.returncode:
        raise RuntimeError(p.stderr)
    return float(p.stdout.split()[-1])


def inside(what: str, *args: str) -> None:
    """What runs in a namespace: the trainer's side, or the sender of ``tcp``."""
    if what == "send":
        with socket.create_connection((ADDRESS[TRAINER], 5201)) as s, contextlib.suppress(OSError):
            block = bytes(1 << 20)
            while True:
                s.sendall(block)
    elif what == "tcp":
        print(_tcp())
    else:
        import stoker

        size = SIZES[args[0]]
        n = max(80, int(SECONDS * 5e8 / size))
        here_s = 3 * size * 8 / 1e9 / float(args[1].removesuffix("gbit"))  # else all are made here before one arrives
        options = {"worker_method": "ray", "task_seeds": True, "prefetch_factor": 8, "persistent_workers": True}
        loader = stoker.DataLoader(Kept(n, size, here_s), 1, num_workers=1, **options)
        wait_for(loader, 1)
        print(from_node(loader, size))


def _tcp() -> float:
    with socket.create_server((ADDRESS[TRAINER], 5201)) as server:
        command = ["ip", "netns", "exec", NODE, sys.executable, "-m", "benchmarks.network", "inside", "send"]
        sender = subprocess.Popen(command)
        try:
            connection, _ = server.accept()
            memory, came = bytearray(1 << 20), 0
            began = time.perf_counter()
            while time.perf_counter() - began < SECONDS:
                came += connection.recv_into(memory)
            return came / (time.perf_counter() - began) / 1e9
        finally:
            sender.kill()
            sender.wait()


def measure(rounds: int) -> Iterator[Line]:
    names = [f"{rate}: {what}" for rate in RATES for what in ("bare", *SIZES)]
    yield from in_turns("network", "contestant", names, rounds)


def table(lines: list[Line]) -> str:
    """GB/s by rate of the link and size of a batch."""
    by: dict[str, list[float]] = {}
    for line in lines:
        by.setdefault(line["contestant"], []).append(line["rate"])
    out = ["| link | batch | stoker, GB/s | bare TCP, GB/s | of bare |", "|---|---|---|---|---|"]
    for rate in RATES:
        bare = statistics.median(by[f"{rate}: bare"])
        for size in SIZES:
            got = statistics.median(by[f"{rate}: {size}"])
            out.append(f"| {rate} | {size} | {got:.3f} | {bare:.3f} | {got / bare:.0%} |")
    return "\n".join(out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(*sys.argv[2:])
    else:
        sys.exit(main("network", __doc__, measure, table, one, 2))
