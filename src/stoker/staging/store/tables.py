"""Storage of the samples' bytes: in rows of columns, or as blocks in a heap."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...core import resources
from .block import is_intact, pack, parts
from .decode import Layout, layout
from .head import StoreHead, StoreState
from .spec import Leaf, Number

PAGE = 4096
BLOCK = 1 << 16  # bytes reserved at once: few calls, little waste in a set that is never read as a whole
CHECK_MEMORY = 64 << 20  # bytes reserved between two checks of free memory

Samples: TypeAlias = dict[int, tuple[str, list[Leaf]]]  # by index: the result of ``encode.take``


class Medium(Protocol):
    """Backing storage for tables: ``memory.MemoryTables`` or ``folder.Folder``."""

    trusted: bool  # samples are known to be unmodified: no checksums
    pickles: bool  # samples may contain pickled values
    writable: bool
    mapped: bool  # tables are arrays; else those of samples are ``block.Readable`` only
    kind: str

    @property
    def lock(self) -> Callable[[], contextlib.AbstractContextManager[None]]: ...
    def table(self, name: str, dtype: type[Number], count: int, start: int) -> NDArray[Number]: ...
    def reserve(self, name: str, offset: int, nbytes: int) -> None: ...
    def write(self, table: NDArray[np.uint8], start: int, offset: int, data: NDArray[np.uint8]) -> None: ...
    def give_back(self, start: int) -> None: ...
    def seal(self) -> None: ...


class _Column(NamedTuple):
    """One leaf of all rows."""

    name: str  # of its table
    start: int  # of its table in memory
    data: Leaf  # all its bytes; ``block.Readable`` if the medium is not mapped
    size: int  # bytes of a row
    reserved: NDArray[np.uint8]  # 1 for each ``BLOCK`` bytes with reserved space


class Tables:
    """The columns and the heap of a store. Raises CacheError for damaged files, OSError if there is no space for the
    tables. A sample's location is its row + 1, or minus its offset in the heap - 1; 0 if it is not stored."""

    def __init__(self, medium: Medium, head: StoreHead, start: int) -> None:
        self._medium = medium
        self._head = head  # of the store, in which the way of storing is already decided
        self.layout: Layout | None = None  # of the samples in rows; None if all are blocks
        self.tensors: list[torch.Tensor] = []  # columns with a row per sample, for a gather; [] if samples do not stack
        self._columns: list[_Column] = []
        self._crc: NDArray[np.uint32] | None = None  # of each row; for files only
        if head.state == StoreState.ROWS:
            self.layout = layout(head.spec, medium.pickles)
            start = self._open_columns(self.layout, head.rows, start)
            if medium.mapped:
                self.tensors = _tensors(self.layout, [c.data.reshape(-1, c.size) for c in self._columns])
        self._heap_start = start  # offset of the table in memory
        self._heap: Leaf = medium.table("heap", np.uint8, head.budget, start)

    def _open_columns(self, made: Layout, rows: int, start: int) -> int:
        """Opens the columns. Returns the offset of their end."""
        for j, size in enumerate(made.sizes):
            assert size is not None
            name = f"column-{j}"
            data = self._medium.table(name, np.uint8, rows * size, start)
            reserved_start = start + _whole_pages(len(data))
            reserved = self._medium.table(f"blocks-{j}", np.uint8, -(-len(data) // BLOCK), reserved_start)
            self._columns.append(_Column(name, start, data, size, reserved))
            start = reserved_start + _whole_pages(len(reserved))
        if not self._medium.trusted:
            self._crc = self._medium.table("crc", np.uint32, rows, start)
        return start

    # -- reading

    def stored(self, location: int) -> tuple[Layout, list[Leaf]]:
        """Type of the sample at a location, and its leaves; in place, if the medium is mapped."""
        if location > 0:
            assert self.layout is not None
            return self.layout, self._row(location - 1)
        return parts(self._heap, -location - 1, self._medium.pickles)

    def _row(self, row: int) -> list[Leaf]:
        return [c.data[row * c.size : (row + 1) * c.size] for c in self._columns]

    def is_intact(self, i: int, location: int) -> bool:
        """Whether sample ``i`` is at this location of a file, unmodified, and no other sample will be written there."""
        head = self._head
        if location < 0:
            return is_intact(self._heap, head.heap_end, -location - 1, i)
        if self._crc is None or location > len(self._crc):  # a row, in a store without rows
            return False
        if head.row_is_index and location != i + 1:
            return False
        if not head.row_is_index and location > head.rows_taken:
            return False
        return bool(self._crc[location - 1] == self._checksum(i, self._row(location - 1)))

    def _checksum(self, i: int, leaves: Sequence[Leaf]) -> int:
        """crc32 of a row, its sample's index and its type."""
        assert self.layout is not None
        crc = zlib.crc32(b"%d:" % i + self.layout.type_spec.encode())
        for leaf in leaves:
            crc = zlib.crc32(leaf.data, crc)
        return crc

    # -- writing

    def blocks_of(self, samples: Samples) -> dict[int, Leaf]:
        """Blocks for those samples that do not have the type of the rows."""
        row_spec = self.layout.type_spec if self.layout is not None else None
        checked = not self._medium.trusted
        return {
            i: pack(type_spec, leaves, i, checked)
            for i, (type_spec, leaves) in samples.items()
            if type_spec != row_spec
        }

    def allocate(self, i: int, block: Leaf | None) -> int:
        """Reserves space for a sample: a row if it has no block. Hold the store's lock. Returns the location; 0 if
        there is no space. Raises OSError if the disk is full."""
        return self._allocate_row(i) if block is None else self._allocate_block(len(block))

    def _allocate_row(self, i: int) -> int:
        head = self._head
        row = i if head.row_is_index else head.rows_taken
        if row >= head.rows:
            return 0
        for c in self._columns:
            for b in range(row * c.size // BLOCK, -(-(row + 1) * c.size // BLOCK)):
                if not c.reserved[b]:
                    if not self._reserve(c.name, b * BLOCK, min(BLOCK, c.data.size - b * BLOCK)):
                        return 0
                    c.reserved[b] = 1
        head.rows_taken += 1
        return row + 1

    def _allocate_block(self, nbytes: int) -> int:
        head = self._head
        begin = head.heap_end
        end = begin + nbytes
        if begin < 0 or end > self._heap.size:
            return 0
        reserved = -(-begin // BLOCK) * BLOCK
        if end > reserved:
            wanted = min(self._heap.size, -(-end // BLOCK) * BLOCK)
            if not self._reserve("heap", reserved, wanted - reserved):
                return 0
        head.heap_end = end
        return -(begin + 1)

    def _reserve(self, table: str, offset: int, nbytes: int) -> bool:
        head = self._head
        budget = head.budget * max(1, head.ranks_joined) // max(1, head.ranks)
        if head.reserved + nbytes > budget:
            return False
        if self._medium.kind == "RAM" and head.reserved >= head.check_memory_at:
            head.check_memory_at = head.reserved + CHECK_MEMORY
            free, low = resources.memory_available(), resources.memory_low()
            if free < 2 * low:  # not ``low``: a cache freed at the next fluctuation would be useless
                words = f"{free >> 20:,} MB of memory are free, of which {low >> 20} MB must stay free"
                head.reason = f"no more samples are stored: {words}"
                return False
        self._medium.reserve(table, offset, nbytes)
        head.reserved += nbytes
        return True

    def write(self, i: int, location: int, leaves: list[Leaf], block: Leaf | None) -> None:
        """Writes a sample to the location from ``allocate``. Raises OSError if memory is exhausted."""
        if block is not None:
            self._medium.write(self._heap, self._heap_start, -location - 1, block)
            return
        for c, leaf in zip(self._columns, leaves, strict=True):
            self._medium.write(c.data, c.start, (location - 1) * len(leaf), leaf)
        if self._crc is not None:
            self._crc[location - 1] = self._checksum(i, leaves)


def _whole_pages(n: int) -> int:
    return -(-n // PAGE) * PAGE


def _tensors(made: Layout, columns: list[NDArray[np.uint8]]) -> list[torch.Tensor]:
    """Columns as tensors of samples; [] if samples do not stack."""
    out = []
    for column, dtype, shape, strides in zip(columns, made.dtypes, made.shapes, made.strides, strict=True):
        if not made.stacks or dtype is None or strides is None:
            return []
        flat = torch.from_numpy(column).view(dtype)
        out.append(flat.as_strided((len(column), *shape), (flat.shape[1], *strides)))
    return out
