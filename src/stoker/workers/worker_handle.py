"""A worker process, and a batch of it, as the parent sees them."""

from __future__ import annotations

import enum
import select
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import TypeAlias

from ..core.types import Batch
from ..transport.arena import TaskId
from ..transport.codec import decode
from ..transport.messages import Kind, Outbox, Reader, Record
from ..transport.slots import Bytes, SlotReader

LeaseOrCopy: TypeAlias = Callable[[SlotReader, int, int], Bytes]
"""Slot and bytes used to an array for the consumer."""


class Received:
    """A result that has arrived. It is decoded when it is delivered."""

    __slots__ = ("_lease", "_reader", "_record", "ended", "epoch", "nbytes", "task", "times", "worker")

    def __init__(self, lease: LeaseOrCopy, r: Record, reader: SlotReader) -> None:
        self._lease = lease
        self._record = r
        self._reader = reader
        self.worker = r.worker
        self.epoch = r.epoch
        self.task = r.task
        self.times = r.times
        self.ended = r.kind == Kind.END
        self.nbytes = r.used if r.slot >= 0 else len(r.payload)

    def take(self) -> Batch:
        r = self._record
        if r.slot < 0:
            return decode(r.payload[: r.meta], bytearray(r.payload[r.meta :]))
        whole = self._lease(self._reader, r.slot, r.used)
        return decode(whole[r.used - r.meta :].tobytes() if r.meta else r.payload, whole)

    def drop(self) -> None:
        if self._record.slot >= 0:
            self._reader.release(self._record.slot)


class ProcessState(enum.Enum):
    """The life of a worker process, as the parent sees it.

    RUNNING --ends, having been told to leave--> GONE
    RUNNING --ends unexpectedly--> DEAD --another process takes its place--> GONE
    """

    RUNNING = enum.auto()
    DEAD = enum.auto()
    GONE = enum.auto()  # joined, and its pipes are closed


class WorkerHandle:
    """A worker process as its parent sees it.

    Attributes:
        place: its index in the pool's table, which records carry. It is used again when the process is gone.
        id: the worker's id.
        reader: its memory.
        outbox: for its own tasks.
        inbox: its results.
        poll: its results alone.
        state: of its process.
        leaving: it has been told to leave.
        given: tasks that it was given; counted by the thread that submits.
        answered: tasks that it answered; counted by the thread that receives.
        current_task: the task that it was doing when it died.
        timeout_stack: where it was when it was killed because a sample took too long; else "".
    """

    process: BaseProcess

    def __init__(self, place: int, id_: int, reader: SlotReader, outbox: Outbox, inbox: Reader) -> None:
        self.place = place
        self.id = id_
        self.reader = reader
        self.outbox = outbox
        self.inbox = inbox
        self.poll = select.poll()
        self.state = ProcessState.RUNNING
        self.leaving = False
        self.given = 0
        self.answered = 0
        self.current_task: TaskId | None = None
        self.timeout_stack = ""

    @property
    def is_active(self) -> bool:
        """It takes tasks: its process has not ended, and it was not told to leave."""
        return self.state is ProcessState.RUNNING and not self.leaving

    @property
    def is_gone(self) -> bool:
        """Its process has ended, and its pipes are closed."""
        return self.state is ProcessState.GONE
