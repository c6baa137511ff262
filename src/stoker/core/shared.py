"""``share``: a big Python list or dict as one shared buffer, read-only.

A list of small objects is copied by each worker that fork makes, page by page, because looking at an object writes its
reference count; ``gc.freeze`` does not help. Here the items lie pickled in anonymous shared memory (memfd_create(2)),
and one is unpickled when it is asked for. Under spawn and forkserver workers get a descriptor
and nothing else.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import mmap
import numbers
import operator
import os
import pickle
import struct
import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

import numpy as np

from .errors import UsageError

WRITE_BYTES = 1 << 20  # items are gathered to so much before they are written
KEY_TYPES = "str, bytes, numbers, None and tuples of these"
NOT_SHAREABLE: list[tuple[str, str]] = [
    ("ndarray", "it is one block already, which fork does not copy"),
    ("Tensor", "it is one block already, which fork does not copy; .share_memory_() for spawn"),
    ("set", "a set has no order: share(sorted(...)) gives a list"),
    ("frozenset", "a set has no order: share(sorted(...)) gives a list"),
    ("generator", "share(list(...))"),
    ("DataFrame", "share(frame.to_dict('records')), or keep its columns as arrays"),
]


def share(obj: Any) -> Any:
    """A read-only list or dict of the same items in one shared buffer.

    Args:
        obj: a list, a tuple or a dict. Items may be whatever pickle takes; a dict's keys are str, bytes, numbers,
            None or tuples of these.

    Returns:
        A ``SharedList`` or ``SharedDict``. Each look at an item makes a new object: changing it changes nothing.

    Raises:
        UsageError: another type, or an item or key that cannot be shared; the message names it.

    Example:
        >>> names = share([{"path": "a.jpg", "label": 1}, {"path": "b.jpg", "label": 0}])
        >>> len(names), names[1]["path"], names[:1][0]["label"]
        (2, 'b.jpg', 1)
    """
    if isinstance(obj, (SharedList, SharedDict)):
        return obj
    if isinstance(obj, (list, tuple)):
        return SharedList._of(obj)
    if isinstance(obj, dict):
        return SharedDict._of(obj)
    remedies = [words for name, words in NOT_SHAREABLE if name in (t.__name__ for t in type(obj).__mro__)]
    raise UsageError(
        f"share takes a list, a tuple or a dict, not {type(obj).__name__}: "
        + (remedies[0] if remedies else repr(obj)[:80])
    )


_serials = itertools.count()


class _Memory:
    """Anonymous shared memory, written once, then only read."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size, self.serial = fd, size, next(_serials)
        self.map = mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b""
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def of(cls, parts: Iterable[Any]) -> _Memory:
        fd = os.memfd_create("stoker-share", os.MFD_CLOEXEC)
        try:
            size = 0
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    done = os.write(fd, view)
                    size, view = size + done, view[done:]
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    def __reduce__(self) -> Any:
        if get_spawning_popen() is not None:
            return _attached, (reduction.DupFd(self.fd), self.size)
        return _copied, (bytes(self.map),)  # to wherever a plain pickle goes


def _attached(fd: Any, size: int) -> _Memory:
    return _Memory(fd.detach(), size)


def _copied(data: bytes) -> _Memory:
    return _Memory.of([data])


class Column(NamedTuple):
    """Where one value of every item lies.

    Attributes:
        kind: how a value is read: a ``memoryview`` format for numbers and bools, "s" text, "y" bytes, "p" pickled.
        at: its first byte.
        data: bytes of values.
        ends: ``memoryview`` format of the table of ends behind them, "" where values have one size.
    """

    kind: str
    at: int
    data: int
    ends: str


