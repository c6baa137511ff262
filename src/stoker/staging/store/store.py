"""Which samples are stored, and how they are written and read.

Samples of the first type encountered are rows of columns, one column per leaf, so that a batch is one gather from each.
Others are blocks in a heap (``tables``). Stored samples are never evicted: under random access, an LRU of the same size
evicts what the epoch still needs (``docs/notes/staging.md`` has the measurements).

Many processes and threads fill one store. A writer

1. reserves space under the lock (``Tables.allocate``),
2. writes the sample without the lock (``Tables.write``),
3. stores its location, a single word, in ``locations`` under the lock.

A reader that sees the word sees the sample. A writer killed between 1 and 3 leaves reserved space but no entry.

The memory of a store may be freed at any time (``Store.shut``). First the state is set permanently, and then the pages
become zeros, even under readers. So a reader first copies, then checks the state, and discards its copy if the store
was shut (``Store.copied``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...core import reclaim, resources
from ...core.errors import one_line
from ...core.types import Index, Sample
from ...core.warn import warn_user
from ...transport.ordering import barrier
from .decode import Layout, UnknownClass, layout
from .encode import CacheError
from .head import NUMBERS, SPEC_BYTES, StoreHead, StoreState
from .memory import MemoryTables
from .spec import Leaf
from .tables import PAGE, Medium, Samples, Tables

FIRST_SAMPLES = 16  # samples after which, at the latest, it is decided how samples are stored
INTACT, DAMAGED = 1, 2
LOOK_S = 0.5  # between two checks of free memory, of 0.1 ms each


T = TypeVar("T")


class Gone(Exception):
    """The store was shut while a sample was read."""


class StoreStats(NamedTuple):
    """Statistics of a store."""

    samples: int  # of the dataset
    filled: int  # number of stored samples
    nbytes: int  # reserved bytes
    budget: int  # bytes it may reserve
    prepared: int  # samples prepared so far, by all processes
    keep_s: float  # total CPU seconds spent on storing them
    reason: str  # why no more samples are stored; "" while they are
    ranks: int = 1  # ranks of this node that fill and read it
    compared: int = 0  # how often a stored sample was made again and was the same

    def describe(self) -> str:
        share = self.filled / max(1, self.samples)
        text = f"{self.filled:,} of {self.samples:,} samples ({share:.0%}) in {self.nbytes / 1e6:,.1f} MB"
        return f"{text}; {self.reason}" if self.reason else text


def size_of(samples: int, budget: int) -> int:
    """Bytes of address space that a store in memory needs."""
    return _tables_start(samples) + 2 * (budget + (1 << 20)) + samples // 8


def _tables_start(samples: int) -> int:
    return -(-(_begun_start(samples) + samples) // PAGE) * PAGE


def _begun_start(samples: int) -> int:
    return -(-(PAGE + 2 * SPEC_BYTES + samples * 8) // PAGE) * PAGE


class Store:
    """Samples by index, never evicted. Raises CacheError if it is a store of another dataset, or damaged."""

    def __init__(self, medium: Medium, samples: int, budget: int) -> None:
        self.medium = medium
        self.samples = samples
        numbers = medium.table("head", np.int64, NUMBERS, 0)
        self._head = StoreHead(numbers, medium.table("words", np.uint8, 2 * SPEC_BYTES, PAGE))
        self.locations: NDArray[np.int64] = medium.table("place", np.int64, samples, PAGE + 2 * SPEC_BYTES)
        self._begun: NDArray[np.uint8] | None = None  # samples that some process has begun to make
        if medium.kind == "RAM":
            self._begun = medium.table("begun", np.uint8, samples, _begun_start(samples))
        with medium.lock():
            if not self._head.samples and medium.writable:
                self._head.budget = budget
                self._head.samples = samples
                if not medium.trusted and self.locations.any():
                    self.locations[:] = 0  # without their head, new samples would overwrite them
        if self._head.samples != samples:
            raise CacheError(f"the cache has {self._head.samples:,} samples, but the dataset has {samples:,}")
        self._tables: Tables | None = None
        self._first: Samples = {}  # stored once it is decided how
        # Samples in files that any worker has found INTACT or DAMAGED in this run; the last byte: whether it was said
        # that one cannot be decoded.
        self._verified: NDArray[np.uint8] | None = None
        if not medium.trusted:
            self._verified = MemoryTables(samples + 1).table("seen", np.uint8, samples + 1, 0)
        self._no_room_for_tables = False
        self._low = 0  # bytes of memory that must stay free; 0: unknown yet
        self._next_look = time.monotonic() + LOOK_S
        if medium.kind == "RAM":
            reclaim.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.medium, self.samples, self._head.budget)

    # -- state

    @property
    def usable(self) -> bool:
        """Whether samples may be served or stored."""
        return self._head.state != StoreState.DISABLED

    def made_with(self, threads: int, are_same: Callable[[], bool]) -> bool:
        """Whether its samples have the bits that so many native threads make. The first process that asks decides on
        their number. ``are_same``: makes some stored samples again, with the present threads."""
        head = self._head
        if self.medium.writable and not (head.threads and head.filled):
            with self.medium.lock():
                head.threads = head.threads if head.filled else threads
        if head.threads in (0, threads):
            return True
        if not head.threads_matter:
            found = -1 if are_same() else 1
            if self.medium.writable:
                with self.medium.lock():
                    head.threads_matter = head.threads_matter or found
            return found < 0
        return head.threads_matter < 0

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
            keep_s=head.store_ns / 1e9,
            reason=head.reason,
            ranks=max(1, head.ranks_joined),
            compared=head.compared,
        )

    def count_compared(self, n: int) -> None:
        """Counts stored samples that were made again and were the same."""
        if n and self.medium.writable and self.usable:
            with self.medium.lock():
                self._head.compared += n

    @property
    def gather_checked(self) -> bool:
        """Whether a gathered batch was found equal to one made from single samples. Shared by all workers."""
        return bool(self._head.gather_checked)

    @gather_checked.setter
    def gather_checked(self, value: bool) -> None:
        if self.medium.writable:
            self._head.gather_checked = value

    def shut(self, reason: str) -> bool:
        """Stops serving and storing in all processes, and frees their memory. Returns whether this call did it."""
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
        """Shuts the store if it has used memory. Returns the bytes freed. See ``reclaim``."""
        nbytes = self._head.reserved
        return nbytes if nbytes and self.shut(f"its memory was freed: {reason}") else 0

    def _free(self) -> None:
        self.medium.give_back(_tables_start(self.samples))

    def _look_at_memory(self) -> None:
        """Frees the memory if the machine runs short. Every reading process checks: torch's loader does not."""
        self._next_look = time.monotonic() + LOOK_S
        self._low = self._low or resources.memory_low()
        left = resources.memory_available()
        given = self.give_back(f"{left >> 20:,} MB were left") if left < self._low else 0
        if given:
            warn_user(f"Freed the cache's {given >> 20:,} MB, because only {left >> 20:,} MB of memory were left.")

    def never_look(self) -> None:
        """This process leaves giving memory back to others."""
        self._next_look = float("inf")

    def divide(self, ranks: int) -> None:
        """Sets the number of ranks that share the budget, which may be used up once all of them have joined."""
        self._head.ranks = ranks

    def join(self) -> None:
        """Adds a rank that fills and reads this store."""
        with self.medium.lock():
            self._head.ranks_joined = min(self._head.ranks, self._head.ranks_joined + 1)
        self.clear_full()

    def clear_full(self) -> None:
        """Resumes storing samples: there may be space now, on disk or for another rank."""
        with self.medium.lock():
            if self.medium.writable and self._head.state != StoreState.DISABLED:
                self._head.reason_length = 0

    def _note_error(self, e: OSError) -> None:
        self._head.reason = f"no more samples are stored: {e.strerror or e} ({self.medium.kind})"

    def begin(self, i: int) -> None:
        """Tells other processes that this one makes a sample, so that helpers leave it alone."""
        if self._begun is not None:
            self._begun[i] = 1

    def forget_begun(self) -> None:
        """Call when an epoch begins: what was begun and not stored is made again."""
        if self._begun is not None:
            self._begun[:] = 0

    def is_begun(self, i: int) -> bool:
        """Whether a process has begun to make a sample. It may have ended since."""
        return self._begun is not None and bool(self._begun[i])

    # -- reading

    def find(self, indices: Sequence[Index]) -> NDArray[np.int64] | None:
        """``where`` for a batch; None if the dataset itself must answer: numbers beyond the samples, which are errors,
        and negative ones, which a sample may return (``return image, index``)."""
        try:
            numbers = np.array(indices)
        except ValueError:
            return None
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            return None
        if (numbers < 0).any() or (numbers >= self.samples).any():
            return None
        return self.where(numbers)

    def location(self, i: int) -> int:
        """The same as ``where`` for one sample."""
        if self._verified is not None or time.monotonic() >= self._next_look:
            return int(self.where(np.array([i], np.int64))[0])
        at = int(self.locations[i])
        barrier()  # see ``where``
        return at

    def where(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The location of each sample, for ``read``; 0 if it is not stored. For a file, verifies a sample on first
        request; a damaged one no longer counts as stored."""
        if self.medium.kind == "RAM" and time.monotonic() >= self._next_look:
            self._look_at_memory()
        at: NDArray[np.int64] = self.locations[indices]
        barrier()  # locations must be read before the samples
        if self._verified is not None and at.any():
            if not self.ready():
                return np.zeros_like(at)
            for k in np.flatnonzero((at != 0) & (self._verified[indices] != INTACT)).tolist():
                if self._verified[indices[k]] == DAMAGED or not self._verify(int(indices[k]), int(at[k])):
                    at[k] = 0
        return at

    @property
    def damaged(self) -> NDArray[np.int64]:
        """Samples that were found damaged, in a store that cannot remove them."""
        return np.flatnonzero(self._verified[:-1] == DAMAGED) if self._verified is not None else np.zeros(0, np.int64)

    def _verify(self, i: int, location: int) -> bool:
        """Whether sample ``i`` is intact; removes it if not."""
        assert self._verified is not None
        assert self._tables is not None
        try:
            is_intact = self._tables.is_intact(i, location) and self._decodes(location)
        except (CacheError, OSError):  # its file is truncated
            is_intact = False
        if is_intact:
            self._verified[i] = INTACT
        elif not self.medium.writable:
            self._verified[i] = DAMAGED
        else:
            with self.medium.lock():
                if self.locations[i] == location:
                    self.locations[i] = 0
                    self._head.filled -= 1
        return is_intact

    def _decodes(self, location: int) -> bool:
        """Whether an intact sample can be decoded: its writer may have been another program. Warns once if not."""
        assert self._verified is not None
        assert self._tables is not None
        try:
            made, leaves = self._tables.stored(location)
            if not made.fixed:  # of fixed size are numbers, which any bytes are
                made.put(leaves)
        except UnknownClass:
            pass  # which another process may have
        except Exception as e:
            if not self._verified[-1]:
                self._verified[-1] = 1
                warn_user(
                    f"A sample in the cache on disk has the right checksum and cannot be decoded ({one_line(e)}): such "
                    "samples are made again."
                )
            return False
        return True

    def copied(self, copy: Callable[[], T]) -> T:
        """Returns what ``copy`` copies from this store. Raises Gone if the store was shut, perhaps earlier."""
        try:
            out = copy()
        except Exception:
            if self.usable:
                raise
        else:
            barrier()  # samples must be read before the state
            if self.usable:
                return out
        self._free()  # reading freed memory allocates pages again
        raise Gone

    def read(self, location: int) -> Sample:
        """Reads the sample at a location from ``where``, into memory of its own. Raises Gone."""

        def decode() -> tuple[Sample, Layout, list[Leaf] | None]:
            made, leaves = self._in_place(location)
            if made.fixed:
                return made.put(leaves), made, None
            return None, made, [x.copy() if n is None else x for x, n in zip(leaves, made.sizes, strict=True)]

        sample, made, leaves = self.copied(decode)
        if leaves is None:
            return sample
        return self.copied(lambda: made.put(leaves))  # a torn string or pickle must not be decoded; a tensor may be

    def stored(self, location: int) -> tuple[str, list[Leaf]]:
        """Type of the sample at a location from ``where``, and copies of its leaves. Raises Gone."""

        def copy() -> tuple[str, list[Leaf]]:
            made, leaves = self._in_place(location)
            return made.type_spec, [x.copy() for x in leaves]

        return self.copied(copy)

    def _in_place(self, location: int) -> tuple[Layout, list[Leaf]]:
        self.ready()
        assert self._tables is not None
        return self._tables.stored(location)

    def rows_at(self, locations: NDArray[np.int64]) -> torch.Tensor | None:
        """Row numbers of samples, for a gather from ``columns``; None if not all are rows, or rows do not stack."""
        if int(locations.min()) <= 0 or self.layout is None or not self.columns:
            return None
        return torch.from_numpy(locations - 1)

    @property
    def layout(self) -> Layout | None:
        """Layout of the samples in rows; None if there are none."""
        return self._tables.layout if self.ready() and self._tables is not None else None

    @property
    def columns(self) -> list[torch.Tensor]:
        """One tensor per leaf, for a gather; [] if samples do not stack. Read only via ``copied``, never write."""
        return self._tables.tensors if self._tables is not None else []

    def ready(self) -> bool:
        """Opens the tables once it is decided how samples are stored; returns whether. Raises CacheError if damaged."""
        if self._tables is not None:
            return True
        if self._head.state not in (StoreState.ROWS, StoreState.BLOCKS) or self._no_room_for_tables:
            return False
        try:
            self._tables = Tables(self.medium, self._head, _tables_start(self.samples))
        except OSError as e:  # they do not exist yet and there is no space: this process works without
            self._no_room_for_tables = True
            with self.medium.lock():
                self._note_error(e)
            return False
        return True

    # -- storing

    def admit(self, samples: Samples, keep_ns: int = 0, fetched: bool = False) -> None:
        """Stores samples as far as there is space. ``keep_ns``: CPU time spent on storing them so far, to which this
        call adds its own. ``fetched``: they came from another cache."""
        began = time.thread_time_ns()
        if not self.medium.writable or not self.usable:
            return
        with self.medium.lock():
            self._head.prepared += 0 if fetched else len(samples)
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
        """Decides how samples are stored: as rows if the first have one type of fixed size. Hold the lock."""
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
        head.state = state  # last: other processes may open the tables from now on

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
                    self._verified[i] = INTACT
        except OSError as e:
            allocated = {}
            with self.medium.lock():
                self._note_error(e)
        barrier()  # samples must be written before their locations
        with self.medium.lock():
            is_shut = not self.usable
            for i, location in () if is_shut else allocated.items():
                self._head.filled += not self.locations[i]
                self.locations[i] = location
            self._head.store_ns += time.thread_time_ns() - began_ns
        if is_shut:
            self._free()  # shut while this was written

    def _allocate(self, samples: Samples, tables: Tables, blocks: dict[int, NDArray[np.uint8]]) -> dict[int, int]:
        """Reserves space for as many samples as fit. Returns their locations by index. Hold the lock."""
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
