"""Receives what the watched processes of ``stoker run`` report, over a Unix socket in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import socket
import threading
import time
from typing import TYPE_CHECKING

from ..core import private_sockets
from ..core.errors import UsageError
from ..core.types import JsonObject

if TYPE_CHECKING:
    from ..diagnosis.watch.shared_counters import Live

LOOK_S = 0.2  # seconds between checks whether the run has ended, if no event says so
CLOSE_S = 2.0  # seconds to read what processes that outlive the command have sent
MAX_LINE = 16 << 20  # bytes of one snapshot; a longer line is not a snapshot


class _Connection:
    """The connection of one watched process."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.live: Live | None = None  # the process's counters, whose descriptor it sends first
        self.rest = bytearray()  # the beginning of a line that has not arrived completely


class Listener:
    """Collects the latest snapshot of every watched process in ``last``, by process ID. One thread reads all of them.
    Raises UsageError if the socket cannot be created."""

    def __init__(self) -> None:
        self.last: dict[int, JsonObject] = {}
        self._live: dict[int, Live] = {}
        try:
            self.folder, self._server = private_sockets.listen_in_new_folder()  # ranks also use this folder to meet
        except OSError as e:
            raise UsageError(
                f"cannot create a socket in the temporary directory: {e}. Set TMPDIR to another directory"
            ) from e
        self._ending = threading.Event()
        self._server.setblocking(False)
        self._connections: dict[int, _Connection] = {}
        self._thread = threading.Thread(target=self._run, name="stoker_listen", daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if the system allows no more threads."""
        self._thread.start()

    def close(self) -> None:
        """Accepts no new connections, reads old ones to their end (for at most ``CLOSE_S``), and removes the folder."""
        self._ending.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.ident is not None:
            self._thread.join(2 * CLOSE_S)
        self._server.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        until = math.inf
        while self._connections or not self._ending.is_set():
            for fd, _ in poll.poll(1000 * LOOK_S):
                connection = self._connections.get(fd)
                if connection is None:
                    self._accept(poll)
                elif not self._read(connection):
                    poll.unregister(fd)
                    self._connections.pop(fd).socket.close()
            if self._ending.is_set():
                # A process that outlives the command must not delay the report.
                until = min(until, time.monotonic() + CLOSE_S)
                if time.monotonic() >= until:
                    return

    def _accept(self, poll: select.poll) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # out of file descriptors (ulimit -n): the connection waits in the queue
            if self._ending.wait(LOOK_S):
                poll.unregister(self._server)
            return
        connection.setblocking(False)
        self._connections[connection.fileno()] = _Connection(connection)
        poll.register(connection, select.POLLIN)

    def _read(self, connection: _Connection) -> bool:
        """Reads what has arrived. Returns whether more may follow."""
        from ..diagnosis.watch.shared_counters import Live  # see ``run.REPORTING``

        try:
            if connection.live is None:
                _, fds, _, _ = socket.recv_fds(connection.socket, 1, 1)
                connection.live = Live(fds[0])
                os.close(fds[0])
                return True
            data = connection.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except (OSError, IndexError, ValueError):
            return False
        *lines, rest = (connection.rest + data).split(b"\n") if b"\n" in data else [connection.rest + data]
        connection.rest = bytearray(rest)
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut off when its process was killed
                snapshot = json.loads(line)
                self._live[int(snapshot["pid"])] = connection.live
                self.last[int(snapshot["pid"])] = snapshot
        return bool(data) and len(rest) <= MAX_LINE

    def snapshots(self) -> list[JsonObject]:
        """Returns the last snapshot of each process. If it is not final, its counters are updated from shared memory,
        so that a killed process is reported up to its last batch."""
        from ..diagnosis.watch.shared_counters import LIVE

        for pid, snapshot in list(self.last.items()):  # a copy, because the reading thread may add to it
            if not snapshot.get("final"):
                for i, metrics in enumerate(snapshot["loaders"]):
                    for key, value in zip(LIVE, self._live[pid].row(i), strict=True):
                        metrics[key] = type(metrics[key])(max(value, metrics[key]))
        return list(self.last.values())
