"""The parent's view of a worker process, and of a batch from it."""

from __future__ import annotations

import enum
import select
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from ..core.types import Batch
from ..transport.arena import TaskId
from ..transport.codec import decode
from ..transport.mapping import Memory
from ..transport.messages import Kind, Message, Outbox, Reader
from ..transport.slots import Bytes, SlotReader
from .faults import exit_reason
from .protocol import Position, Result


class Received(Result):
    """A result that has arrived. It is decoded when it is delivered. ``lease`` turns a slot and the bytes used in it
    into an array for the consumer."""

    __slots__ = ("_lease", "_reader")
    data: Message

    def __init__(self, lease: Callable[[SlotReader, int, int], Bytes], r: Message, reader: SlotReader) -> None:
        nbytes = r.used if r.slot >= 0 else len(r.payload)
        super().__init__(r.worker, r.epoch, r.task, r.kind == Kind.END, r.times, nbytes, r)
        self._lease, self._reader = lease, reader

    def take(self) -> Batch:
        return decode(*self.encoded())

    def encoded(self) -> tuple[bytes, Memory]:
        """Returns the arguments of ``codec.decode`` instead of the batch. May be called only once."""
        r = self.data
        if r.slot < 0:
            return r.payload[: r.meta], bytearray(r.payload[r.meta :])
        whole = self._lease(self._reader, r.slot, r.used)
        return whole[r.used - r.meta :].tobytes() if r.meta else r.payload, whole

    def drop(self) -> None:
        if self.data.slot >= 0:
            self._reader.release(self.data.slot)


class ProcessState(enum.Enum):
    """The life of a worker process, as the parent sees it.

    ::

        RUNNING --ends, having been told to leave--> GONE
        RUNNING --ends unexpectedly--> DEAD --another process takes its place--> GONE
    """

    RUNNING = enum.auto()
    DEAD = enum.auto()
    GONE = enum.auto()  # joined, and its pipes are closed


class WorkerHandle:
    """A worker process as its parent sees it."""

    process: BaseProcess

    def __init__(self, place: int, id_: int, reader: SlotReader, outbox: Outbox, inbox: Reader) -> None:
        # its index in the pool's table, which records carry; reused when the process is gone
        self.place = place
        self.id = id_  # of the worker
        self.reader = reader  # its memory
        self.outbox = outbox  # tasks to it alone
        self.inbox = inbox  # its results
        self.poll = select.poll()  # its results alone
        self.state = ProcessState.RUNNING  # of its process
        self.leaving = False  # it has been told to leave
        self.given = 0  # tasks given to it; counted by the thread that submits
        self.answered = 0  # tasks answered by it; counted by the thread that receives
        self.current_task: TaskId | None = None  # the task that it was doing when it died
        self.timeout_stack = ""  # its stack when it was killed because a sample took too long; else ""

    @property
    def is_active(self) -> bool:
        """Whether it takes tasks: its process has not ended, and it was not told to leave."""
        return self.state is ProcessState.RUNNING and not self.leaving

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended and its pipes are closed."""
        return self.state is ProcessState.GONE

    @property
    def position(self) -> Position:
        """Where it is in its task, or was when it died."""
        return Position.decode(self.reader.arena.position()[0])

    @property
    def rng_checkpoint(self) -> TaskId | None:
        """The task before which it last saved its random state; None if it never did."""
        checkpoint = self.reader.arena.rng_checkpoint()
        return None if checkpoint is None else checkpoint[0]

    def how_it_ended(self) -> str:
        return exit_reason.why(self.process.exitcode, self.reader.arena.pss)
