"""Which samples are stored, and how they get in and out.

Samples of the first type that is seen are rows of columns, a column a leaf, so that a batch is one gather from each;
others are blocks in a heap (``tables``). What is stored stays: under random access an LRU of the same size evicts what
the epoch still needs (``docs/notes/staging.md`` has the measurement of both).

Many processes and threads fill one store. A writer

1. takes room under the lock (``Tables.allocate``),
2. writes the sample without the lock (``Tables.write``),
3. enters its location in ``locations``, a single word, under the lock.

A reader that sees the word sees the sample. A writer that is killed between 1 and 3 has taken room and entered nothing.

The memory of a store is given back at any time (``Store.shut``): the state is set first, for good, and then the pages
become zeros, under readers too. So a reader copies first, asks for the state after that, and drops what it has copied
if the store is shut (``Store.copied``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...core import reclaim, resources
from ...core.types import Index, Sample
from ...core.warn import warn_user
from ...transport.ordering import barrier
from .decode import Layout, layout
from .encode import CacheError
from .head import NUMBERS, SPEC_BYTES, StoreHead, StoreState
from .memory import MemoryTables
from .spec import Leaf
from .tables import PAGE, Medium, Samples, Tables

FIRST_SAMPLES = 16  # after so many samples, at most, it is decided how samples are stored
LOOK_S = 0.5  # between two looks at the free memory, of 0.1 ms each


T = TypeVar("T")


class Gone(Exception):
    """The store was shut while a sample was read."""


class StoreStats(NamedTuple):
    """A store in numbers."""

    samples: int  # of the dataset
    filled: int  # of these, in the store
    nbytes: int  # reserved
    budget: int  # bytes it may reserve
    prepared: int  # samples prepared so far, in all processes
    prepare_s: float  # seconds that took, summed
    keep_s: float  # seconds of CPU that storing them took, summed
    reason: str  # why no more samples are stored, "" while they are
    ranks: int = 1  # of this node that fill and read it

    def describe(self) -> str:
        share = self.filled / max(1, self.samples)
        text = f"{self.filled:,} of {self.samples:,} samples ({share:.0%}) in {self.nbytes / 1e6:,.1f} MB"
        return f"{text}; {self.reason}" if self.reason else text


def size_of(samples: int, budget: int) -> int:
    """Bytes of address space that a store in memory needs."""
    return _tables_start(samples) + 2 * (budget + (1 << 20)) + samples // 8


def _tables_start(samples: int) -> int:
    return -(-(PAGE + 2 * SPEC_BYTES + samples * 8) // PAGE) * PAGE


class Store:
    """Samples by their index. One that is stored stays. Raises CacheError: it is a store of another dataset, or
    damaged."""

    def __init__(self, medium: Medium, samples: int, budget: int) -> None:
        self.medium = medium
        self.samples = samples
        numbers = medium.table("head", np.int64, NUMBERS, 0)
        self._head = StoreHead(numbers, medium.table("words", np.uint8, 2 * SPEC_BYTES, PAGE))
        self.locations: NDArray[np.int64] = medium.table("place", np.int64, samples, PAGE + 2 * SPEC_BYTES)
        with medium.lock():
            if not self._head.samples and medium.writable:
                self._head.budget = budget
                self._head.samples = samples
                if not medium.trusted and self.locations.any():
                    self.locations[:] = 0  # their head is lost: new samples would overwrite them
        if self._head.samples != samples:
            raise CacheError(f"a cache of {self._head.samples:,} samples for a dataset of {samples:,}")
        self._tables: Tables | None = None
        self._first: Samples = {}  # stored once it is decided how
        # Samples of a file that were found intact in this run, by any worker.
        self._verified: NDArray[np.uint8] | None = None
        if not medium.trusted:
            self._verified = MemoryTables(samples + 1).table("seen", np.uint8, samples, 0)
        self._no_room_for_tables = False
        self._low = 0  # bytes of memory that are to stay free; 0: not known yet
        self._next_look = time.monotonic() + LOOK_S
        if medium.kind == "RAM":
            reclaim.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.medium, self.samples, self._head.budget)

    # -- state

    @property
    def usable(self) -> bool:
        """Whether samples may be served or stored."""
        return self._head.state != StoreState.DISABLED

    @property
    def complete(self) -> bool:
        return self._head.filled == self.samples

    @property
    def reason(self) -> str:
        """Why no more samples are stored; "" while they are."""
        return self._head.reason

    @property
    def account(self) -> StoreStats:
        head = self._head
        return StoreStats(
            samples=self.samples,
            filled=head.filled,
            nbytes=head.reserved,
            budget=head.budget,
            prepared=head.prepared,
            prepare_s=head.prepare_ns / 1e9,
            keep_s=head.store_ns / 1e9,
            reason=head.reason,
            ranks=max(1, head.ranks_joined),
        )

    @property
    def gather_checked(self) -> bool:
        """Whether a gathered batch was found to equal one of single samples. All workers share this."""
        return bool(self._head.gather_checked)

    @gather_checked.setter
    def gather_checked(self, value: bool) -> None:
        if self.medium.writable:
            self._head.gather_checked = value

    def shut(self, reason: str) -> bool:
        """From now on no process serves or stores samples, and their memory is the system's again. Returns whether this
        call did it."""
        with self.medium.lock():
            if self._head.state == StoreState.DISABLED or not self.medium.writable:
                return False
            self._head.reason = reason
            self._head.state = StoreState.DISABLED
            if self.medium.kind == "RAM":
                self._head.filled = self._head.reserved = 0
                self.locations[:] = 0
        self._free()
        return True

    def give_back(self, reason: str) -> int:
        """Shuts the store if it has taken memory. Returns the bytes. See ``reclaim``."""
        nbytes = self._head.reserved
        return nbytes if nbytes and self.shut(f"its memory was given back: {reason}") else 0

    def _free(self) -> None:
        self.medium.give_back(_tables_start(self.samples))

    def _look_at_memory(self) -> None:
        """Gives the memory back where the machine runs short. Each process that reads looks: the loader may be
        torch's, which does not."""
        self._next_look = time.monotonic() + LOOK_S
        self._low = self._low or resources.memory_low()
        left = resources.memory_available()
        given = self.give_back(f"{left >> 20:,} MB were left") if left < self._low else 0
        if given:
            warn_user(f"The {given >> 20:,} MB of the cache are given back: {left >> 20:,} MB of memory are left.")

    def never_look(self) -> None:
        """This process leaves giving memory back to others."""
        self._next_look = float("inf")

    def divide(self, ranks: int) -> None:
        """The budget is for this many ranks: it may be used up once all of them have joined."""
        self._head.ranks = ranks

    def join(self) -> None:
        """One more rank fills and reads this store."""
        with self.medium.lock():
            self._head.ranks_joined = min(self._head.ranks, self._head.ranks_joined + 1)
        self.clear_full()

    def clear_full(self) -> None:
        """Samples are stored again: there may be room now, on the disk or for one more rank."""
        with self.medium.lock():
            if self.medium.writable and self._head.state != StoreState.DISABLED:
                self._head.reason_length = 0

    def _note_error(self, e: OSError) -> None:
        self._head.reason = f"no more samples are stored: {e.strerror or e} ({self.medium.kind})"

    # -- reading

    def find(self, indices: Sequence[Index]) -> NDArray[np.int64] | None:
        """``where`` for indices as a dataset gets them, which may count from the end. None: they are no numbers, or
        there is no such sample, and the dataset is to raise what it raises."""
        try:
            numbers = np.array(indices)
        except ValueError:
            return None
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            return None
        numbers = np.where(numbers < 0, numbers + self.samples, numbers)
        if (numbers < 0).any() or (numbers >= self.samples).any():
            return None
        return self.where(numbers)

    def where(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The location of each sample, for ``read``; 0 where it is not stored. In a file, a sample is verified when it
        is first asked for. One that is damaged is not stored any more."""
        if self.medium.kind == "RAM" and time.monotonic() >= self._next_look:
            self._look_at_memory()
        at: NDArray[np.int64] = self.locations[indices]
        barrier()  # the samples are read after their locations
        if self._verified is not None and at.any():
            if not self.ready():
                return np.zeros_like(at)
            for k in np.flatnonzero((at != 0) & (self._verified[indices] == 0)).tolist():
                if not self._verify(int(indices[k]), int(at[k])):
                    at[k] = 0
        return at

    def _verify(self, i: int, location: int) -> bool:
        """Whether sample ``i`` is intact. One that is not is removed."""
        assert self._verified is not None
        assert self._tables is not None
        if self._tables.is_intact(i, location):
            self._verified[i] = 1
            return True
        if self.medium.writable:
            with self.medium.lock():
                if self.locations[i] == location:
                    self.locations[i] = 0
                    self._head.filled -= 1
        return False

    def copied(self, copy: Callable[[], T]) -> T:
        """What ``copy`` copies out of this store. Raises Gone: the store was shut, perhaps beforehand."""
        try:
            out = copy()
        except Exception:
            if self.usable:
                raise
        else:
            barrier()  # the state is read after the samples
            if self.usable:
                return out
        self._free()  # reading what was given back takes pages again
        raise Gone

    def read(self, location: int) -> Sample:
        """The sample at a location that ``where`` returned; its memory is its own. Raises Gone."""

        def to_decode() -> tuple[Layout, list[Leaf]]:
            made, leaves = self._in_place(location)
            return made, [x.copy() if n is None else x for x, n in zip(leaves, made.sizes, strict=True)]

        made, leaves = self.copied(to_decode)  # of half a text or pickle nothing may be made; of half a tensor it may
        return self.copied(lambda: made.put(leaves))

    def stored(self, location: int) -> tuple[str, list[Leaf]]:
        """The type of the sample at a location that ``where`` returned, and copies of its leaves. Raises Gone."""

        def copy() -> tuple[str, list[Leaf]]:
            made, leaves = self._in_place(location)
            return made.type_spec, [x.copy() for x in leaves]

        return self.copied(copy)

    def _in_place(self, location: int) -> tuple[Layout, list[Leaf]]:
        self.ready()
        assert self._tables is not None
        return self._tables.stored(location)

    def rows_at(self, locations: NDArray[np.int64]) -> torch.Tensor | None:
        """The rows of samples, for a gather from ``columns``; None where not all are rows, or rows do not stack."""
        if int(locations.min()) <= 0 or self.layout is None or not self.columns:
            return None
        return torch.from_numpy(locations - 1)

    @property
    def layout(self) -> Layout | None:
        """Of the samples in rows; None where there are none."""
        return self._tables.layout if self.ready() and self._tables is not None else None

    @property
    def columns(self) -> list[torch.Tensor]:
        """One tensor a leaf, a row a sample; [] where a batch is not one gather from each. To be read by ``copied``
        only, and not to be written to."""
        return self._tables.tensors if self._tables is not None else []

    def ready(self) -> bool:
        """Opens the tables once it is decided how samples are stored, by any process. Returns whether they are open.
        Raises CacheError: damaged files."""
        if self._tables is not None:
            return True
        if self._head.state not in (StoreState.ROWS, StoreState.BLOCKS) or self._no_room_for_tables:
            return False
        try:
            self._tables = Tables(self.medium, self._head, _tables_start(self.samples))
        except OSError as e:  # they do not exist yet and there is no room: this process works without
            self._no_room_for_tables = True
            with self.medium.lock():
                self._note_error(e)
            return False
        return True

    # -- storing

    def admit(self, samples: Samples, prepare_ns: int, keep_ns: int = 0, fetched: bool = False) -> None:
        """Stores samples as far as there is room. ``prepare_ns``: what they took to prepare, together; ``keep_ns``:
        CPU time that storing them took so far, to which this call adds its own. ``fetched``: nobody prepared them now.
        """
        began = time.thread_time_ns()
        if not self.medium.writable or not self.usable:
            return
        with self.medium.lock():
            self._head.prepared += 0 if fetched else len(samples)
            self._head.prepare_ns += prepare_ns
            known = max(self._head.prepared, len(self._first) + len(samples))
            enough = known >= min(FIRST_SAMPLES, self.samples // 8)
            if self._head.state == StoreState.UNDECIDED and not enough:
                for i, (type_spec, leaves) in samples.items():  # copied: user code may write to the sample later
                    self._first[i] = type_spec, [x.copy() for x in leaves]
                return
            samples, self._first = {**self._first, **samples}, {}
            if self._head.state == StoreState.UNDECIDED:
                self._decide(samples)
            if self._head.state == StoreState.DISABLED or self._head.reason_length:
                return
        if self.ready():
            self._store(samples, began - keep_ns)
            if self.complete:
                self.medium.seal()

    def _decide(self, samples: Samples) -> None:
        """Decides how samples are stored, from the first ones. The caller holds the lock. They are rows where the first
        have one type of one size."""
        head = self._head
        state = StoreState.BLOCKS
        specs = {type_spec for type_spec, _ in samples.values()}
        made = layout(min(specs, key=len), self.medium.pickles)
        if len(specs) == 1 and made.fixed and made.nbytes and len(made.type_spec) <= SPEC_BYTES:
            if made.nbytes > head.budget:
                head.reason = f"a sample of {made.nbytes:,} bytes exceeds the budget of {head.budget:,}"
                state = StoreState.DISABLED
            else:
                head.spec = made.type_spec
                head.rows = min(self.samples, head.budget // made.nbytes)
                head.row_is_index = head.rows == self.samples
                state = StoreState.ROWS
        head.state = state  # last: from now on other processes open the tables

    def _store(self, samples: Samples, began_ns: int) -> None:
        assert self._tables is not None
        tables = self._tables
        blocks = tables.blocks_of(samples)
        with self.medium.lock():
            try:
                allocated = self._allocate(samples, tables, blocks)
            except OSError as e:
                allocated = {}
                self._note_error(e)
        try:
            for i, location in allocated.items():
                tables.write(i, location, samples[i][1], blocks.get(i))
                if self._verified is not None:
                    self._verified[i] = 1
        except OSError as e:
            allocated = {}
            with self.medium.lock():
                self._note_error(e)
        barrier()  # the samples are written before their locations
        with self.medium.lock():
            is_shut = not self.usable
            for i, location in () if is_shut else allocated.items():
                self._head.filled += not self.locations[i]
                self.locations[i] = location
            self._head.store_ns += time.thread_time_ns() - began_ns
        if is_shut:
            self._free()  # while this was written

    def _allocate(self, samples: Samples, tables: Tables, blocks: dict[int, NDArray[np.uint8]]) -> dict[int, int]:
        """Takes room for as many samples as fit. Returns their locations by index. The caller holds the lock."""
        out: dict[int, int] = {}
        for i in samples:
            if self.locations[i]:  # another process was first
                continue
            location = tables.allocate(i, blocks.get(i))
            if not location:
                if not self._head.reason_length:
                    self._head.reason = f"the budget of {self._head.budget:,} bytes is full ({self.medium.kind})"
                break
            out[i] = location
        return out
