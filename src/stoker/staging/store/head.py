"""The numbers and strings shared by all users of a store: how samples are stored, and how much space is used."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

NUMBERS = 32  # int64 in the table ``head``
SPEC_BYTES = 1 << 16  # for the type of samples in rows; the second half of the table ``words`` holds a reason


class StoreState(enum.IntEnum):
    """How samples are stored. Changes from UNDECIDED to one of the others, and from any of them to DISABLED."""

    UNDECIDED = 0
    ROWS = 1  # samples of one type are rows of columns, others are blocks
    BLOCKS = 2  # each sample is a block
    DISABLED = 3  # nothing is served or stored any more; ``reason`` says why


class _Number:
    """A field of ``StoreHead``: one int64 in shared memory or in a mapped file."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, head: StoreHead, owner: type | None = None) -> int:
        return int(head.numbers[self.index])

    def __set__(self, head: StoreHead, value: int) -> None:
        head.numbers[self.index] = value


class StoreHead:
    """The shared fields of a store. Hold its lock to change one. The indices are a format: see ``folder.FORMAT``."""

    state = _Number(0)
    samples = _Number(1)  # length of the dataset; 0 in a new store
    rows = _Number(2)  # capacity in rows
    rows_taken = _Number(3)
    heap_end = _Number(4)  # used bytes of the heap
    filled = _Number(5)  # number of stored samples
    reserved = _Number(6)  # bytes
    budget = _Number(7)  # bytes
    spec_length = _Number(8)  # bytes of ``spec``
    reason_length = _Number(9)  # bytes of ``reason``; 0 while samples are stored
    row_is_index = _Number(10)  # all samples fit, so sample i is row i
    prepared = _Number(11)  # samples prepared, by all processes
    check_memory_at = _Number(13)  # number of reserved bytes at which free memory is checked again
    gather_checked = _Number(14)  # a gathered batch was compared with one made from single samples
    ranks = _Number(16)  # ranks of this node that share the budget
    ranks_joined = _Number(17)
    store_ns = _Number(18)  # CPU time spent on storing samples
    compared = _Number(19)  # how often a stored sample was made again and was the same
    threads = _Number(20)  # native threads with which the first sample was made; 0 before
    threads_matter = _Number(21)  # whether another number of threads makes other bits; 0 if unknown, -1 if it does not

    def __init__(self, numbers: NDArray[np.int64], texts: NDArray[np.uint8]) -> None:
        self.numbers = numbers
        self._texts = texts

    @property
    def spec(self) -> str:
        """The type of samples in rows, as returned by ``encode.take``."""
        return self._texts[: self.spec_length].tobytes().decode(errors="replace")  # a damaged one is rejected as a type

    @spec.setter
    def spec(self, spec: str) -> None:
        data = np.frombuffer(spec.encode(), np.uint8)
        self._texts[: len(data)] = data
        self.spec_length = len(data)

    @property
    def reason(self) -> str:
        """Why no more samples are stored; "" while they are."""
        end = SPEC_BYTES + min(max(0, self.reason_length), SPEC_BYTES)
        return self._texts[SPEC_BYTES:end].tobytes().decode(errors="replace")

    @reason.setter
    def reason(self, reason: str) -> None:
        data = np.frombuffer(reason.encode()[:SPEC_BYTES], np.uint8)
        self._texts[SPEC_BYTES : SPEC_BYTES + len(data)] = data
        self.reason_length = len(data)
