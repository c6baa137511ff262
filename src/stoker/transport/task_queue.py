"""A queue of tasks for any worker: one pipe that all workers read, and memory for indices that exceed a packet.

In packet mode (pipe(2), ``O_DIRECT``) each write is a packet, and each read takes one whole packet. So a free worker
takes the next task while the parent is busy with a model, and a slow sample delays no other task. The end of the pipe
means that there will be no more tasks.
"""

from __future__ import annotations

import functools
import os

import numpy as np

from ..core.errors import TransportError
from .arena import Arena
from .messages import HEADER, INLINE, Kind, Message, Outbox, unpack
from .slots import SlotWriter

PACKET = HEADER.size + INLINE


@functools.cache
def supported() -> bool:
    """Whether the system has pipes in packet mode (Linux 3.4)."""
    try:
        fds = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return False
    for fd in fds:
        os.close(fd)
    return True


class TaskQueue:
    """The parent's side of the queue."""

    def __init__(self) -> None:
        self.fd, write = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)  # the read end of the pipe, for workers
        os.set_blocking(self.fd, False)
        self.outbox = Outbox(write)
        self.memory = Arena()  # holds the indices of large batches, for workers
        self._writer = SlotWriter(self.memory)
        self._ended = False
        self._closed = False

    def put(self, epoch: int, number: int, payload: bytes) -> None:
        """Adds a task. Never blocks. Raises TransportError if there is no memory for the batch's indices."""
        if len(payload) <= INLINE:
            self.outbox.put(Kind.TASK, 0, epoch, number, payload=payload)
            return
        w = self._writer
        if not w.take(len(payload)):
            raise TransportError(f"no memory for the indices of a batch: {len(payload)} bytes pickled")
        assert w.whole is not None
        w.whole[: len(payload)] = np.frombuffer(payload, np.uint8)
        slot = w.slot
        w.sent()
        self.outbox.put(Kind.TASK, 0, epoch, number, slot, len(payload))

    def end(self) -> None:
        """Announces that there will be no more tasks: workers leave once they have taken the remaining ones."""
        self._ended = True
        self.flush()

    @property
    def write_fd(self) -> int | None:
        """The write end of the pipe; None once it is closed."""
        return None if self._closed else self.outbox.fd

    def flush(self) -> bool:
        """Writes records that did not fit into the pipe. Returns True when none is left."""
        done = self.outbox.flush()
        if done and self._ended and not self._closed:
            self._closed = True
            os.close(self.outbox.fd)
        return done

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.outbox.fd)
        os.close(self.fd)


def take(fd: int, memory: Arena) -> Message | None:
    """The worker's side: returns the next task; None at the end of the pipe. Raises BlockingIOError if none waits."""
    packet = os.read(fd, PACKET)
    if not packet:
        return None
    r = unpack(packet)
    if r.slot < 0:
        return r
    offset, _ = memory.location(r.slot)
    payload = os.pread(memory.fd, r.used, offset)
    memory.stamps[r.slot] = 1
    return r._replace(payload=payload)
