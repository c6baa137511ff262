"""A worker process and a batch of its, as the parent sees them."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any, TypeAlias

from ..transport.codec import decode
from ..transport.messages import Kind, Outbox, Reader, Record
from ..transport.slots import SlotReader

Hold: TypeAlias = Callable[[SlotReader, int, int], Any]
"""Slot and bytes used to an array for the consumer."""


class Received:
    """A record that arrived, decoded only when it is delivered."""

    __slots__ = ("_hold", "_reader", "_record", "ended", "epoch", "nbytes", "task", "times", "worker")

    def __init__(self, hold: Hold, r: Record, reader: SlotReader) -> None:
        self._hold, self._record, self._reader = hold, r, reader
        self.worker, self.epoch, self.task, self.times = r.worker, r.epoch, r.task, r.times
        self.ended = r.kind == Kind.END
        self.nbytes = r.used if r.slot >= 0 else len(r.payload)

    def take(self) -> Any:
        r = self._record
        if r.slot < 0:
            return decode(r.payload[: r.meta], bytearray(r.payload[r.meta :]))
        whole = self._hold(self._reader, r.slot, r.used)
        return decode(whole[r.used - r.meta :].tobytes() if r.meta else r.payload, whole)

    def drop(self) -> None:
        if self._record.slot >= 0:
            self._reader.release(self._record.slot)


class WorkerHandle:
    """A worker as its parent sees it: ALIVE --retire--> LEAVING --its process ends--> GONE; or ALIVE --its process
    ends--> DEAD --another takes its place--> GONE."""

    def __init__(self, place: int, id_: int, reader: SlotReader, outbox: Outbox, inbox: Reader) -> None:
        self.place, self.id = place, id_
        self.reader, self.outbox, self.inbox = reader, outbox, inbox
        self.process: Any = None
        self.poll = select.poll()  # its results alone
        self.given = 0  # tasks; counted by the thread that submits
        self.answered = 0  # counted by the thread that receives
        self.hand: tuple[int, int] | None = None  # the task it died with
        self.leaving = False
        self.gone = False
        self.dead = False
        self.hung = ""  # where it was when it was killed for taking too long
