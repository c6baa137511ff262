"""``share``: a large Python list as one shared, read-only buffer.

Accessing an object writes its reference count, so each forked worker copies a list of small objects page by page;
``gc.freeze`` does not help. Here the items are pickled into anonymous shared memory (memfd_create(2)), and each is
unpickled on access. Spawn and forkserver pass only a descriptor to the workers.
"""

from __future__ import annotations

import array
import itertools
import mmap
import operator
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .errors import UsageError, one_line

WRITE_BYTES = 1 << 20  # write buffer for items
NOT_SHAREABLE: list[tuple[str, str]] = [
    ("dict", "share(list(d.items())) gives a list of pairs; __getitem__ gets an index, so number the keys once"),
    ("ndarray", "it is one block already, which fork does not copy"),
    ("Tensor", "it is one block already, which fork does not copy; .share_memory_() for spawn"),
    ("set", "a set has no order: share(sorted(...)) gives a list"),
    ("frozenset", "a set has no order: share(sorted(...)) gives a list"),
    ("generator", "share(list(...))"),
    ("DataFrame", "share(frame.to_dict('records')), or keep its columns as arrays"),
]
# Kinds of columns; other columns use the ``array`` code of a number.
BOOL, TEXT, BYTES, PICKLED = "?", "s", "y", "p"
INTEGERS = (("b", 7), ("h", 15), ("i", 31), ("q", 63))  # and their bits


def share(obj: Any) -> Any:
    """Returns a read-only list of the same items in one shared buffer.

    Args:
        obj: a list or a tuple. Items may be anything that pickle accepts.

    Returns:
        A ``SharedList``. Each access to an item makes a new object: changing it changes nothing.

    Raises:
        UsageError: another type, or an item that cannot be shared; the message names it.

    Example:
        >>> names = share([{"path": "a.jpg", "label": 1}, {"path": "b.jpg", "label": 0}])
        >>> len(names), names[1]["path"], names[:1][0]["label"]
        (2, 'b.jpg', 1)
    """
    if isinstance(obj, SharedList):
        return obj
    if isinstance(obj, (list, tuple)):
        return SharedList._of(obj)
    remedies = [remedy for name, remedy in NOT_SHAREABLE if name in (t.__name__ for t in type(obj).__mro__)]
    raise UsageError(
        f"share() needs a list or a tuple, not {type(obj).__name__}: " + (remedies[0] if remedies else repr(obj)[:80])
    )


# -- memory

_serials = itertools.count()


class _Memory:
    """Anonymous shared memory, read-only."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.serial = next(_serials)  # unique within this process
        self.map: Any = mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b""
        weakref.finalize(self, os.close, fd).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _attached, (reduction.DupFd(self.fd), self.size)
        return _copied, (bytes(self.map),)


def _attached(fd: Any, size: int) -> _Memory:
    return _Memory(fd.detach(), size)


def _copied(data: bytes) -> _Memory:
    with _new_memory() as out:
        out.write(data)
        return _finished(out)


def _new_memory() -> BinaryIO:
    """Anonymous writable memory; ``_finished`` turns it into a ``_Memory``."""
    return open(os.memfd_create("stoker-share", os.MFD_CLOEXEC), "wb", WRITE_BYTES)


def _finished(out: BinaryIO) -> _Memory:
    out.flush()
    return _Memory(os.dup(out.fileno()), out.tell())


def _align(out: BinaryIO) -> None:
    """Pads to a multiple of 8."""
    out.write(bytes(-out.tell() % 8))


# -- columns


class Column(NamedTuple):
    """Where one value of every item is stored."""

    kind: str  # TEXT, BYTES, PICKLED, or the ``memoryview`` format of a number or bool
    start: int  # its first byte
    nbytes: int  # of the values, in total
    ends: str  # ``memoryview`` format of the table behind them of their end offsets; "" if all have one size

    def reader(self, memory: memoryview, count: int) -> Callable[[int], Any]:
        """Returns a function that reads an item's value."""
        data = memory[self.start : self.start + self.nbytes]
        if not self.ends:
            return data.cast(self.kind).__getitem__ if count else data.__getitem__  # type: ignore[call-overload]
        table = self.start + self.nbytes + -self.nbytes % 8
        whole = memory[table : table + (count + 1) * struct.calcsize(self.ends)]
        ends: memoryview[int] = whole.cast(self.ends)  # type: ignore[call-overload]
        if self.kind == TEXT:
            return lambda i: str(data[ends[i] : ends[i + 1]], "utf-8", "surrogatepass")
        if self.kind == BYTES:
            return lambda i: bytes(data[ends[i] : ends[i + 1]])
        return lambda i: pickle.loads(data[ends[i] : ends[i + 1]])


