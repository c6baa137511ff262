"""Nobody but the user reaches what the processes of a run share: the sockets by which they report and ranks meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .users import LIMIT_S, OTHER, VICTIM, environment, needs, network, out_of, user

SCRIPT = """
import os, sys
print(os.environ["STOKER_RUN"], flush=True)
sys.stdin.readline()
"""
TRAINS = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
print(os.environ["STOKER_RUN"], flush=True)
sys.stdin.readline()
print(sum(len(x) for x, in DataLoader(TensorDataset(torch.arange(64)), batch_size=4)))
"""
# What an attacker tries: all that is known of the run is known to them. They print what they could connect to.
ATTACK = """
import glob, os, socket, sys
temp, *more = sys.argv[1:]
named = [line.split()[-1] for line in open("/proc/net/unix") if "stoker" in line]
tried = {name.replace("@", chr(0), 1) for name in named} | set(glob.glob(temp + "/*/*")) | set(more)
reached = []
for name in tried:
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        reached.append(name)
    except OSError:
        pass
print(len(tried), len(reached))
"""


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    """A temp folder of all users, as /tmp is, where all of them get to it."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    made = tmp_path / "temp"
    made.mkdir()
    made.chmod(0o1777)
    return made


class Run:
    """``stoker run`` of a script that waits for a line, as ``VICTIM``."""

    def __init__(self, temp: Path, network: list[str], script: str, *before: str) -> None:
        self.temp, self.network = temp, network
        self.report = temp / "report.json"
        path = temp / "script.py"
        path.write_text(script)
        path.chmod(0o644)
        line = [*network, *user(VICTIM), *before, sys.executable, "-m", "stoker", "run", "--json", self.report, path]
        self.process = subprocess.Popen(
            list(map(str, line)),
            env=environment(TMPDIR=str(temp)),
            cwd=temp,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.folder = self.process.stdout.readline().strip()
        assert self.folder, self.process.communicate()[1]

    def end(self) -> str:
        """Lets the script go on. Returns what it prints."""
        out, err = self.process.communicate("\n", timeout=LIMIT_S)
        assert self.process.returncode == 0, err
        return out

    def attack(self, *before: str, code: str = ATTACK) -> list[str]:
        """The command line of an attacker."""
        socket = os.path.join(self.folder, "reports")
        return [*self.network, *before, sys.executable, "-c", code, str(self.temp), socket]

    def reached_by(self, *before: str) -> tuple[int, int]:
        """How many sockets an attacker has tried to connect to, and how many answered."""
        tried, reached = map(int, out_of(self.attack(*before)).split())
        return tried, reached


@pytest.fixture
def start(temp: Path) -> Iterator[Callable[..., Run]]:
    needs("--net")
    runs: list[Run] = []
    with network() as own:

        def begin(*args: str) -> Run:
            runs.append(Run(temp, own, *args))
            return runs[-1]

        yield begin
        for run in runs:
            run.process.kill()
            run.process.communicate()


def test_the_user_reaches_the_run(start: Callable[..., Run]) -> None:
    """Else the tests below would show nothing."""
    run = start(SCRIPT)
    assert run.reached_by(*user(VICTIM)) == (1, 1)
    assert oct(os.stat(run.folder).st_mode & 0o777) == "0o700"
    run.end()
    assert not os.path.exists(run.folder)


def test_another_user_does_not(start: Callable[..., Run]) -> None:
    tried, reached = start(SCRIPT).reached_by(*user(OTHER))
    assert tried
    assert not reached


def test_a_container_with_the_same_user_and_network_does_not(start: Callable[..., Run], temp: Path) -> None:
    """It sees the sockets of this machine in /proc/net/unix, and could connect to any abstract one."""
    needs("--mount", "--pid", "--fork")
    tried, reached = start(SCRIPT).reached_by(*user(VICTIM, container=temp))
    assert tried
    assert not reached


def test_another_user_does_not_where_user_namespaces_hide_who_is_who(start: Callable[..., Run]) -> None:
    """In a user namespace that maps no users, each has the id 65534."""
    needs("--user")
    run = start(SCRIPT, "unshare", "--user")
    tried, reached = run.reached_by(*user(OTHER), "unshare", "--user")
    assert tried
    assert not reached
    assert run.reached_by(*user(VICTIM)) == (1, 1)
    run.end()


@pytest.mark.slow
def test_a_flood_by_another_user_leaves_the_report_whole(start: Callable[..., Run]) -> None:
    run = start(TRAINS)
    endless = ATTACK.replace("for name in tried:", "import itertools\nfor name in itertools.cycle(tried):")
    floods = [subprocess.Popen(run.attack(*user(OTHER), code=endless), env=environment()) for _ in range(2)]
    try:
        assert run.end().split() == ["64"]
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()
    (loader,) = json.loads(run.report.read_text())["loaders"]
    assert loader["batches"] == 16
