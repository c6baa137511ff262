"""Nobody but the user reaches what the processes of a run share: the sockets by which they report and ranks meet."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.core import private_sockets
from stoker.core.metrics import LoaderMetrics
from stoker.diagnosis.watch.watch import ProcessWatch
from stoker.workers import hangs

from .users import LIMIT_S, OTHER, SOURCE, VICTIM, environment, needs, network, out_of, user

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
        assert self.report.exists(), err
        return out

    def attack(self, *before: str, code: str = ATTACK) -> list[str]:
        """The command line of an attacker."""
        reports = os.path.join(self.folder, "reports")
        return [*self.network, *before, sys.executable, "-c", code, str(self.temp), reports]

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


@pytest.mark.slow
def test_another_user_does_not_where_user_namespaces_hide_who_is_who(start: Callable[..., Run]) -> None:
    """In a user namespace that maps no users, each has the id 65534."""
    needs("--user")
    run = start(SCRIPT, "unshare", "--user")
    tried, reached = run.reached_by(*user(OTHER), "unshare", "--user")
    assert tried
    assert not reached
    assert run.reached_by(*user(VICTIM)) == (1, 1)
    run.end()


def test_a_report_that_nobody_received_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more processes connect at once than may wait: the loop does not wait, only its end does."""
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    monkeypatch.setenv("STOKER_RUN", str(folder))
    watch = ProcessWatch()
    watch.loaders["x"] = LoaderMetrics("x")
    watch.send()
    server, is_first = private_sockets.meet(str(folder), private_sockets.REPORTS, 1.0)
    assert is_first
    server.listen(0)
    waiting = [private_sockets.connect(str(folder), private_sockets.REPORTS, 1.0)]
    with server, waiting[0]:
        watch.send()  # there is no place for it
        server.accept()[0].close()
        watch.send()
        with server.accept()[0] as connection:
            received, fds, _, _ = connection_of(connection)
            assert (received, len(fds)) == (b"\n", 1)
            os.close(fds[0])
            assert json.loads(connection.recv(1 << 20))["loaders"][0]["name"] == "x"
    watch.forked()


def connection_of(connection: socket.socket) -> tuple[bytes, list[int], int, object]:
    connection.settimeout(LIMIT_S)
    return socket.recv_fds(connection, 1, 1)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o770, 0o777])
def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    for use in (private_sockets.connect, private_sockets.meet):
        with pytest.raises(PermissionError, match="other users have access to it"):
            use(str(folder), "x", 1.0)  # type: ignore[operator]
    folder.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        private_sockets.meet(str(link), "x", 1.0)


def test_the_folder_of_another_user_is_not_used(temp: Path) -> None:
    """Root may enter any."""
    needs()
    folder = temp / "run"
    folder.mkdir(0o700)
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(PermissionError, match="other users have access to it"):
        private_sockets.meet(str(folder), "x", 1.0)


def test_long_names_of_temp_folders_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder, server = private_sockets.listen_in_new_folder()
    with server, private_sockets.connect(folder, private_sockets.REPORTS, 1.0):
        server.accept()[0].close()


def test_the_folder_of_a_run_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, server = private_sockets.listen_in_new_folder()
    server.close()
    runs, other = private_sockets.listen_in_new_folder()
    (tmp_path / "stoker-mine").mkdir()  # not a run's
    last, server = private_sockets.listen_in_new_folder()
    with server, other:
        assert sorted(map(str, tmp_path.iterdir())) == sorted([runs, last, str(tmp_path / "stoker-mine")])
        assert not os.path.exists(killed)


def test_the_name_of_a_process_that_has_ended_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    server, is_first = private_sockets.meet(str(folder), "x", 1.0)
    other, is_second = private_sockets.meet(str(folder), "x", 1.0)
    assert (is_first, is_second) == (True, False)
    other.close()
    server.close()
    again, is_first = private_sockets.meet(str(folder), "x", 1.0)
    again.close()
    assert is_first


def test_a_server_survives_a_shortage_of_descriptors(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    server, _ = private_sockets.meet(str(folder), "x", 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    with server, ThreadPoolExecutor(1) as pool:
        client = private_sockets.connect(str(folder), "x", 1.0)
        arrived = pool.submit(next, private_sockets.connections(server))
        arrived.result(LIMIT_S).close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
        try:
            waits = private_sockets.connect(str(folder), "x", 1.0)
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            arrived = pool.submit(next, private_sockets.connections(server))
            with pytest.raises(TimeoutError):
                arrived.result(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
        arrived.result(LIMIT_S).close()
        client.close()
        waits.close()


HOSTILE = """
import os, signal, sys
sys.path.insert(0, {source!r})
from stoker.workers import hangs
fd = os.memfd_create(hangs.FILE)
signal.signal(hangs.DUMP_SIGNAL, lambda *_: os.ftruncate(fd, 1 << 42))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_process_that_writes_without_end_is_read_to_a_limit() -> None:
    """``stoker why`` asks processes of anybody, where root does."""
    line = [sys.executable, "-c", HOSTILE.format(source=str(SOURCE))]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            text = hangs.dump(process.pid, hangs.files(process.pid))
        finally:
            process.kill()
    assert 0 < len(text) <= hangs.MAX_BYTES


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
