"""The cache itself: which samples are in, where, and how they come out again.

A store has one place per sample of the dataset. Samples of the make that is seen first are rows of columns, a column
a leaf, so that a batch is one gather from each; others lie in a heap. What is in stays in: under random access an LRU
of the same size throws out what the epoch still wants (``docs/notes/staging.md`` has both).

Many processes and threads fill one store. A writer takes rows under a lock, writes them, and only then enters them
in ``place``, a single word; a reader who sees the word sees the row. A writer that is killed in between has taken room
and entered nothing. Long for one file: who may write which word, and when, is to be seen in one place.
"""

from __future__ import annotations

import contextlib
import platform
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ...core import resources
from .block import intact, pack, unpack
from .decode import Layout, layout
from .encode import CacheError, Leaf, foreign
from .layout import WORDS, Samples, decide
from .memory import Memory

PAGE = 4096
HEAD = 32  # words
BLOCK = 1 << 16  # bytes that are reserved at once: few calls, little waste in a set that is never read whole
LOOK = 64 << 20  # bytes reserved between two looks at what memory there is
SPARE = 256 << 20  # bytes of memory that stay free, whatever the budget says
ENOUGH = 16  # samples, at most, that are waited for before it is decided how samples lie
# What each word of the head is.
STATE, COUNT, ROWS, TAKEN, HEAP, FILLED, USED, BUDGET = range(8)
WORDS_LEN, REASON_LEN, WHOLE, PREPARED, PREPARE_NS, LOOKED, TRIED, SQUEEZED = range(8, 16)
RANKS, JOINED = 16, 17  # of a node that fill one store: how many the budget is for, and how many of them have come
KEEP_NS = 18
OPEN, ROWED, HEAPED, SHUT = range(4)  # STATE: undecided; rows and heap; heap only; not used, and there is a reason
_ORDERED = platform.machine() in ("x86_64", "AMD64")  # where stores are seen in the order in which they were made


class Medium(Protocol):
    """Where tables lie: ``memory.Memory`` or ``folder.Folder``."""

    trusted: bool
    writable: bool
    kind: str

    @property
    def lock(self) -> Callable[[], contextlib.AbstractContextManager[None]]: ...
    def table(self, name: str, dtype: Any, count: int, at: int) -> np.ndarray[Any, Any]: ...
    def reserve(self, name: str, at: int, nbytes: int) -> None: ...
    def seal(self) -> None: ...


class StoreStats(NamedTuple):
    """A store in numbers.

    Attributes:
        samples: of the dataset.
        filled: of these, in the store.
        nbytes: memory reserved.
        budget: bytes it may reserve.
        prepared: samples prepared so far, in all processes.
        prepare_s: seconds that took, summed.
        keep_s: seconds of CPU that letting them in took, summed.
        reason: why nothing more is let in, "" while it is.
        compressed: whether what is in is compressed.
        ranks: of this node that fill and read it.
    """

    samples: int
    filled: int
    nbytes: int
    budget: int
    prepared: int
    prepare_s: float
    keep_s: float
    reason: str
    compressed: bool = False
    ranks: int = 1


def size_of(samples: int, budget: int) -> int:
    """Bytes of address space that a store wants."""
    return _data_at(samples) + 2 * (budget + (1 << 20)) + samples // 8


def _data_at(samples: int) -> int:
    return _page(PAGE + 2 * WORDS + samples * 8)


