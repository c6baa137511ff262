"""Starts workers under spawn and forkserver: forks them from one fresh interpreter that has imported torch.

The dataset is pickled once for any number of workers, and importing torch, about a second of processor time, is paid
once. CPython's forkserver with torch preloaded (``multiprocessing.set_forkserver_preload``) does the same, but this
one ends with its workers and has no socket in the file system.

1. ``ForkServer.start`` sends a ``StartWorker`` message with the worker's descriptors, and returns a ``RemoteProcess``.
2. ``fork_server_main.serve``, in the fork server, forks the worker and sends its pid, later its exit code.
3. ``RemoteProcess`` looks like a ``multiprocessing.Process``. A pipe whose other end the worker holds shows when the
   worker has ended; ``ForkServer.ask`` waits for pid and exit code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import threading
import weakref
from types import ModuleType

from ..core import processes
from ..core.errors import UsageError
from .fork_server_main import MESSAGE_BYTES, StartWorker, WorkerEvent, serve
from .handover import Fd, Pickled
from .protocol import ProcessContext, WorkerSpec

EXIT_S = 1.0  # how long to wait for the exit code after the process was seen to end


class ForkServer:
    """The parent's side of the interpreter that workers are forked from. Raises TypeError, AttributeError or
    pickle.PicklingError if ``spec`` cannot be pickled, and UsageError if a new process cannot import what it needs."""

    def __init__(self, context: ProcessContext | ModuleType, spec: WorkerSpec, parent: int) -> None:
        self._pickled = Pickled(spec)
        name = self._pickled.interactive_name()
        if name:
            self._pickled.close()
            raise UsageError(
                f"{name} was defined in a notebook or interactive interpreter, so workers started by spawn or "
                f'forkserver cannot import it. Use multiprocessing_context="fork", or move {name} to a file and '
                "import it from there"
            )
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reports: dict[int, dict[str, int | None]] = {}  # by number of the worker
        self._closed_its_end = False  # the server has ended, or is about to
        self._lock = threading.Lock()
        try:
            self.process = context.Process(target=serve, args=(Fd(theirs.fileno()), self._pickled, parent))
            self.process.daemon = True
            self.process.start()
        finally:
            theirs.close()

    def start(self, place: int, worker: int, ends: list[int], shared: bool, interruptible: bool) -> RemoteProcess:
        """Starts a worker. Returns at once; the process starts when the interpreter is ready."""
        number = len(self._reports)
        self._reports[number] = {}
        sentinel, theirs = os.pipe()
        message = pickle.dumps(StartWorker(number, place, worker, shared, interruptible))
        try:
            # If the fork server has ended, the message takes the sentinel's other end with it: the worker looks ended.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [message], [*ends, theirs])
        finally:
            os.close(theirs)
        return RemoteProcess(self, number, worker, sentinel)

    def ask(self, number: int, key: str, timeout: float | None) -> int | None:
        """Waits for the "pid" or the "exitcode" of a worker. Returns None if it does not arrive."""
        with self._lock:
            known = self._reports[number]
            while key not in known:
                if self._socket.fileno() < 0 or not _is_readable(self._socket.fileno(), timeout):
                    return None  # it has been closed, or says nothing
                try:
                    message = self._socket.recv(MESSAGE_BYTES)
                except ConnectionResetError:
                    message = b""
                if not message:
                    self._closed_its_end = True
                    return None
                report: WorkerEvent = pickle.loads(message)
                self._reports[report.number][report.key] = report.value
            return known[key]

    @property
    def killed(self) -> bool:
        """Whether a signal killed it, and its workers with it."""
        return self._has_ended() and (self.process.exitcode or 0) < 0

    def failure(self) -> str:
        """Says how it ended on its own; "" while it runs, or if it was killed: then another can be started."""
        if not self._has_ended() or self.killed:
            return ""
        text = f"the interpreter that workers are forked from ended with exit code {self.process.exitcode}"
        if any("pid" in known for known in self._reports.values()):
            return text
        return (
            f"{text} before it started a worker. It imports the script, so code that iterates the loader must be "
            'under if __name__ == "__main__": everything else runs again under spawn and forkserver'
        )

    def _has_ended(self) -> bool:
        if self._closed_its_end:
            self.process.join(EXIT_S)
        return not processes.alive(self.process)

    def close(self, leave_s: float) -> None:
        """Ends it, once its workers have ended."""
        for number in self._reports:
            self.ask(number, "exitcode", EXIT_S)  # for ``RemoteProcess.exitcode``, later
        self._socket.close()
        self._pickled.close()
        self.process.join(leave_s)
        if processes.alive(self.process):
            self.process.kill()
            self.process.join()


def _is_readable(fd: int, timeout: float | None) -> bool:
    """Waits until a descriptor can be read, or has been closed at its other end."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


class RemoteProcess:
    """A worker process forked by the fork server; looks like ``multiprocessing.Process``."""

    daemon = True

    def __init__(self, server: ForkServer, number: int, worker: int, sentinel: int) -> None:
        self._server = server
        self._number = number
        self.name = f"stoker_worker_{worker}"
        self.sentinel = sentinel
        self._ended = False
        weakref.finalize(self, os.close, sentinel).atexit = False  # in __del__ modules may be gone

    @property
    def pid(self) -> int | None:
        """The process id; waits until there is one. None if the process was never started."""
        return self._server.ask(self._number, "pid", None)

    @property
    def exitcode(self) -> int | None:
        if not self._ended and self.is_alive():
            return None
        return self._server.ask(self._number, "exitcode", EXIT_S)

    def is_alive(self) -> bool:
        return not self._wait(0)

    def join(self, timeout: float | None = None) -> None:
        self._wait(timeout)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> bool:
        self._ended = self._ended or _is_readable(self.sentinel, timeout)
        return self._ended

    def _signal(self, number: int) -> None:
        if not self._wait(0) and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
