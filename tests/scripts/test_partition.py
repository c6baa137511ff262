"""The link between the trainer and a node goes down and comes up again: the same batches. Root, ``ip``, Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import stoker

pytest.importorskip("ray")
pytestmark = [pytest.mark.scripts, pytest.mark.timeout(300)]
TRAINER, NODE = f"stoker-t{os.getpid()}", f"stoker-n{os.getpid()}"
ADDRESS = {TRAINER: "10.213.7.1", NODE: "10.213.7.2"}
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
ROOT = Path(__file__).parents[2]
TRAIN = """
import time
import torch, stoker
from stoker.loader.loader_state import state_of
from stoker_ray.checks import digests
from stoker_ray.nodes import NodeState
from tests.scripts.drawn_loaders import Drawn

dataset, epochs = Drawn(400, 4, 40_000), {}

def ask(what):
    print(what, flush=True)
    assert input() == what

def run(method, happens):
    loader = stoker.DataLoader(dataset, 2, shuffle=True, num_workers=1, worker_method=method, task_seeds=True)
    torch.manual_seed(1)
    out = []
    for epoch in range(2):
        it = iter(loader)
        nodes = state_of(loader).nodes
        while nodes is not None and epoch == 0 and not nodes.with_state(NodeState.READY, NodeState.PROBING):
            time.sleep(0.05)
        for batch in it:
            out.append(str(digests(batch)))
            if happens and len(out) in happens:
                ask(happens[len(out)])
    return out

expected = run("process", {})
assert run("ray", {60: "down", 260: "up"}) == expected
print("same", flush=True)
"""


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[None]:
    try:
        for name in ADDRESS:
            ip("netns", "add", name)
        ip("link", "add", "st0", "netns", TRAINER, "type", "veth", "peer", "name", "st0", "netns", NODE)
        for name, address in ADDRESS.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "st0")
            ip("-n", name, "link", "set", "st0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no network namespaces here: {getattr(e, 'stderr', '') or e}")
    try:
        yield
    finally:
        for name in ADDRESS:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def inside(name: str, *command: object) -> list[str]:
    return ["ip", "netns", "exec", name, *map(str, command)]


def listens(port: int) -> bool:
    command = inside(TRAINER, "bash", "-c", f"echo > /dev/tcp/{ADDRESS[TRAINER]}/{port}")
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def end(p: subprocess.Popen[str]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(p.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    p.kill()
    p.wait()


def test_a_partition_changes_nothing(namespaces, tmp_path):
    folder = tempfile.mkdtemp(prefix="st")  # the path of a socket may have 107 characters
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{ADDRESS[TRAINER]}:6379"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(stoker.__file__).parents[1]), str(ROOT)])
    started: list[subprocess.Popen[str]] = []
    store = f"--object-store-memory={300 << 20}"
    with (tmp_path / "log").open("w") as log:

        def start(name: str, *more: str) -> None:
            command = inside(name, *RAY, f"--node-ip-address={ADDRESS[name]}", "--num-cpus=2", store, *more)
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True))

        try:
            start(TRAINER, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}")
            deadline = time.monotonic() + 60
            while not listens(6379):
                assert time.monotonic() < deadline
            start(NODE, f"--address={ADDRESS[TRAINER]}:6379")
            train = inside(TRAINER, sys.executable, "-W", "ignore", "-c", TRAIN)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            p = subprocess.Popen(train, env=env, **pipes)  # type: ignore[call-overload]
            started.append(p)
            said = []
            for line in p.stdout:
                said.append(line.strip())
                if said[-1] in ("down", "up"):
                    ip("-n", NODE, "link", "set", "st0", said[-1])
                    p.stdin.write(line)
                    p.stdin.flush()
            assert said == ["down", "up", "same"]
            assert p.wait(60) == 0
        finally:
            for one in reversed(started):
                end(one)
            shutil.rmtree(folder, ignore_errors=True)
