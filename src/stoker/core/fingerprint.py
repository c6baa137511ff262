"""``Fingerprint``: whether an object has changed since it was last inspected, and where.

It is fast and heuristic. It compares plain values, tensors, arrays, containers and code, down to eight levels:

- Arrays, tensors and ctypes values up to 64 kB by checksum; larger tensors by address and version.
- Larger arrays by 64 of their values; those of up to 32 MB in memory also by their sum, in a few ms.
- Containers of up to 10,000 plain values, or tuples of them, as a whole; larger ones by 64 items.
- Tables of pandas and polars by their columns, in the same way.

For a digest that is the same in other processes and runs see ``staging/inputs.py``.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import sys
import types
import zlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .marked_code import original
from .object_tree import CONTAINERS, DEPTH, PLAIN, VALUES, WIDTH, Table, children, is_table

ROOT = "dataset"  # the path of the object itself
NODES = 20_000  # objects visited at most
WHOLE = 10_000  # containers of up to this many items are compared as a whole
FEW = 64  # items of a larger container, or values of a larger array
DATA = (torch.Tensor, np.ndarray, *CONTAINERS, *(t for t in PLAIN if t is not type(None)))
ARRAY_BYTES = 1 << 16  # up to this size, the checksum of an array also depends on the order of its values
SUMMED_BYTES = 1 << 25  # up to this size, all of an array is summed

PartsByPath = dict[str, object]  # path -> a plain value, or a _Part


class _Part(NamedTuple):
    """A value that is not plain."""

    text: str  # readable description
    identity: object  # what is compared
    is_code: bool = False  # callable
    is_data: bool = False  # a nonempty container, an array or a tensor


class Fingerprint:
    """Snapshot of an object. ``skip``: paths to ignore, with everything below them. ``shared``: whether to compare
    memory that processes share."""

    def __init__(self, obj: object, *, skip: Collection[str] = (), shared: bool = True) -> None:
        self.places: dict[int, str] = {}  # paths of objects, by id
        self._skip = skip
        self._shared = shared
        self._parts: PartsByPath = {}
        self._visit(obj, ROOT, DEPTH)

    def _visit(self, obj: object, path: str, depth: int) -> None:
        if type(obj) in PLAIN:
            self._parts[path] = obj
            return
        if isinstance(obj, VALUES):
            self._parts[path] = _Part(repr(obj)[:60], obj)
            return
        if id(obj) in self.places or not depth or len(self.places) >= NODES:
            return
        self.places[id(obj)] = path
        part, has_children = self._part(obj)
        if part is not None:
            self._parts[path] = part
        if not has_children:
            return
        for step, inner in children(obj):
            if path + step in self._skip or isinstance(getattr(type(obj), step[1:], None), functools.cached_property):
                continue
            self._visit(inner, path + step, depth - 1)

    def _part(self, obj: object) -> tuple[_Part | None, bool]:
        """Returns what to compare for the object itself, if anything, and whether to descend into its attributes or
        items."""
        if isinstance(obj, torch.Tensor):
            if not self._shared and obj.is_shared():
                return None, False
            return _Part("a tensor", (tuple(obj.shape), obj.dtype, _of_tensor(obj)), is_data=True), False
        if isinstance(obj, np.ndarray):
            return _Part("an array", (obj.shape, obj.dtype.str, _of_array(obj)), is_data=True), False
        shared = ctypes_bytes(obj) if self._shared else None
        if shared is not None:
            return _Part("a value in shared memory", _of_array(shared), is_data=True), False
        if isinstance(obj, CONTAINERS):
            text = f"a {type(obj).__name__} of {len(obj)}"
            return _Part(text, _of_container(obj), is_data=len(obj) > 0), len(obj) <= WIDTH
        if is_table(obj):
            return _Part(f"a {type(obj).__name__} of {len(obj)}", (type(obj), _of_table(obj)), is_data=True), False
        if isinstance(obj, types.FunctionType):
            return _Part(obj.__qualname__, original(obj.__code__), is_code=True), True
        if type(obj).__module__ != "builtins":
            is_code = callable(obj) and not hasattr(type(obj), "close")  # sqlite3 connections are callable
            return _Part(f"a {type(obj).__name__}", type(obj), is_code), True
        return None, True

    def changed(self, obj: object) -> list[str]:
        """Describes the changes in the same object: ``["dataset.epoch was 0 and is 1"]``. See ``changed_since``."""
        return self.changed_since(Fingerprint(obj, skip=self._skip, shared=self._shared))

    def opened(self, later: Fingerprint) -> PartsByPath:
        """Parts that were None or missing and are set in a later fingerprint, by path without the root."""
        new = ((path, part) for path, part in later._parts.items() if self._parts.get(path) is None)
        return {
            path.removeprefix(ROOT): part
            for path, part in new
            if part is not None and not (isinstance(part, _Part) and part.is_code)
        }

    def settled(self, later: Fingerprint) -> PartsByPath:
        """Data that differ in a later fingerprint, with their later values, by path without the root."""
        found = ((path, old, later._parts.get(path)) for path, old in self._parts.items())
        return {
            path.removeprefix(ROOT): new
            for path, old, new in found
            if old is not None and new is not None and _differ(old, new) and not _is_class(new)
        }

    def changed_since(self, later: Fingerprint) -> list[str]:
        """Describes the changes in a later fingerprint of the same object. Ignores lazy initialization: None that
        became an object, and private names that were or became None."""
        out = []
        for path, new in later._parts.items():
            if path not in self._parts and self._is_new_attribute(path, new):
                out.append(f"{path} is {_text(new)}")
        for path, old in self._parts.items():
            if path not in later._parts:
                continue
            new = later._parts[path]
            is_lazy = "._" in path and (old is None or new is None)
            if _differ(old, new) and not is_lazy:
                out.append(_change(path, old, new))
        return out

    def added_or_changed_since(self, later: Fingerprint) -> list[str]:
        """Like ``changed_since``, but includes additions, and data set where there was None."""
        out = []
        for path, new in later._parts.items():
            if path not in self._parts:
                is_lazy = "._" in path and isinstance(new, _Part) and not new.is_data
                if not is_lazy:
                    out.append(f"{path} is {_text(new)}")
                continue
            old = self._parts[path]
            was_set = old is None and isinstance(new, _Part) and new.is_data
            if was_set or _differ(old, new):
                out.append(_change(path, old, new))
        return out

    def _is_new_attribute(self, path: str, new: object) -> bool:
        """Whether a public attribute with a plain value was added to an object that already existed."""
        owner, _, name = path.rpartition(".")
        is_public = name.isidentifier() and "._" not in path
        return type(new) in PLAIN and is_public and isinstance(self._parts.get(owner), _Part)


def _is_class(part: object) -> bool:
    """Whether an object is compared by its class or code only, not by its contents."""
    return isinstance(part, _Part) and isinstance(part.identity, (type, types.CodeType))


def _change(path: str, old: object, new: object) -> str:
    return f"{path} was {_text(old)} and is {_text(new)}" if _text(old) != _text(new) else path


def _text(value: object) -> str:
    return value.text if isinstance(value, _Part) else repr(value)[:60]


def _differ(old: object, new: object) -> bool:
    if old is None or new is None:
        other = new if old is None else old
        return other is not None and (not isinstance(other, _Part) or other.is_code)
    if type(old) is type(new):
        return bool(new != old and new == new)  # NaN counts as unchanged
    return True


def _of_tensor(t: torch.Tensor) -> object:
    plain = type(t) is torch.Tensor and t.device.type == "cpu" and t.layout is torch.strided and not t.is_quantized
    if plain and t.numel() * t.element_size() <= ARRAY_BYTES:
        with torch.no_grad():
            dense = t.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
            return zlib.crc32(dense.view(torch.uint8).numpy().data)
    return t.data_ptr() if plain else id(t), t._version


def _of_array(x: NDArray[np.generic]) -> object:
    if x.dtype.hasobject:
        return _of_container(x.reshape(-1)[:WHOLE].tolist())
    if x.nbytes <= ARRAY_BYTES:
        return zlib.crc32(x.tobytes())
    if not x.flags.c_contiguous:
        return x[:1].tobytes()
    some = x.reshape(-1)[:: max(1, x.size // FEW)].tobytes()
    if x.nbytes > SUMMED_BYTES or isinstance(x, np.memmap) or isinstance(x.base, (np.memmap, mmap.mmap)):
        return some
    words, rest = np.split(x.reshape(-1).view(np.uint8), [x.nbytes // 8 * 8])
    return some, int(np.add.reduce(words.view(np.uint64))), rest.tobytes()


def _of_table(x: Table) -> object:
    """The contents of each column and of the index."""
    names: list[object] = list(getattr(x, "columns", ()))
    if hasattr(x, "get_columns"):  # polars
        columns = x.get_columns()
    else:
        columns = [x.iloc[:, k] for k in range(min(WIDTH, len(names)))] if names else [x]
        columns += [x.index] if hasattr(x, "iloc") else []
    return x.shape, hash(tuple(map(str, names))), [_of_column(column) for column in columns]


def _of_column(x: Table) -> object:
    is_numbers = isinstance(x.dtype, np.dtype) and not x.dtype.hasobject
    rows = x if is_numbers or len(x) <= WHOLE else x[:: len(x) // FEW]
    values = rows.to_numpy()
    return _of_container(values.tolist()) if values.dtype.hasobject else _of_array(values)


def ctypes_bytes(x: object) -> NDArray[np.uint8] | None:
    """The bytes of ``multiprocessing.Value`` and ``Array``, and of ctypes values; None for anything else."""
    ctypes = sys.modules.get("ctypes")
    if ctypes is None:
        return None
    if type(x).__module__ == "multiprocessing.sharedctypes" and hasattr(x, "get_obj"):
        x = x.get_obj()
    kinds = ctypes._SimpleCData, ctypes.Array, ctypes.Structure
    return np.frombuffer(x, np.uint8) if isinstance(x, kinds) and ctypes.sizeof(x) else None


def _of_container(x: Collection[object]) -> int:
    """Hashes the items if they are plain or tuples of plain values. Otherwise they are visited one by one; if there are
    too many for that, hashes which of them are data, which detects a list of None being filled with arrays."""
    items: Iterable[object] = x.items() if isinstance(x, dict) else x
    if len(x) > WHOLE:
        items = x[:: len(x) // FEW] if isinstance(x, (list, tuple)) else itertools.islice(items, FEW)
    try:
        found = tuple(items)
        if _all_plain(found[:FEW]) and _all_plain(found):
            return hash(found)
        if len(x) <= WIDTH:
            return 0
        data = {kind: issubclass(kind, DATA) for kind in set(map(type, found))}
        return hash(tuple(map(data.__getitem__, map(type, found))))
    except Exception:  # a user-defined container class
        return 0


def _all_plain(items: tuple[object, ...]) -> bool:
    kinds = set(map(type, items))
    if tuple in kinds:
        tuples = [v for v in items if type(v) is tuple]
        kinds = kinds - {tuple} | set(map(type, itertools.chain.from_iterable(tuples)))
    return kinds.issubset(PLAIN)
