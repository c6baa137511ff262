"""Batches that nodes have made: the one copy, from Ray's object store into memory of this process."""

from __future__ import annotations

import numpy as np
from torch._utils import ExceptionWrapper

from stoker.core.types import Batch
from stoker.transport.codec import decode
from stoker.transport.messages import Times
from stoker.transport.thread_slots import HeapWriter
from stoker.workers.protocol import WorkerReply

from .node import Packed


def is_error(batch: Batch) -> bool:
    """Whether an exception came in the place of a batch."""
    return isinstance(batch.data if type(batch) is WorkerReply else batch, ExceptionWrapper)


class RemoteResult:
    """A batch that a node has made, still in the object store. See ``workers.protocol.Result``."""

    worker, ended = -1, False

    def __init__(self, epoch: int, packed: Packed, slots: HeapWriter) -> None:
        self.epoch = epoch
        self.task = packed.number
        self.times: Times = packed.times
        self.nbytes = len(packed.leaves) + len(packed.meta)
        self._packed: Packed | None = packed
        self._slots = slots

    def take(self) -> Batch:
        packed, self._packed = self._packed, None
        assert packed is not None
        return unpack(packed, self._slots)

    def drop(self) -> None:
        self._packed = None


def unpack(packed: Packed, slots: HeapWriter) -> Batch:
    """The batch, in memory of this process."""
    leaves = packed.leaves
    if isinstance(leaves, (bytes, bytearray)):
        return decode(packed.meta, bytearray(leaves))
    if not slots.take(len(leaves)):
        return decode(packed.meta, np.array(leaves))
    whole = slots.whole
    assert whole is not None
    whole[: len(leaves)] = leaves
    slots.sent()
    return decode(packed.meta, whole)