class SharedList(Sequence[Any]):
    """A read-only list in shared memory; made by ``share``. Slices are views on the same memory.

    Where all items are dicts with the same keys, each key is a column, of numbers where all its values are numbers of
    one type: such an item takes no more than its values do.
    """

    __slots__ = ("_columns", "_count", "_fields", "_keys", "_memory", "_places")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, memory: _Memory, places: range, count: int, keys: tuple[Any, ...] | None, columns: list[Column]
    ) -> None:
        self._memory, self._places, self._count, self._keys, self._columns = memory, places, count, keys, columns
        readers = [_reader(memoryview(memory.map), c, count) for c in columns]
        self._fields = tuple(zip(keys or [None], readers, strict=True))

    @classmethod
    def _of(cls, items: Sequence[Any], names: Sequence[Any] | None = None) -> SharedList:
        first = items[0] if items else None
        keys = tuple(first) if type(first) is dict and first else None
        if keys is not None and not all(type(x) is dict and tuple(x) == keys for x in items):
            keys = None
        columns: list[Column] = []
        memory = _Memory.of(_packed(items, keys, columns, names))
        return cls(memory, range(len(items)), len(items), keys, columns)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = object.__new__(SharedList)
            part._memory, part._count, part._keys = self._memory, self._count, self._keys
            part._columns, part._fields = self._columns, self._fields
            part._places = self._places[index]
            return part
        try:
            at = self._places[index]
        except IndexError:
            raise IndexError("list index out of range") from None
        if self._keys is None:
            return self._fields[0][1](at)
        return {key: read(at) for key, read in self._fields}

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self._places)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, SharedList)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        return f"<SharedList of {len(self):,} items in {self._memory.size:,} shared bytes>"

    def __reduce__(self) -> Any:
        return SharedList, (self._memory, self._places, self._count, self._keys, self._columns)

    def _stoker_children(self) -> Iterator[tuple[str, Any]]:
        yield ".memory", self._memory.serial  # it cannot change, but be another

    def __copy__(self) -> SharedList:
        return self

    def __deepcopy__(self, memo: Any) -> SharedList:
        return self  # nobody can change it


def _reader(memory: memoryview, c: Column, count: int) -> Callable[[int], Any]:
    data = memory[c.at : c.at + c.data]
    number: Any = c.kind
    if not c.ends:
        return data.cast(number).__getitem__ if count else data.__getitem__
    at = c.at + c.data + -c.data % 8
    table: Any = c.ends
    ends: Any = memory[at : at + (count + 1) * struct.calcsize(c.ends)].cast(table)
    if c.kind == "s":
        return lambda i: str(data[ends[i] : ends[i + 1]], "utf-8", "surrogatepass")
    if c.kind == "y":
        return lambda i: bytes(data[ends[i] : ends[i + 1]])
    return lambda i: pickle.loads(data[ends[i] : ends[i + 1]])


def _packed(
    items: Sequence[Any], keys: tuple[Any, ...] | None, columns: list[Column], names: Sequence[Any] | None
) -> Iterator[Any]:
    """The bytes of all columns, one after the other; says in ``columns`` where each lies. ``names`` are for errors."""
    at = 0
    for key in keys or [None]:
        values = items if keys is None else [x[key] for x in items]
        kind = _kind(values)
        if kind not in "syp":
            data = array.array("B" if kind == "?" else kind, values)
            columns.append(Column(kind, at, len(values) * data.itemsize, ""))
            yield data
            yield bytes(-columns[-1].data % 8)
            at += columns[-1].data + -columns[-1].data % 8
            continue
        ends = np.zeros(len(values) + 1, np.uint64)
        size = 0
        pending = bytearray()
        for i, value in enumerate(values):
            pending += _bytes(value, kind, i if names is None else names[i], key)
            ends[i + 1] = size + len(pending)
            if len(pending) >= WRITE_BYTES:
                yield bytes(pending)
                size += len(pending)
                pending.clear()
        yield bytes(pending)
        size += len(pending)
        yield bytes(-size % 8)
        table = ends.astype(np.uint32) if size < 1 << 32 else ends
        yield table
        yield bytes(-table.nbytes % 8)
        columns.append(Column(kind, at, size, "I" if size < 1 << 32 else "Q"))
        at += size + -size % 8 + table.nbytes + -table.nbytes % 8


def _kind(values: Sequence[Any]) -> str:
    kinds = {type(v) for v in values}
    if kinds == {int}:
        least, most = min(values), max(values)
        for code, bits in (("b", 7), ("h", 15), ("i", 31), ("q", 63)):
            if -(1 << bits) <= least and most < 1 << bits:
                return code
    return {str: "s", bytes: "y", float: "d", bool: "?"}.get(kinds.pop(), "p") if len(kinds) == 1 else "p"


