"""Starting workers under spawn and forkserver: one fresh interpreter that has imported torch, workers forked from it.

The dataset is pickled once, whatever the number of workers, and importing torch, a second of CPU, is paid once. The
interpreter is as clean as any that these start methods make, has unpickled nothing of the user's, and does nothing
else: that is what CPython's own forkserver is, with torch preloaded (``multiprocessing.set_forkserver_preload``), but
it ends with its workers and has no socket in the file system. Where the user's main module has started threads or an
accelerator on import, nothing is forked: then each worker is an interpreter of its own, as torch does it.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import socket
import threading
from multiprocessing import context as mp_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from ..core import processes
from . import native_threads
from .process_main import Fd, die_with_parent, main
from .protocol import WorkerSpec

MESSAGE = 1 << 16
EXIT_S = 1.0  # how late an exit code may come after the process' end has been seen

_received: list[int] = []


class _Place:
    """Stands in a pickled object for a descriptor: its place in the list that comes with the object."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        return os.dup(_received[self.place])


class _Collector:
    """What multiprocessing asks for while it pickles arguments (``get_spawning_popen``); keeps every descriptor."""

    DupFd = _Place

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1


class Pickled:
    """An object pickled once for any number of processes, in anonymous shared memory, with the descriptors it holds."""

    def __init__(self, obj: Any) -> None:
        collector: Any = _Collector()
        before = mp_context.get_spawning_popen()
        mp_context.set_spawning_popen(collector)
        self.memory = Fd(os.memfd_create("stoker-spec", os.MFD_CLOEXEC))
        try:
            with open(self.memory.fd, "wb", closefd=False) as file:  # not by way of bytes: a dataset may be large
                ForkingPickler(file).dump(obj)
        except BaseException:
            for fd in (self.memory.fd, *collector.fds):
                os.close(fd)
            raise
        finally:
            mp_context.set_spawning_popen(before)
        self.fds = [Fd(fd) for fd in collector.fds]

    def load(self) -> Any:
        """The object, as a process that was started from here gets it."""
        _received[:] = [fd.fd for fd in self.fds]
        return pickle.loads(mmap.mmap(self.memory.fd, 0, access=mmap.ACCESS_READ))  # a file's offset is everybody's

    def close(self) -> None:
        """Frees memory and descriptors."""
        for fd in (self.memory, *self.fds):
            os.close(fd.fd)


class ForkServer:
    """The parent's side.

    Args:
        context: a multiprocessing context whose start method is spawn or forkserver.
        spec: what every worker gets.
        parent: pid to die with, or 0.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: ``spec`` cannot be pickled.
    """

    def __init__(self, context: Any, spec: WorkerSpec, parent: int) -> None:
        self._pickled = Pickled(spec)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._news: dict[int, dict[str, int]] = {}
        self._started = 0
        self._hung_up = False  # it has gone, or is about to
        self._lock = threading.Lock()
        try:
            self.process = context.Process(target=serve, args=(Fd(theirs.fileno()), self._pickled, parent))
            self.process.daemon = True
            self.process.start()
        finally:
            theirs.close()

    def start(self, place: int, worker: int, ends: list[int], shared: bool, interruptible: bool) -> RemoteProcess:
        """Starts a worker. Returns at once; the process comes when the interpreter is ready."""
        number = self._started
        self._started += 1
        self._news[number] = {}
        sentinel, theirs = os.pipe()
        words = pickle.dumps((number, place, worker, shared, interruptible))
        try:
            # A process that has gone is noticed by its sentinel, whose other end goes with the message.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [words], [*ends, theirs])
        finally:
            os.close(theirs)
        return RemoteProcess(self, number, worker, sentinel)

    def ask(self, number: int, what: str, timeout: float | None) -> int | None:
        """What is known of a worker, waiting for it: its "pid", its "exitcode"."""
        with self._lock:
            known = self._news[number]
            while what not in known:
                if self._socket.fileno() < 0:
                    return None  # it has been closed
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(None if timeout is None else timeout * 1000):
                    return None
                try:
                    message = self._socket.recv(MESSAGE)
                except ConnectionResetError:
                    message = b""
                if not message:
                    self._hung_up = True
                    return None
                about, key, value = pickle.loads(message)
                self._news[about][key] = value
            return known[what]

    @property
    def killed(self) -> bool:
        """Somebody has killed it, and so its workers."""
        return self._has_ended() and (self.process.exitcode or 0) < 0

    def why(self) -> str:
        """How it has ended, where nobody killed it; "" while it runs."""
        if not self._has_ended() or self.killed:
            return ""
        words = f"the interpreter that workers are forked from ended with exit code {self.process.exitcode}"
        if any("pid" in known for known in self._news.values()):
            return words
        return (
            f"{words} before there was any. It imports the script first: what starts the loader has to stand under "
            'if __name__ == "__main__": there, for under spawn and forkserver all else is run once more'
        )

    def _has_ended(self) -> bool:
        if self._hung_up:
            self.process.join(EXIT_S)
        return not processes.alive(self.process)

    def close(self, leave_s: float) -> None:
        """Ends it; its workers have gone."""
        for number in self._news:
            self.ask(number, "exitcode", EXIT_S)  # somebody may want to know later
        self._socket.close()
        self._pickled.close()
        self.process.join(leave_s)
        if processes.alive(self.process):
            self.process.kill()
            self.process.join()


