"""The interpreter that workers are forked from under spawn and forkserver. ``fork_server`` is the parent's side.

It is as clean as any interpreter that these start methods make, and unpickles no user objects. For each message it
forks a worker, and reports when the worker has started and when it has ended. If importing the user's main module
started threads or an accelerator, forking is not safe: then each worker gets its own interpreter, as in torch.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import threading
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from ..core.processes import die_with_parent
from .handover import Fd, Pickled
from .process_main import Ends, main
from .protocol import WorkerSpec

MESSAGE_BYTES = 1 << 16
MAX_FDS = 16


class StartWorker(NamedTuple):
    """Message from parent to fork server. It carries the worker's descriptors; the last one is open while it lives."""

    number: int
    place: int
    worker: int
    shared: bool
    interruptible: bool


class WorkerEvent(NamedTuple):
    """Message from fork server to parent: the "pid" or the "exitcode" of a worker."""

    number: int
    key: str
    value: int | None


def serve(control: Fd, spec: Pickled[WorkerSpec], parent: int) -> None:
    """Starts workers until the parent has closed its end of ``control`` and all workers have ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the parent handles it; workers unblock it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, exit codes would be lost
    if parent:
        die_with_parent(parent)
    gc.freeze()
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # a daemon may not have children; the workers are daemons
    with socket.socket(fileno=control.fd) as link:
        _start_workers(link, spec)


def _start_workers(link: socket.socket, spec: Pickled[WorkerSpec]) -> None:
    method = _start_method()
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    running: dict[int, tuple[int, BaseProcess]] = {}  # by sentinel
    listening = True
    while listening or running:
        for fd, _ in poll.poll():
            if fd in running:
                number, process = running.pop(fd)
                poll.unregister(fd)
                process.join()
                _report(link, WorkerEvent(number, "exitcode", process.exitcode))
                continue
            try:
                message, fds, _, _ = socket.recv_fds(link, MESSAGE_BYTES, MAX_FDS)
            except ConnectionResetError:  # the parent closed its end before it read all reports
                message = b""
            if not message:
                poll.unregister(fd)
                listening = False
                continue
            request: StartWorker = pickle.loads(message)
            process = _start(request, fds, spec, method, link.fileno())
            running[process.sentinel] = request.number, process
            poll.register(process.sentinel, select.POLLIN)
            _report(link, WorkerEvent(request.number, "pid", process.pid))


def _start(request: StartWorker, fds: list[int], spec: Pickled[WorkerSpec], method: str, link: int) -> BaseProcess:
    tasks, results, memory, *shared, alive = (Fd(fd) for fd in fds)
    ends: Ends = tasks, results, memory, (shared[0], shared[1]) if request.shared else None
    to_close = [link] if method == "fork" else []
    args = spec, request.place, request.worker, ends, to_close, os.getpid(), request.interruptible, alive
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=main, args=args, daemon=True)
    process.start()
    for fd in fds:
        os.close(fd)
    return process


def _start_method() -> str:
    """Returns "fork", unless importing the user's main module made that unsafe; then "spawn"."""
    # torch < 2.6 has no torch.accelerator, and is_available() may have initialised the CUDA driver.
    busy = torch.cuda.is_initialized() or (not hasattr(torch, "accelerator") and torch.cuda.is_available())
    return "spawn" if busy or threading.active_count() > 1 else "fork"


def _report(link: socket.socket, report: WorkerEvent) -> None:
    with contextlib.suppress(OSError):  # the parent has gone, or has closed its end
        link.send(pickle.dumps(report))