def _bytes(value: Any, kind: str, name: Any, key: Any) -> bytes:
    if kind == "s":
        return value.encode("utf-8", "surrogatepass")  # type: ignore[no-any-return]
    if kind == "y":
        return value  # type: ignore[no-any-return]
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as e:
        what = f"item {name!r}" if key is None else f"item {name!r}[{key!r}]"
        raise UsageError(
            f"{what} ({type(value).__name__}) cannot be shared: {type(e).__name__}: {e}. "
            "Keep what it is made from (a path, numbers) and make it in __getitem__"
        ) from e


class SharedDict(Mapping[Any, Any]):
    """A read-only dict in shared memory; made by ``share``. Iterates in the order of the dict it was made from."""

    __slots__ = ("_hashes", "_keys", "_order", "_table", "_values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, keys: SharedList, values: SharedList, table: _Memory) -> None:
        self._keys, self._values, self._table = keys, values, table
        both = np.frombuffer(table.map, np.uint64) if table.size else np.zeros(0, np.uint64)
        self._hashes, self._order = both[: len(keys)], both[len(keys) :]

    @classmethod
    def _of(cls, items: dict[Any, Any]) -> SharedDict:
        hashes = np.fromiter((_hash(k) for k in items), np.uint64, len(items))
        order = np.argsort(hashes, kind="stable").astype(np.uint64)
        table = _Memory.of([hashes[order.astype(np.int64)], order])
        keys = list(items)
        return cls(SharedList._of(keys), SharedList._of(list(items.values()), keys), table)

    def _find(self, key: Any) -> int | None:
        h = np.uint64(_hash(key))
        at = int(np.searchsorted(self._hashes, h))
        while at < len(self._hashes) and self._hashes[at] == h:
            place = int(self._order[at])
            if self._keys[place] == key:
                return place
            at += 1
        return None

    def __getitem__(self, key: Any) -> Any:
        hash(key)  # what cannot be a key of a dict is the same TypeError
        place = None
        with contextlib.suppress(UsageError):
            place = self._find(key)
        if place is None:
            raise KeyError(key)
        return self._values[place]

    def __contains__(self, key: object) -> bool:
        hash(key)
        try:
            return self._find(key) is not None
        except UsageError:
            return False

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def values(self) -> ValuesView[Any]:
        return _Values(self)

    def items(self) -> ItemsView[Any, Any]:
        return _Items(self)

    def __repr__(self) -> str:
        return f"<SharedDict of {len(self):,} items in {self._values._memory.size:,} shared bytes>"

    def __reduce__(self) -> Any:
        return SharedDict, (self._keys, self._values, self._table)

    def _stoker_children(self) -> Iterator[tuple[str, Any]]:
        yield ".memory", self._table.serial

    def __copy__(self) -> SharedDict:
        return self

    def __deepcopy__(self, memo: Any) -> SharedDict:
        return self


class _Values(ValuesView[Any]):
    def __iter__(self) -> Iterator[Any]:
        m: Any = self._mapping  # type: ignore[attr-defined]
        return iter(m._values)


class _Items(ItemsView[Any, Any]):
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        m: Any = self._mapping  # type: ignore[attr-defined]
        return zip(m._keys, m._values, strict=True)


def _hash(key: Any) -> int:
    """64 bits that are the same in every process, and the same for keys that are equal."""
    digest = hashlib.blake2b(_canonical(key), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _canonical(key: Any) -> bytes:
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if key is None:
        return b"n"
    if isinstance(key, (numbers.Number, np.generic)):
        # Python's hash of a number is the same for equal numbers of any type, and in every process; of a NaN it is not
        return b"i%d" % hash(key) if key == key else b"f"
    if isinstance(key, tuple):
        parts = [_canonical(k) for k in key]
        return b"t" + b"".join(len(p).to_bytes(8, "little") + p for p in parts)
    raise UsageError(f"a key of type {type(key).__name__} cannot be shared ({key!r}): {KEY_TYPES} can")