class RemoteProcess:
    """A worker process that is not this process' own child; looks like ``multiprocessing.Process``."""

    daemon = True

    def __init__(self, zygote: ForkServer, number: int, worker: int, sentinel: int) -> None:
        self._zygote, self._number = zygote, number
        self.name = f"stoker_worker_{worker}"
        self.sentinel = sentinel
        self._ended = False

    @property
    def pid(self) -> int | None:
        """Its process id; waits until it has one. None when it never came to be."""
        return self._zygote.ask(self._number, "pid", None)

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        if not self._ended and self.is_alive():
            return None
        return self._zygote.ask(self._number, "exitcode", EXIT_S)

    def is_alive(self) -> bool:
        return not self._wait(0)

    def join(self, timeout: float | None = None) -> None:
        self._wait(timeout)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> bool:
        if not self._ended:
            poll = select.poll()
            poll.register(self.sentinel, select.POLLIN)
            self._ended = bool(poll.poll(None if timeout is None else timeout * 1000))
        return self._ended

    def _signal(self, number: int) -> None:
        if not self._wait(0) and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.sentinel)


def _start_method() -> str:
    """How this interpreter makes workers: by fork, unless importing the user's module made that unsafe."""
    accelerator = getattr(torch, "accelerator", None)
    busy = torch.cuda.is_initialized() or (accelerator is None and torch.cuda.is_available())
    return "spawn" if busy or threading.active_count() > 1 else "fork"


def serve(control: Fd, pickled: Pickled, parent: int) -> None:
    """The interpreter that workers are forked from. Leaves when its parent has closed its end and all workers went."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the parent takes it; workers unblock it
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # ignored by the parent it would be here, and nobody knew an exit code
    if parent:
        die_with_parent(parent)
    gc.freeze()
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # daemons may have no children; these are daemons in its place
    with socket.socket(fileno=control.fd) as link:
        _start_workers(link, pickled)


def _start_workers(link: socket.socket, pickled: Pickled) -> None:
    """Starts a worker for each message, and says when it is there and when it has gone."""
    method = _start_method()
    context = multiprocessing.get_context(method)
    native_threads.look()
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    running: dict[int, tuple[int, Any]] = {}
    listening = True
    while listening or running:
        for fd, _ in poll.poll():
            if fd in running:
                number, worker = running.pop(fd)
                poll.unregister(fd)
                worker.join()
                _tell(link, number, "exitcode", worker.exitcode)
                continue
            try:
                words, fds, _, _ = socket.recv_fds(link, MESSAGE, 16)
            except ConnectionResetError:  # the parent closed its end with news of ours unread
                words = b""
            if not words:
                poll.unregister(fd)
                listening = False
                continue
            number, place, id_, shared, interruptible = pickle.loads(words)
            tasks, results, memory, *board = (Fd(f) for f in fds)
            ends = tasks, results, memory, (board[0], board[1]) if shared else None
            args = (
                pickled,
                place,
                id_,
                ends,
                [link.fileno()] if method == "fork" else [],
                os.getpid(),
                interruptible,
                board[-1],
            )
            worker = context.Process(target=main, args=args, daemon=True)  # type: ignore[attr-defined]
            worker.start()
            for f in fds:
                os.close(f)
            running[worker.sentinel] = number, worker
            poll.register(worker.sentinel, select.POLLIN)
            _tell(link, number, "pid", worker.pid)


def _tell(link: socket.socket, number: int, what: str, value: int) -> None:
    with contextlib.suppress(OSError):  # the parent has gone, or does not want to know any more
        link.send(pickle.dumps((number, what, value)))
