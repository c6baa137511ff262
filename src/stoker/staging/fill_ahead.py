"""Processes that make the deterministic parts of coming samples, while a loader's own workers make its batches.

More workers would draw other random numbers. So under ``--apply`` a loader keeps the number of its workers.
Deterministic parts draw nothing, and any process may make them. Helpers store them; the worker finds them in the cache.

::

    the loader draws the indices of a batch   ->  ``FillAhead.ask`` sends them to each helper
    its worker makes the samples from the         each helper makes its share of what nobody has begun to make,
    first one on                                  from the last one on: they meet somewhere

A helper shares no file, pipe or connection with the script, and is no child of it: the script may wait for all of its
children. It ends when its socket is shut down, and when the script's process has ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from torch.utils.data import Subset

from ..core.types import Index, MapDataset
from ..transport.slots import own_fork
from ..workers import native_threads, signals
from ..workers.process_main import set_worker_info
from . import isolate
from .dataset import Staged

REMEMBERED = 256  # batches that were drawn before the helpers started
LEAST_S = 0.3  # of work that is left: less is not worth a process
CHUNK_S = 0.004  # between two looks for messages
MOST_AT_ONCE = 64  # samples
LIMIT_S = 30.0  # for that, as another thread may have held a lock when the helper was forked
NICE = 10  # the script's own work comes first
KINDS = {int: b"i", np.int64: b"n"}  # types of an index, which a sample may depend on
MOST_BYTES = 1 << 17  # of a message
MOST_WAITING = 1 << 17  # samples


class FillAhead:
    """The helpers of one epoch of a loader. ``dataset``: its own, perhaps a subset of the cached one. ``staged``:
    returns that, None while there is none. ``count``: returns the number of helpers, once there is a cache."""

    def __init__(self, dataset: MapDataset, staged: Callable[[], Staged | None], count: Callable[[], int]) -> None:
        self._dataset, self._staged, self._count = dataset, staged, count
        self._drawn: deque[bytes] = deque(maxlen=REMEMBERED)
        self._helpers: list[socket.socket] | None = None  # None: not started
        self._is_closed = False
        self._owner = os.getpid()

    def ask(self, indices: Index) -> None:
        """Has the deterministic parts of a coming batch made."""
        if self._is_closed or os.getpid() != self._owner:
            return
        message = self._message(indices)
        if message and self._helpers is None:
            self._drawn.append(message)
            with contextlib.suppress(OSError):  # too few processes or descriptors
                self._start_if_due()
        elif message:
            self._send(message)

    def close(self) -> None:
        """Ends the helpers, once they have finished a sample."""
        self._is_closed = True
        helpers, self._helpers = self._helpers or [], None
        for mine in helpers:
            if os.getpid() == self._owner:  # not a process that the script has forked
                with contextlib.suppress(OSError):
                    mine.shutdown(socket.SHUT_RDWR)  # also if another process has inherited it
            mine.close()

    def _message(self, indices: Index) -> bytes:
        """Positions in the whole dataset, and their type. Empty for indices that are not plain numbers."""
        dataset: object = self._dataset
        if type(indices) not in (list, tuple):  # looking at an iterator would use it up
            return b""
        try:
            while type(dataset) is Subset:
                own, dataset = dataset.indices, dataset.dataset
                if type(own) not in (list, tuple, range, np.ndarray):
                    return b""
                indices = [own[i] for i in indices]
            kinds = set(map(type, indices))
            kind = KINDS.get(kinds.pop()) if len(kinds) == 1 else None
            message = b"" if kind is None else kind + np.array(indices, np.int64).tobytes()
        except Exception:  # whoever makes the batch raises it
            return b""
        return message if len(message) <= MOST_BYTES else b""

    def _start_if_due(self) -> None:
        """Starts them if something is cached."""
        staged = self._staged()
        if staged is None or not staged.account.filled:
            return
        plan = None if staged.split is None else staged.split.plan
        left = 0 if plan is None else len(staged) - staged.account.filled
        pays = plan is not None and plan.head_s * left >= LEAST_S and staged.may_fill_ahead
        count = self._count() if pays else 0
        if not count:
            self.close()
            return
        self._helpers = []
        for place in range(count):
            self._helpers.append(_started(staged, place, count))
        for message in self._drawn:
            self._send(message)
        self._drawn.clear()

    def _send(self, message: bytes) -> None:
        for mine in self._helpers or ():
            with contextlib.suppress(OSError):  # it is busy with earlier batches, or has ended
                mine.send(message)


def _started(staged: Staged, place: int, count: int) -> socket.socket:
    """Starts a helper. Returns the script's end of its socket. Raises OSError if the system allows none."""
    script = os.pidfd_open(os.getpid())
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setblocking(False)
    try:
        with own_fork(), signals.waits():
            pid = os.fork()
            if pid == 0:
                try:
                    if os.fork() == 0:
                        _main(staged, theirs, script, place, count)
                finally:
                    os._exit(0)
        with contextlib.suppress(ChildProcessError):  # the script ignores SIGCHLD
            os.waitpid(pid, 0)
    except OSError:
        mine.close()
        raise
    finally:
        theirs.close()
        os.close(script)
    return mine


def _main(staged: Staged, tasks: socket.socket, script: int, place: int, count: int) -> None:
    """Runs a helper. ``script``: descriptor of the script's process (pidfd_open(2))."""
    gc.freeze()
    for number in signal.valid_signals():  # the script's handlers are for its own process
        if callable(signal.getsignal(number)):
            ends = number in (signal.SIGTERM, signal.SIGCHLD)
            signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)
    isolate.unshare({tasks.fileno(), script})
    os.nice(NICE)
    native_threads.cap_process()
    set_worker_info(0, 1, 0, staged.stands_for or staged.dataset)
    staged.begin_in_helper()
    with contextlib.suppress(OSError):
        _serve(staged, tasks, script, place, count)


def _serve(staged: Staged, tasks: socket.socket, script: int, place: int, count: int) -> None:
    waiting: list[Index] = []  # the last one comes first: it is needed last, so nobody else makes it now
    poll = select.poll()
    poll.register(tasks, select.POLLIN)
    poll.register(script, select.POLLIN)
    end_after = isolate.deadline()
    chunk = 1
    while True:
        end_after(0.0)
        for fd, _ in poll.poll(0 if waiting else None):
            message = b"" if fd == script else tasks.recv(MOST_BYTES)
            if not message:
                return
            positions = np.frombuffer(message[1:], np.int64)
            indices = positions.tolist() if message[:1] == KINDS[int] else list(positions)
            waiting += indices[::-1][place::count][::-1]
            del waiting[:-MOST_WAITING]
        end_after(LIMIT_S)
        wanted = [waiting.pop() for _ in range(min(chunk, len(waiting)))]
        began = time.monotonic()
        if wanted and not staged.fill_ahead(wanted):
            return
        took = (time.monotonic() - began) / max(1, len(wanted))
        chunk = max(1, min(MOST_AT_ONCE, int(CHUNK_S / max(took, 1e-6))))