def _write_column(out: BinaryIO, values: Sequence[Any], key: str = "") -> Column:
    """Writes one value of every item. ``key`` names the value in errors."""
    kind, start = _kind(values), out.tell()
    if kind not in (TEXT, BYTES, PICKLED):
        out.write(array.array("B" if kind == BOOL else kind, values))
        nbytes = out.tell() - start
        _align(out)
        return Column(kind, start, nbytes, "")
    ends = np.zeros(len(values) + 1, np.uint64)
    nbytes = 0
    for i, value in enumerate(values):
        nbytes += out.write(_encoded(value, kind, f"item {i}{key}"))
        ends[i + 1] = nbytes
    _align(out)
    small = nbytes < 1 << 32
    out.write((ends.astype(np.uint32) if small else ends).data)
    _align(out)
    return Column(kind, start, nbytes, "I" if small else "Q")


def _kind(values: Sequence[Any]) -> str:
    kinds = {type(v) for v in values}
    if kinds == {int}:
        least, most = min(values), max(values)
        return next((code for code, bits in INTEGERS if -(1 << bits) <= least and most < 1 << bits), PICKLED)
    if len(kinds) != 1:
        return PICKLED
    return {str: TEXT, bytes: BYTES, float: "d", bool: BOOL}.get(kinds.pop(), PICKLED)


def _encoded(value: Any, kind: str, name: str) -> bytes:
    if kind == BYTES:
        return bytes(value)
    if kind == TEXT:
        return str(value).encode("utf-8", "surrogatepass")
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as e:
        raise UsageError(
            f"{name} ({type(value).__name__}) cannot be shared: {one_line(e)}. Share what it is made from (a path, "
            "numbers) and create it in __getitem__"
        ) from e


class SharedList(Sequence[Any]):
    """A read-only list in shared memory; made by ``share``. Slices are views of the same memory. If all items are dicts
    with the same keys, each key becomes a column, numeric if all its values are numbers of one type. Such an item takes
    no more than its values."""

    __slots__ = ("_columns", "_count", "_fields", "_keys", "_memory", "_places")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, memory: _Memory, places: range, count: int, keys: tuple[Any, ...] | None, columns: list[Column]
    ) -> None:
        self._memory = memory
        self._places = places  # of the items of this slice
        self._count = count  # items of the whole list
        self._keys = keys
        self._columns = columns
        readers = [c.reader(memoryview(memory.map), count) for c in columns]
        self._fields = tuple(zip(keys or [None], readers, strict=True))

    @classmethod
    def _of(cls, items: Sequence[Any]) -> SharedList:
        first = items[0] if items else None
        keys = tuple(first) if type(first) is dict and first else None
        if keys is not None and not all(type(x) is dict and tuple(x) == keys for x in items):
            keys = None
        with _new_memory() as out:
            if keys is None:
                columns = [_write_column(out, items)]
            else:
                columns = [_write_column(out, [x[key] for x in items], f"[{key!r}]") for key in keys]
            return cls(_finished(out), range(len(items)), len(items), keys, columns)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = object.__new__(SharedList)
            for name in self.__slots__:
                setattr(part, name, getattr(self, name))
            part._places = self._places[index]
            return part
        try:
            place = self._places[index]
        except IndexError:
            raise IndexError("list index out of range") from None
        if self._keys is None:
            return self._fields[0][1](place)
        return {key: read(place) for key, read in self._fields}

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self._places)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, SharedList)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        return f"<SharedList of {len(self):,} items in {self._memory.size:,} shared bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedList, (self._memory, self._places, self._count, self._keys, self._columns)

    def _stoker_children(self) -> Iterator[tuple[str, object]]:
        yield ".memory", self._memory.serial  # its contents cannot change, but it can be replaced

    def __copy__(self) -> SharedList:
        return self

    def __deepcopy__(self, memo: object) -> SharedList:
        return self
