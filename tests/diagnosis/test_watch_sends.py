"""What a watched process sends to ``stoker run``, which may be stopped, slow, or gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from stoker.core import private_sockets
from stoker.core.metrics import LoaderMetrics
from stoker.diagnosis.watch.watch import ProcessWatch

SENDS = 300  # each of a second, if it waited
LIMIT_S = 60.0


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    folder, server = private_sockets.listen_in_new_folder()
    monkeypatch.setenv("STOKER_RUN", folder)
    with server:
        server.listen(1)
        server.settimeout(LIMIT_S)
        yield server
    shutil.rmtree(folder)


@pytest.fixture
def watch(listener: socket.socket) -> ProcessWatch:
    watch = ProcessWatch()
    watch.loaders["a"] = LoaderMetrics("a", decisions=["x" * 300_000])  # more than a socket takes at once
    return watch


def send_often(watch: ProcessWatch) -> None:
    def send() -> None:
        for _ in range(SENDS):
            watch.send()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_command_that_is_stopped_does_not_slow_the_script(listener: socket.socket, watch: ProcessWatch) -> None:
    """Once it goes on, it gets whole lines, and the last one."""
    send_often(watch)
    connection, _ = listener.accept()
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.extend(connection.makefile("rb")))
    reader.start()
    watch.send(final=True)
    assert watch._socket is not None
    watch._socket.close()
    reader.join(LIMIT_S)
    connection.close()
    snapshots = [json.loads(line) for line in lines if line.strip()]
    assert [s["final"] for s in snapshots] == [False, True]


def test_a_full_queue_of_connections_is_tried_again(listener: socket.socket, watch: ProcessWatch) -> None:
    others = []
    error = 0
    while not error:
        others.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        others[-1].setblocking(False)
        error = others[-1].connect_ex(f"{os.environ['STOKER_RUN']}/{private_sockets.REPORTS}")
    send_often(watch)
    assert watch._socket is None
    for _ in others[:-1]:
        listener.accept()[0].close()
    watch.send()
    assert watch._socket is not None
    for other in others:
        other.close()
    watch._socket.close()


def test_a_command_that_has_gone_ends_no_script(listener: socket.socket, watch: ProcessWatch) -> None:
    """Not by SIGPIPE either, where a script has set its default action again."""
    watch.loaders["a"].decisions.clear()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        watch.send()
        listener.accept()[0].close()
        listener.close()
        watch.send()
        watch.send(final=True)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert watch._socket is None
