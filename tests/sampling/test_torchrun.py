"""Runs under torchrun that die, are restarted, and go on with another number of ranks: each sample is seen once."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

import stoker
from tests.helpers import LIMIT_S

SCRIPT = Path(__file__).with_name("elastic.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def samples() -> list[int]:
    from .elastic import N  # which loads torch's launcher and checkpoints

    return list(range(N))


def environment() -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(Path(stoker.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo meets the addresses of before the restart (torch 2.13)
    return env


def torchrun(folder: Path, ranks: int, *arguments: str) -> list[int]:
    """What the run has seen at its end."""
    command = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1", str(SCRIPT), str(folder)]
    p = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert p.returncode == 0, p.stderr[-4000:]
    written = folder / ("stopped" if "--stop" in arguments else "over")
    seen, worlds = written.read_text().split(" ")
    assert int(worlds.split(",")[-1]) == ranks
    return [int(i) for i in seen.split(",")]


def test_a_rank_dies_and_then_the_number_of_ranks_changes(tmp_path: Path) -> None:
    """From 2 to 3 here; all pairs of numbers, in one process, are those of test_ranks.py."""
    begun = torchrun(tmp_path, 2, "iterable", "dcp", "--stop", "4", "--die", "2")
    assert len(begun) == 2 * 3 * (1 + 4)  # a checkpoint, a death, and from there four steps
    assert sorted(torchrun(tmp_path, 3, "iterable", "dcp")) == samples()


def test_a_node_comes_and_is_killed(tmp_path: Path) -> None:
    """The run goes from one rank to two and back, restarted by torchrun itself."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    quick = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    nodes = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "5",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "a",
    ]
    meet = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", quick, "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, *meet, str(SCRIPT), str(tmp_path), "map", "file"]

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen([*command, "--hold"], env=environment(), stderr=log, start_new_session=True)

    def wait_for(name: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not (tmp_path / name).exists():
            assert first.poll() is None, (tmp_path / "log").read_text()[-4000:]
            assert time.monotonic() < until, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.05)

    first = start()
    second = None
    try:
        wait_for("held-1")
        second = start()
        wait_for("held-2")
        kill_all(second)
        assert first.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()[-4000:]
    finally:
        for agent in filter(None, (first, second)):
            kill_all(agent)
            agent.wait()
    seen, worlds = (tmp_path / "over").read_text().split(" ")
    counts = Counter(map(int, seen.split(",")))
    assert worlds[0] == "1"
    assert "2" in worlds
    assert worlds[-1] == "1"
    assert sorted(counts) == samples()
    assert sum(counts.values()) - len(counts) <= 1


def kill_all(agent: subprocess.Popen[bytes]) -> None:
    """Kills an agent of torchrun with its ranks and their workers, as a node that is switched off."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(agent.pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
