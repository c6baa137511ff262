"""What one process waits for, by its system call: real processes, each in one kind of wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.diagnosis.hang import proc, waits

from .helpers import running, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

BEGIN = "import os, fcntl, select, socket, subprocess, sys, threading, time; print('there', flush=True); "
# What the process does, the kind of the wait, and a part of the text.
WAITS = {
    "sleep": ("time.sleep(1e6)", "sleep", "sleeps for another 1,000,000 s"),
    "lock": ("k = threading.Lock(); k.acquire(); k.acquire()", "lock", "waits for a lock"),
    "read": ("r, w = os.pipe(); os.read(r, 1)", "pipe", "waits for a pipe"),
    "write": ("r, w = os.pipe(); os.write(w, bytes(1 << 20))", "pipe", "writes to a pipe"),
    "poll": ("r, w = os.pipe(); p = select.poll(); p.register(r, 1); p.poll()", "pipe", "waits for a pipe"),
    "select": ("r, w = os.pipe(); select.select([r], [], [])", "pipe", "waits for a pipe"),
    "fifo opened": ("open(sys.argv[1])", "fifo", "opens the named pipe {path}"),
    "fifo read": ("os.read(os.open(sys.argv[1], os.O_RDWR), 1)", "fifo", "reads the named pipe {path}"),
    "socket": ("a, b = socket.socketpair(); a.recv(1)", "socket", "waits for a socket"),
    "child": (
        "p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()",
        "child",
        "waits for process",
    ),
}


def wait_of(pid: int) -> waits.Wait:
    process = proc.look(pid)
    assert process is not None
    return waits.wait_of(process, process.main)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", WAITS)
def test_the_kinds_of_waits(name: str, tmp_path: Path) -> None:
    does, kind, text = WAITS[name]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with running("-Ic", BEGIN + does, fifo) as p:
        found = until(lambda: wait_of(p.pid), lambda w: w.kind == kind)
        assert found.kind == kind, found
        assert found.text.startswith(text.format(path=fifo)) or name == "sleep"
        if name in ("read", "poll", "select"):
            process = proc.look(p.pid)
            assert process is not None
            ends = {d.target for d in (process.descriptors or {}).values()}
            assert len(found.reads) == 1
            assert set(found.reads) <= ends
        if name == "child":
            assert p.stdout is not None
            assert found.pid == int(p.stdout.readline())


def test_what_a_thread_does_is_read_at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    read = proc._read
    went_on: list[bool] = []
    with running("-Ic", BEGIN + "sys.stdin.readline(); time.sleep(1e6)") as p:
        until(lambda: wait_of(p.pid), lambda w: w.kind == "pipe")

        def read_late(path: Path) -> str:
            if path.name == "wchan" and not went_on:  # the other files of the thread have been read
                went_on.append(True)
                assert p.stdin is not None
                p.stdin.write("\n")
                p.stdin.flush()
                until(lambda: read(path), lambda function: "nanosleep" in function)
            return read(path)

        monkeypatch.setattr(proc, "_read", read_late)
        assert wait_of(p.pid).kind == "sleep"


def test_a_sleep_says_how_long_it_takes() -> None:
    with running("-Ic", BEGIN + "time.sleep(1e6)") as p:
        found = until(lambda: wait_of(p.pid), lambda w: w.kind == "sleep")
        assert found.left_s is not None
        assert 999_000 < found.left_s <= 1e6


def test_only_without_a_time_limit_it_is_a_deadlock() -> None:
    twice = "k = threading.Lock(); k.acquire(); k.acquire("
    for limit, dead in (("", True), ("timeout=1000", False)):
        with running("-Ic", BEGIN + twice + limit + ")") as p:
            until(lambda p=p: wait_of(p.pid), lambda w: w.kind == "lock")  # type: ignore[misc]
            process = proc.look(p.pid)
            assert process is not None
            assert waits.deadlocked(process) is dead
            left_s = waits.wait_of(process, process.main).left_s
            assert left_s is None if dead else 900 < (left_s or 0) <= 1000


def test_the_lock_on_a_file_and_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    takes = "f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX)"
    with (
        running("-Ic", BEGIN.replace("print(", takes + "; print(") + "input()", path) as a,
        running("-Ic", BEGIN + takes, path) as b,
    ):
        found = until(lambda: wait_of(b.pid), lambda w: w.kind == "file lock")
        assert (found.kind, found.path, found.pid) == ("file lock", str(path), a.pid)


def test_the_other_end_of_a_connection() -> None:
    code = "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); "
    with running("-Ic", BEGIN + code + "print(s.getsockname()[1], flush=True); c.recv(1)") as p:
        assert p.stdout is not None
        port = p.stdout.readline().strip()
        found = until(lambda: wait_of(p.pid), lambda w: w.kind == "socket")
        assert found.text == f"waits for an answer of 127.0.0.1:{port}"


def test_a_process_that_is_stopped_or_gone() -> None:
    with running("-Ic", BEGIN + "os.kill(os.getpid(), 19)") as p:
        assert until(lambda: wait_of(p.pid), lambda w: w.kind == "stopped").kind == "stopped"
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert proc.look(gone.pid) is None


def test_the_file_system_of_a_path() -> None:
    assert proc.file_system(os.getpid(), "/proc/self") == "proc"
    assert proc.file_system(os.getpid(), "/process") != "proc"