def _page(n: int) -> int:
    return -(-n // PAGE) * PAGE


class Store:
    """Samples by their index.

    Args:
        medium: where it lies.
        samples: length of the dataset.
        budget: bytes that may be reserved.
        squeeze: whether samples are compressed; None: where the set does not fit and it pays.
    """

    def __init__(self, medium: Medium, samples: int, budget: int, squeeze: bool | None = False) -> None:
        self.medium, self.samples, self._squeeze = medium, samples, squeeze
        self._head = medium.table("head", np.int64, HEAD, 0)
        self._words = medium.table("words", np.uint8, 2 * WORDS, PAGE)
        self.place = medium.table("place", np.int64, samples, PAGE + 2 * WORDS)
        with medium.lock():
            if not self._head[COUNT] and medium.writable:
                self._head[BUDGET], self._head[COUNT] = budget, samples
                if not medium.trusted and self.place.any():
                    self.place[:] = 0  # of a head that is gone: what is let in now would lie where these do
        if self._head[COUNT] != samples:
            raise CacheError(f"a cache of {self._head[COUNT]:,} samples for a dataset of {samples:,}")
        self._layout: Layout | None = None
        self._columns: list[np.ndarray[Any, Any]] = []
        self._begins: list[int] = []  # of the columns, in memory
        self._tensors: list[torch.Tensor] = []
        self._blocks: list[np.ndarray[Any, Any]] = []
        self._heap: np.ndarray[Any, Any] | None = None
        self._waiting: Samples = {}
        self._crc: np.ndarray[Any, Any] | None = None
        # Rows of a file that were found whole in this run, by whichever worker.
        self._seen = None if medium.trusted else Memory(samples + 1).table("seen", np.uint8, samples, 0)
        self._no_room = False

    # -- what is there

    @property
    def usable(self) -> bool:
        """Whether anything may be served or let in."""
        return bool(self._head[STATE] != SHUT)

    @property
    def account(self) -> StoreStats:
        h = self._head
        return StoreStats(
            self.samples,
            int(h[FILLED]),
            int(h[USED]),
            int(h[BUDGET]),
            int(h[PREPARED]),
            int(h[PREPARE_NS]) / 1e9,
            int(h[KEEP_NS]) / 1e9,
            self.reason,
            bool(h[SQUEEZED]),
            max(1, int(h[JOINED])),
        )

    @property
    def reason(self) -> str:
        """Why nothing more is let in; "" while it is."""
        n = int(self._head[REASON_LEN])
        return self._words[WORDS : WORDS + n].tobytes().decode(errors="replace")

    def shut(self, reason: str) -> bool:
        """Nothing is served or let in from now on, by anybody. Returns whether this call did it."""
        with self.medium.lock():
            if self._head[STATE] == SHUT or not self.medium.writable:
                return False
            self._say(reason)
            self._head[STATE] = SHUT
            return True

    def divide(self, ranks: int) -> None:
        """The budget is that of so many ranks: it may be used up once all of them have joined."""
        self._head[RANKS] = ranks

    def join(self) -> None:
        """One more rank fills and reads this store."""
        with self.medium.lock():
            self._head[JOINED] = min(self._head[RANKS], self._head[JOINED] + 1)
            if self._head[STATE] != SHUT:
                self._head[REASON_LEN] = 0  # what was full has room by now

    def again(self) -> None:
        """What was full may have room by now: a file system, another run's cache."""
        with self.medium.lock():
            if self.medium.writable and self._head[STATE] != SHUT:
                self._head[REASON_LEN] = 0

    def _say_why(self, e: OSError) -> None:
        self._say(f"no more is let in: {e.strerror or e} ({self.medium.kind})")

    def _say(self, reason: str) -> None:
        data = reason.encode()[:WORDS]
        self._words[WORDS : WORDS + len(data)] = np.frombuffer(data, np.uint8)
        self._head[REASON_LEN] = len(data)

    def where(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """For each index its row + 1, or minus its offset in the heap - 1, or 0 where it is not in.

        What lies in a file is looked at when it is first asked for; what is damaged is not in.
        """
        if not _ORDERED:  # stores may be seen out of order: the lock is a barrier for both sides
            with self.medium.lock():
                pass
        at: np.ndarray[Any, Any] = self.place[indices]
        if self._seen is not None and at.any():
            if not self.ready():
                return np.zeros_like(at)
            for k in np.flatnonzero((at != 0) & (self._seen[indices] == 0)).tolist():
                if not self._whole(int(indices[k]), int(at[k])):
                    at[k] = 0
        return at

    def _whole(self, i: int, at: int) -> bool:
        """Whether what lies in the file is what was written for this sample, where nothing else will be. What is not is
        let go."""
        assert self._seen is not None
        assert self._heap is not None
        head = self._head
        if at < 0:
            good = intact(self._heap[: max(0, int(head[HEAP]))], -at - 1, i)
        else:
            crc = self._crc  # None: a place among rows, where there are none
            good = (
                crc is not None
                and at <= len(crc)
                and bool(at == i + 1 if head[WHOLE] else at <= head[TAKEN])
                and bool(crc[at - 1] == self._checksum(i, [c[at - 1] for c in self._columns]))
            )
        if good:
            self._seen[i] = 1
            return True
        if self.medium.writable:
            with self.medium.lock():
                if self.place[i] == at:
                    self.place[i] = 0
                    self._head[FILLED] -= 1
        return False

    def _checksum(self, i: int, leaves: Sequence[Leaf]) -> int:
        """crc32 of a row, of which sample it is, and of what it is made of."""
        assert self._layout is not None
        crc = zlib.crc32(b"%d:" % i + self._layout.words.encode())
        for leaf in leaves:
            crc = zlib.crc32(leaf, crc)
        return crc

    @property
    def layout(self) -> Layout | None:
        """The make of the rows, once there are any."""
        return self._layout if self.ready() and self._columns else None

    @property
    def columns(self) -> list[torch.Tensor]:
        """One tensor a leaf, a row a sample. Not to be written to."""
        return self._tensors

    def read(self, at: int) -> Any:
        """The sample at what ``where`` said; its memory is its own."""
        self.ready()
        if at > 0:
            assert self._layout is not None
            return self._layout.put([c[at - 1] for c in self._columns])
        assert self._heap is not None
        return unpack(self._heap, -at - 1, self.medium.trusted)

    def check(self, tell: Callable[[int, int], None] | None = None) -> list[int]:
        """Looks at everything that is in. Returns the samples that are damaged; they are let go.

        Args:
            tell: called with how many samples were looked at, of how many.
        """
        assert self._seen is not None
        self._seen[:] = 0
        bad, there = [], np.flatnonzero(self.place)
        for k, i in enumerate(there.tolist()):
            if not self.where(np.array([i]))[0]:
                bad.append(i)
            if tell is not None:
                tell(k + 1, len(there))
        return bad

    # -- letting samples in

    def admit(self, samples: Samples, prepare_ns: int, keep_ns: int = 0) -> Samples:
        """Lets samples in as far as there is room.

        Args:
            samples: what ``leaves.take`` said, by index.
            prepare_ns: what they cost to prepare, together.
            keep_ns: CPU time that letting them in has cost so far; what it costs here is added.

        Returns:
            Those for which there was no room.
        """
        head, began = self._head, time.thread_time_ns()
        if not self.medium.writable:
            return samples
        if not self.medium.trusted:
            out = {i: sample for i, sample in samples.items() if foreign(sample[0])}
            if out:
                kept = {i: sample for i, sample in samples.items() if i not in out}
                return out | (self.admit(kept, prepare_ns, keep_ns) if kept else {})
        with self.medium.lock():
            head[PREPARED] += len(samples)
            head[PREPARE_NS] += prepare_ns
            if head[STATE] == OPEN and head[PREPARED] < min(ENOUGH, self.samples // 8):
                for i, (words, leaves) in samples.items():  # copied: what comes after may write to the sample
                    self._waiting[i] = words, [x.copy() for x in leaves]
                return {}
            if self._waiting:
                samples = {**self._waiting, **samples}
                self._waiting = {}
            if head[STATE] == OPEN:
                self._decide(samples)
            if head[STATE] == SHUT or head[REASON_LEN]:
                return samples
        if not self.ready():
            return samples
        blocks = self._blocks_of(samples)
        with self.medium.lock():
            try:
                taken = self._take(samples, blocks)
            except OSError as e:
                taken = []
                self._say_why(e)
        try:
            for i, at in taken:
                if at > 0:
                    self._write_row(i, at, samples[i][1])
                else:
                    self._write_block(-at - 1, blocks[i])
                if self._seen is not None:
                    self._seen[i] = 1
        except OSError as e:
            taken = []
            with self.medium.lock():
                self._say_why(e)
        with self.medium.lock():
            for i, at in taken:
                head[FILLED] += not self.place[i]
                self.place[i] = at
            head[KEEP_NS] += keep_ns + time.thread_time_ns() - began
            full = head[FILLED] == self.samples
        if full:
            self.medium.seal()
        return {i: sample for i, sample in samples.items() if not self.place[i]}

    def _blocks_of(self, samples: Samples) -> dict[int, np.ndarray[Any, Any]]:
        """What is to lie in the heap, as it will lie there."""
        row, squeeze = self._layout.words if self._layout is not None else None, bool(self._head[SQUEEZED])
        checked = not self.medium.trusted
        return {i: pack(words, leaves, i, squeeze, checked) for i, (words, leaves) in samples.items() if words != row}

    def _decide(self, samples: Samples) -> None:
        """Writes down how samples lie, from the first few. Called under the lock."""
        head = self._head
        prepare_ns = float(head[PREPARE_NS] / max(1, head[PREPARED]))
        found = decide(samples, self.samples, int(head[BUDGET]), prepare_ns, self._squeeze, self.medium.trusted)
        data = found.words.encode()
        self._words[: len(data)] = np.frombuffer(data, np.uint8)
        head[WORDS_LEN], head[ROWS], head[SQUEEZED] = len(data), found.rows, found.squeezed
        head[WHOLE] = found.rows == self.samples
        if found.reason:
            self._say(found.reason)
        head[STATE] = SHUT if found.reason else ROWED if data else HEAPED  # last: from now on others map what is said

    @property
    def tried(self) -> bool:
        """Whether a batch from columns was found to be what samples one by one make; noted for all workers."""
        return bool(self._head[TRIED])

    @tried.setter
    def tried(self, value: bool) -> None:
        if self.medium.writable:
            self._head[TRIED] = value

    @property
    def complete(self) -> bool:
        """Whether every sample is in."""
        return bool(self._head[FILLED] == self.samples)

    def ready(self) -> bool:
        """Maps what has been decided, by whomever. Returns whether anything has.

        Raises:
            CacheError: files that are damaged.
        """
        if self._heap is not None:
            return True
        if self._head[STATE] not in (ROWED, HEAPED) or self._no_room:
            return False
        try:
            self._map(self._head[STATE] == ROWED)
        except OSError as e:  # tables that are not there yet, and no room for them: this process does without
            self._no_room = True
            with self.medium.lock():
                self._say_why(e)
            return False
        return True

    def _map(self, rowed: bool) -> None:
        at = _data_at(self.samples)
        columns: list[np.ndarray[Any, Any]] = []
        blocks: list[np.ndarray[Any, Any]] = []
        begins: list[int] = []
        if rowed:
            words = self._words[: int(self._head[WORDS_LEN])].tobytes().decode()
            made, rows = self._layout_of(words), int(self._head[ROWS])
            for j, size in enumerate(made.sizes):
                assert size is not None
                begins.append(at)
                columns.append(self.medium.table(f"column-{j}", np.uint8, rows * size, at).reshape(rows, size))
                at += _page(rows * size)
            for j, c in enumerate(columns):
                blocks.append(self.medium.table(f"blocks-{j}", np.uint8, -(-c.size // BLOCK), at))
                at += _page(len(blocks[j]))
            if not self.medium.trusted:
                self._crc = self.medium.table("crc", np.uint32, rows, at)
            self._layout, self._tensors = made, _tensors(made, columns)
        self._columns, self._begins, self._blocks, self._heap_at = columns, begins, blocks, at
        self._heap = self.medium.table("heap", np.uint8, int(self._head[BUDGET]), at)  # last: it says that all is there

    def _layout_of(self, words: str) -> Layout:
        return layout(words, self.medium.trusted)

    def _take(self, samples: Samples, blocks: dict[int, np.ndarray[Any, Any]]) -> list[tuple[int, int]]:
        """Room for as many samples as fit: index and place of each. Called under the lock."""
        head, out = self._head, []
        for i in samples:
            if self.place[i]:
                continue  # somebody else was first
            at = self._room(len(blocks[i])) if i in blocks else self._row(i)
            if not at:
                if not head[REASON_LEN]:
                    self._say(f"the budget of {int(head[BUDGET]):,} bytes is full ({self.medium.kind})")
                break
            out.append((i, at))
        return out

    def _row(self, i: int) -> int:
        head = self._head
        row = i if head[WHOLE] else int(head[TAKEN])
        if row >= head[ROWS]:
            return 0
        for j, c in enumerate(self._columns):
            size = c.shape[1]
            for b in range(row * size // BLOCK, -(-(row + 1) * size // BLOCK)):
                if not self._blocks[j][b]:
                    n = min(BLOCK, c.size - b * BLOCK)
                    if not self._reserve(f"column-{j}", b * BLOCK, n):
                        return 0
                    self._blocks[j][b] = 1
        head[TAKEN] += 1
        return row + 1

    def _room(self, nbytes: int) -> int:
        """A place in the heap for a block."""
        assert self._heap is not None
        head, at = self._head, int(self._head[HEAP])
        end = at + nbytes
        if at < 0 or end > self._heap.size:
            return 0
        have = -(-at // BLOCK) * BLOCK
        if end > have and not self._reserve("heap", have, min(self._heap.size, -(-end // BLOCK) * BLOCK) - have):
            return 0
        head[HEAP] = end
        return -(at + 1)

    def _reserve(self, name: str, at: int, nbytes: int) -> bool:
        head = self._head
        if head[USED] + nbytes > int(head[BUDGET]) * max(1, int(head[JOINED])) // max(1, int(head[RANKS])):
            return False
        if self.medium.kind == "RAM" and head[USED] >= head[LOOKED]:
            head[LOOKED] = head[USED] + LOOK
            free = resources.memory_available()
            if free < SPARE + LOOK:
                self._say(f"no more is let in: {free >> 20:,} MB of memory are left, of which {SPARE >> 20} stay free")
                return False
        self.medium.reserve(name, at, nbytes)
        head[USED] += nbytes
        return True

    def __reduce__(self) -> Any:
        return Store, (self.medium, self.samples, int(self._head[BUDGET]), self._squeeze)

    def _write_row(self, i: int, at: int, leaves: list[Leaf]) -> None:
        for begin, c, leaf in zip(self._begins, self._columns, leaves, strict=True):
            if isinstance(self.medium, Memory):
                self.medium.write(begin + (at - 1) * c.shape[1], leaf)
            else:
                c[at - 1] = leaf
        if self._crc is not None:
            self._crc[at - 1] = self._checksum(i, leaves)

    def _write_block(self, at: int, block: np.ndarray[Any, Any]) -> None:
        assert self._heap is not None
        if isinstance(self.medium, Memory):
            self.medium.write(self._heap_at + at, block)
        else:
            self._heap[at : at + len(block)] = block


def _tensors(made: Layout, columns: list[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
    """Columns as tensors of samples, where a batch is one gather from each."""
    out = []
    for c, dtype, shape, strides in zip(columns, made.dtypes, made.shapes, made.strides, strict=True):
        if not made.stacks or dtype is None or strides is None:
            return []
        flat = torch.from_numpy(c).view(dtype)
        out.append(flat.as_strided((len(c), *shape), (flat.shape[1], *strides)))
    return out


def describe(account: StoreStats) -> str:
    """An account in words, on one line."""
    share = account.filled / max(1, account.samples)
    words = f"{account.filled:,} of {account.samples:,} samples ({share:.0%}) in {account.nbytes / 1e6:,.1f} MB"
    words += ", compressed" * account.compressed
    return f"{words}; {account.reason}" if account.reason else words
