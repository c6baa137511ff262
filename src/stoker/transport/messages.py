"""Messages on pipes between parent and workers, without feeder threads or locks between processes.

A message (``Message``) is a header of ``HEADER.size`` bytes and at most ``INLINE`` bytes of payload. Together they stay
within ``PIPE_BUF``, so a write is all or nothing (pipe(7), "PIPE_BUF"), even on a non-blocking pipe. A longer payload
is sent as several records, all but the last marked ``MORE``; that happens only if no slot was free.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from ..core.errors import TransportError

HEADER = struct.Struct("<BBHIiIqqqqqqq")
INLINE = min(getattr(select, "PIPE_BUF", 512), 4096) - HEADER.size
READ_BYTES = 1 << 14  # per read: a few of the longest records, or more than a hundred common ones
PIPE_BYTES = 1 << 20  # size for a pipe that proved too small at 64 KB; Linux's default upper limit


class Kind(enum.IntEnum):
    """The meaning of a record."""

    TASK = 1  # parent to worker: fetch these indices
    RESUME = 2  # parent to worker: a new epoch begins, rebuild the fetcher
    STOP = 3  # parent to worker: leave
    BATCH = 4  # worker to parent: here is the batch (or the error) of a task
    END = 5  # worker to parent: this worker's iterable dataset is exhausted


MORE = 1  # flag: the payload continues in this sender's next record


Times: TypeAlias = tuple[int, int, int, int]
"""Nanoseconds that a worker spent on one task: fetch, collate, transport, CPU of all three."""
NO_TIMES: Times = (0, 0, 0, 0)


class Message(NamedTuple):
    """One message."""

    kind: int  # a ``Kind``
    worker: int  # the worker's place in the pool's table
    epoch: int  # epoch of the task, counted by the parent from 0; wraps at 2**32
    task: int  # number of the task within its epoch
    slot: int = -1  # slot that holds the leaves, or -1
    used: int = 0  # bytes in use in that slot
    # bytes of the codec's meta block: last in the slot's used part or, without a slot, first in ``payload``;
    # 0 with a slot: the block is all of ``payload``
    meta: int = 0
    times: Times = NO_TIMES  # spent on the task
    payload: bytes = b""  # inline bytes


def pack(
    kind: int,
    worker: int,
    epoch: int,
    task: int,
    slot: int = -1,
    used: int = 0,
    meta: int = 0,
    times: Times = NO_TIMES,
    payload: bytes = b"",
) -> list[bytes]:
    """Packs a message into the records that carry it; each is one atomic write. Takes fields instead of a ``Message``,
    which would cost a microsecond per batch on each side."""
    if len(payload) <= INLINE:
        return [HEADER.pack(kind, 0, worker, len(payload), slot, epoch, task, used, meta, *times) + payload]
    records = []
    for at in range(0, len(payload), INLINE):
        part = payload[at : at + INLINE]
        flags = MORE if at + INLINE < len(payload) else 0
        head = HEADER.pack(kind, flags, worker, len(part), slot, epoch, task, used, meta, *times)
        records.append(head + part)
    return records


def unpack(packet: bytes) -> Message:
    """Unpacks a record that ``pack`` made. Raises TransportError if it is not one."""
    kind, _, worker, length, slot, epoch, task, used, meta, *times = HEADER.unpack_from(packet)
    if not 1 <= kind <= 5 or len(packet) != HEADER.size + length:
        raise TransportError(f"not a message: {len(packet)} bytes of kind {kind}")
    payload = packet[HEADER.size :]
    return Message(kind, worker, epoch, task, slot, used, meta, (times[0], times[1], times[2], times[3]), payload)


class Reader:
    """Reads whole records from a pipe into ``ready``, which several readers may share. The caller closes ``fd``."""

    def __init__(self, fd: int, ready: deque[Message] | None = None) -> None:
        self.fd = fd
        self._rest = 0  # bytes of an incomplete record, at the beginning of the memory
        self._parts: dict[int, list[bytes]] = {}
        self._memory = bytearray(READ_BYTES)  # reused: a new 64 KB buffer per os.read makes malloc consolidate
        self.ready: deque[Message] = deque() if ready is None else ready

    def feed(self) -> bool:
        """Reads what is available into ``ready``. Returns False at the end of the pipe. Raises BlockingIOError if a
        non-blocking pipe is empty, and TransportError if the bytes are not a record."""
        buf, at, head = self._memory, 0, HEADER.size
        came = os.readv(self.fd, [memoryview(buf)[self._rest :]])
        if not came:
            return False
        size = self._rest + came
        while size - at >= head:
            fields = HEADER.unpack_from(buf, at)
            kind, flags, worker, length = fields[:4]
            if not 1 <= kind <= 5 or length > INLINE:
                raise TransportError(f"not a message: kind {kind}, {length} bytes")
            end = at + head + length
            if end > size:
                break
            payload = bytes(buf[at + head : end])
            at = end
            if flags & MORE:
                self._parts.setdefault(worker, []).append(payload)
                continue
            if worker in self._parts:
                payload = b"".join([*self._parts.pop(worker), payload])
            slot, epoch, task, used, meta = fields[4:9]
            self.ready.append(Message(kind, worker, epoch, task, slot, used, meta, fields[9:], payload))
        self._rest = size - at
        if at and self._rest:
            buf[: self._rest] = buf[at:size]
        return True


class Outbox:
    """Writes records to one worker without blocking: what does not fit into the pipe waits here. A busy worker does not
    read. If the parent blocked on it while it blocked on a full result pipe, both would wait forever."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.waiting: deque[bytes] = deque()  # what has not been written
        self._lock = threading.Lock()  # a pinning thread flushes while the consumer puts
        os.set_blocking(fd, False)

    def put(
        self, kind: int, worker: int, epoch: int = 0, task: int = 0, slot: int = -1, used: int = 0, payload: bytes = b""
    ) -> None:
        """Sends a record, or keeps it for ``flush``. Drops it if the worker has ended."""
        records = pack(kind, worker, epoch, task, slot, used, payload=payload)
        with self._lock:
            if self.waiting:
                self.waiting.extend(records)
                return
            for i, record in enumerate(records):
                try:
                    os.write(self.fd, record)
                except BlockingIOError:
                    with contextlib.suppress(OSError):  # beyond the user's limit for pipes the outbox holds the rest
                        fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                    self.waiting.extend(records[i:])
                    return
                except BrokenPipeError:
                    return

    def flush(self) -> bool:
        """Writes waiting records. Returns True when none is left."""
        if not self.waiting:
            return True
        with self._lock:
            while self.waiting:
                try:
                    os.write(self.fd, self.waiting[0])
                except BlockingIOError:
                    return False
                except BrokenPipeError:
                    self.waiting.clear()
                    return True
                self.waiting.popleft()
        return True


def send(fd: int, records: Iterable[bytes]) -> None:
    """Writes the records of a message to a blocking pipe."""
    for record in records:
        os.write(fd, record)
