"""Batches made by nodes: copies each once, from Ray's object store into this process's memory."""

from __future__ import annotations

import numpy as np

from stoker.core.types import Batch
from stoker.transport.codec import decode
from stoker.transport.thread_slots import HeapWriter
from stoker.workers.protocol import LocalBatch

from .node import Packed


class RemoteResult(LocalBatch):
    """A batch made by a node, still in the object store."""

    def __init__(self, epoch: int, packed: Packed, slots: HeapWriter) -> None:
        nbytes = len(packed.leaves) + len(packed.meta)
        super().__init__(-1, epoch, packed.number, False, packed.times, nbytes, packed)
        self._slots = slots

    def take(self) -> Batch:
        return unpack(super().take(), self._slots)


def unpack(packed: Packed, slots: HeapWriter) -> Batch:
    """Decodes the batch into this process's memory."""
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
