"""A script under ``stoker run`` where the system is short of something that it does not need itself."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stoker.commands.listener import Listener
from stoker.core import private_sockets
from stoker.diagnosis.watch.shared_counters import Live

from .helpers import LIMIT_S, script

BODY = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.full((8,), float(i))

for epoch in range(2):
    print(epoch, sum(float(x.sum()) for x in DataLoader(Data(), batch_size=8)), flush=True)
raise SystemExit(3)
"""


def outcome(tmp_path: Path, line: list[str], **kw: Any) -> tuple[int, str]:
    p = subprocess.run(line, cwd=tmp_path, text=True, capture_output=True, timeout=LIMIT_S, **kw)
    assert "Traceback" not in p.stderr, p.stderr
    return p.returncode, p.stdout


@pytest.mark.slow
def test_few_descriptors(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (18, 18))

    path = str(script(tmp_path, BODY))
    plain = outcome(tmp_path, [sys.executable, path], preexec_fn=limit)
    assert plain[0] == 3
    assert outcome(tmp_path, [sys.executable, "-m", "stoker", "run", "--apply", path], preexec_fn=limit) == plain


def may_unmount() -> bool:
    tool = shutil.which("unshare")
    return bool(tool) and subprocess.run([str(tool), "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_unmount(), reason="needs the right to unmount /proc")
def test_no_proc(tmp_path: Path) -> None:
    bare = ["unshare", "-m", "sh", "-c", 'umount -l /proc; exec "$@"', "sh", sys.executable]
    path = str(script(tmp_path, BODY))
    plain = outcome(tmp_path, [*bare, path])
    assert plain[0] == 3
    assert outcome(tmp_path, [*bare, "-m", "stoker", "run", "--apply", path]) == plain
    assert json.loads((tmp_path / "stoker-report.json").read_text())["loaders"]


@pytest.mark.slow
def test_no_more_threads(tmp_path: Path) -> None:
    """In the command and in the script. ``ulimit -u`` would count what else the user runs, and not hold for root."""
    refuse = """
        import threading
        def refuse(thread):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = refuse
    """
    path = script(tmp_path, refuse, name="sitecustomize.py").with_name("train.py")
    path.write_text(BODY)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    plain = outcome(tmp_path, [sys.executable, str(path)], env=env)
    assert plain[0] == 3
    assert outcome(tmp_path, [sys.executable, "-m", "stoker", "run", "--apply", str(path)], env=env) == plain


def connected(listener: Listener) -> tuple[socket.socket, Live]:
    connection, live = private_sockets.connect(listener.folder, private_sockets.REPORTS, LIMIT_S), Live()
    socket.send_fds(connection, [b"\n"], [live.fd])
    return connection, live


def test_one_thread_reads_what_all_processes_send() -> None:
    """In pieces, in turns, with junk in between; and what came last, when the command has ended."""
    listener = Listener()
    before = threading.active_count()
    listener.start()
    made = [connected(listener) for _ in range(20)]
    assert threading.active_count() == before + 1
    for step in range(3):
        lines = [json.dumps({"pid": pid, "step": step, "pad": "x" * 70_000}).encode() for pid in range(20)]
        for at in range(0, len(lines[0]) + 40_000, 40_000):
            for (connection, _), line in zip(made, lines, strict=True):
                connection.sendall(line[at : at + 40_000])
        for connection, _ in made:
            connection.sendall(b"\n{]\n\n")
    stranger = private_sockets.connect(listener.folder, private_sockets.REPORTS, LIMIT_S)
    stranger.sendall(b"no descriptor comes with this")
    for connection, _ in made:
        connection.sendall(b'{"pid": 99, "half')
        connection.close()
    listener.close()
    assert {pid: last["step"] for pid, last in listener.last.items()} == dict.fromkeys(range(20), 2)
    stranger.close()


def test_counters_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    live = Live()
    live.row(3)[0] = 1.0
    assert live.fd == -1
    assert live.row(3)[0] == 1.0
