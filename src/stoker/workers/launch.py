"""Starts one worker process: forks it from this process or, under spawn and forkserver, from a fork server."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.popen_fork  # else imported when the first worker starts, delaying the first batch
import os
import signal
import threading
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import TYPE_CHECKING, cast

from ..core import processes
from ..core.errors import UsageError, WorkerDiedError
from ..core.filesystems import opened
from ..core.object_tree import is_filesystem
from ..core.warn import warn_user
from ..transport.slots import own_fork
from ..transport.task_queue import TaskQueue
from . import signals
from .can_start import can_start_elsewhere
from .fork_lock_detector import ForkLockDetector
from .handover import Fd
from .process_main import Ends, main
from .protocol import ProcessContext, WorkerSpec
from .worker_handle import WorkerHandle

if TYPE_CHECKING:
    from .fork_server import ForkServer

SHORTAGES = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # too few processes, descriptors, or memory
OPEN_LATER = "Open it in __getitem__ when the first sample is loaded,"
DESCRIPTORS_OF_A_FORK = 4  # checked beforehand: multiprocessing leaks some if it runs out of them half-way


class Launcher:
    """Starts the worker processes of one pool."""

    def __init__(self, context: ProcessContext | ModuleType, spec: WorkerSpec) -> None:
        if not processes.starts_processes(context):  # a worker ends its process and sets signal handlers
            raise UsageError(f"{type(context).__name__} does not start processes by fork, spawn or forkserver")
        self._context, self._spec = context, spec
        self._owner = os.getpid()
        # the interpreter that workers are forked from; None if this process forks them
        self.fork_server: ForkServer | None = None
        # finds workers that are deadlocked since they were forked; None if this process does not fork
        self.fork_locks = ForkLockDetector() if processes.method_of(context) == "fork" else None
        if self.fork_locks is not None:
            self._look_for_open_files()

    def _look_for_open_files(self) -> None:
        """Switches to a fork server if forked workers would hang on an open filesystem or file; if it cannot, warns."""
        path, file = next(((p, x) for p, x in opened(self._spec.dataset) if not is_filesystem(x)), ("", None))
        if not path:
            return  # a worker reopens filesystems
        text = (
            f"{path} is an open fsspec {type(file).__name__}, and the thread that serves it does not exist in a "
            "forked worker."
        )
        if can_start_elsewhere((self._spec.dataset, self._spec.collate_fn, self._spec.init_fn)):
            warn_user(
                f"{text} Workers are started by forkserver. {OPEN_LATER} so that workers can be forked, which is "
                "faster."
            )
            self.stop_forking()
        else:
            needs = 'everything a worker needs can be pickled and the script\'s code is under if __name__ == "__main__"'
            warn_user(f"{text} The worker will wait forever. {OPEN_LATER} or make sure that {needs}.")

    def start(
        self, worker: WorkerHandle, tasks: int, results: int, queue: TaskQueue | None, pipes: list[int]
    ) -> BaseProcess:
        """Starts a worker. ``tasks`` and ``results`` are its ends of its pipes; ``pipes`` are the parent's ends of all
        pipes, which a forked worker closes."""
        method = processes.method_of(self._context)
        # PR_SET_PDEATHSIG follows the thread that forked, and any but the main thread may end before the workers do.
        known = method != "forkserver" and threading.current_thread() is threading.main_thread()
        parent = self._owner if known else 0
        interruptible = signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        memory = worker.reader.arena.fd
        if method in ("spawn", "forkserver"):
            fds = [tasks, results, memory]
            fds += [queue.fd, queue.memory.fd] if queue is not None else []
            server = self._running_fork_server(parent)
            remote = server.start(worker.place, worker.id, fds, queue is not None, interruptible)
            return cast(BaseProcess, remote)  # it has every attribute that is used
        shared = None if queue is None else (Fd(queue.fd), Fd(queue.memory.fd))
        ends: Ends = Fd(tasks), Fd(results), Fd(memory), shared
        to_close = pipes if method == "fork" else []
        args = self._spec, worker.place, worker.id, ends, to_close, parent, interruptible
        process = self._context.Process(target=main, args=args)
        process.daemon = True
        _check_descriptors(DESCRIPTORS_OF_A_FORK, tasks)
        with own_fork(), signals.waits() if method == "fork" else contextlib.nullcontext():
            process.start()
        return process

    def _running_fork_server(self, parent: int) -> ForkServer:
        reason = self.failure()
        if reason:
            raise WorkerDiedError(f"Cannot start a worker: {reason}.", [], [])
        if self.fork_server is None or self.fork_server.killed:
            from .fork_server import ForkServer

            self.close(0.0)
            self.fork_server = ForkServer(self._context, self._spec, parent)
        return self.fork_server

    def failure(self) -> str:
        """Says why no more workers can be started; "" while they can."""
        return "" if self.fork_server is None else self.fork_server.failure()

    def stop_forking(self) -> None:
        """Starts workers from a fork server from now on. Those already forked are still checked."""
        assert self.fork_locks is not None
        self.fork_locks.closed = True
        self._context = multiprocessing.get_context("forkserver")

    def close(self, leave_s: float) -> None:
        """Ends the fork server, once its workers have gone."""
        if self.fork_server is not None:
            self.fork_server.close(leave_s)


def _check_descriptors(n: int, fd: int) -> None:
    """Raises OSError unless ``n`` more descriptors can be opened. ``fd``: any open descriptor."""
    with contextlib.ExitStack() as copies:
        for _ in range(n):
            copies.callback(os.close, os.dup(fd))
