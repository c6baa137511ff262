"""Digests of single values: plain ones, arrays, tensors, tables, files, and the pickled state of native objects; and
what differs between two walks over what making a sample may read (``inputs.Inputs``).

A digest covers every byte of the value. If that is impossible, ``opaque`` names the object.
"""

from __future__ import annotations

import array
import copyreg
import hashlib
import io
import mmap
import os
import re
import socket
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
import torch

from ..core.fingerprint import ctypes_bytes
from ..core.object_tree import PLAIN, VALUES, is_table
from .library_objects import (
    HANDLES,
    IGNORED,
    IMMUTABLE_MODULES,
    LIBRARY_STATES,
    NATIVE_CODE,
    Held,
    arrow_buffers,
    attributes_of,
    columns_of,
    file_stamp,
    is_bound,
    is_compiled_function,
    name_of_native,
    size_of_arrow,
    stamp_of_handle,
    token_of_plain,
)
from .users_code import is_library_class, token_of_code

MOST_BYTES = 4 << 30  # of arrays; more takes too long to digest before each epoch
MOST_MAPPED_BYTES = 256 << 20  # mapped from a file; for larger arrays the file's stamps count
MOST_ARROW_BYTES = 64 << 20  # larger objects, mostly mapped from a file, are compared by identity
DATASET = "dataset[0]"  # path of the dataset; those of global variables begin with dataset[1]
IMPORTED = "imported"


class Entry(NamedTuple):
    """One part of the inputs."""

    text: str  # readable description
    digest: object  # covers every byte; compared by ``==``
    is_opaque: bool = False  # the digest covers only the type


def readable(path: str) -> str:
    """Readable form of a path: "dataset.flags" for "dataset[0].flags", "conf.SIZE" for "dataset[1]['conf.SIZE']"."""
    path = re.sub(r"\.__reduce__\[\d+\]", "", path)  # the state of a library's object
    if path.startswith("dataset[1]['"):
        return path.removeprefix("dataset[1]['").replace("']", "", 1)
    return path.replace("dataset[0]", "dataset", 1)


class ValueDigests(ABC):
    """Entries for values without parts, and comparisons of entries. ``shared``, ...: as for ``Inputs``."""

    def __init__(self, shared: bool, across_runs: bool, digests: bool = True) -> None:
        self._digests = digests
        self.entries: dict[str, Entry] = {}  # by path: ``dataset[0].labels``
        self.opaque: dict[str, str] = {}  # objects without a complete digest, by path: "dataset.clahe is a cv2.CLAHE"
        self.handles: set[str] = set()  # paths of open files, databases, and objects whose state cannot be read
        self.of_thread: set[str] = set()  # paths of ``threading.local`` objects with plain data only
        self._depends_on_gradients = False  # holds tensors with requires_grad, so whether gradients are enabled matters
        self._shared = shared
        self._across_runs = across_runs
        self.nbytes = 0  # of all values, as far as they have been digested
        # By id: a number, the object (kept alive so that its id is not reused), and the path where it was found.
        self._seen: dict[int, tuple[int, object, str]] = {}

    @abstractmethod
    def _flat(self, x: object, *, plain: bool, path: str = "") -> bytes:
        """Digest of a value and all it contains."""

    def _leaf(self, x: Held, path: str) -> Entry | None:
        """The entry of a value without parts; None if it has parts."""
        if type(x) in PLAIN:
            return Entry(repr(x)[:60], token_of_plain(x))
        if isinstance(x, np.void) and not x.dtype.hasobject:  # its repr leaves out what is long
            return Entry("a record", (repr(x.dtype), x.tobytes()))
        if isinstance(x, VALUES) and is_library_class(type(x)):
            text = str(x) if isinstance(x, PurePath) else repr(x)  # a path caches its text
            zone = getattr(x, "tzinfo", None)
            more = () if zone is None else (self._flat(zone, plain=False, path=path),)
            return Entry(text[:60], (type(x).__name__, text, *more))
        if isinstance(x, np.ndarray):
            return self._array(x, path)
        if isinstance(x, torch.Tensor):
            return self._tensor(x, path)
        if isinstance(x, (bytearray, array.array)):
            code = getattr(x, "typecode", "")
            return Entry(f"a {type(x).__name__} of {len(x)}", (code, self._bytes_token(memoryview(x).cast("B"))))
        return self._library_object(x, path)

    def _library_object(self, x: Held, path: str) -> Entry | None:
        """The entry of an object whose class reveals its state."""
        if isinstance(x, types.CodeType):
            return Entry("code", token_of_code(x))
        if isinstance(x, np.ufunc) and all(set(loop) <= set("O->") for loop in x.types):  # from ``np.frompyfunc``
            return self._opaque_entry(path, x)
        if is_compiled_function(x) or (isinstance(x, (*IGNORED, *NATIVE_CODE)) and not is_bound(x)):
            return Entry(f"a {type(x).__name__}", name_of_native(x))
        for kind, state in LIBRARY_STATES.items():
            if type(x) is kind:
                return Entry(f"a {kind.__name__}", self._flat(state(x), plain=False, path=path))
        if is_table(x):
            return self._table(x, path)
        shared = ctypes_bytes(x)
        if shared is not None:
            return Entry("a value in shared memory", self._bytes_token(shared) if self._shared else "shared")
        if isinstance(x, (io.IOBase, mmap.mmap, socket.socket)):
            return self._file(x, path)
        of_package = self._of_package(x, type(x).__module__.partition(".")[0], path)
        if of_package is not None:
            return of_package
        if isinstance(x, (types.GeneratorType, types.CoroutineType)) or (
            hasattr(type(x), "__next__") and type(x).__module__ in ("builtins", "itertools")
        ):
            self.opaque[path] = f"{readable(path)} is an iterator ({type(x).__name__})"
            return Entry(f"a {type(x).__name__}", type(x).__name__, True)
        return None

    def _of_package(self, x: Held, package: str, path: str) -> Entry | None:
        """The entry of an object of a package that is known here; None for any other."""
        if package == "pyarrow" and (self._across_runs or size_of_arrow(x) <= MOST_ARROW_BYTES):
            described = type(x).__name__, repr(getattr(x, "schema", None) or getattr(x, "type", None) or x)
            return Entry(f"a {type(x).__name__}", (described, *map(self._bytes_token, arrow_buffers(x))))
        if package in IMMUTABLE_MODULES:
            self._seen.setdefault(id(x), (len(self._seen), x, ""))
            if self._across_runs:
                return self._opaque_entry(path, x)
            return Entry(f"a {type(x).__name__}", ("immutable", id(x)))
        if package in HANDLES:
            if self._across_runs and "sqlite3" in package:
                return self._opaque_entry(path, x, "is a connection, which may have functions of its own")
            stamp = stamp_of_handle(x, package)
            self.handles.add(path)
            return Entry(f"a {type(x).__name__}", (type(x).__name__, stamp)) if stamp else self._opaque_entry(path, x)
        return None

    def _array(self, x: Held, path: str) -> Entry:
        text = "an array"
        if isinstance(x, np.ma.MaskedArray):
            parts = self._array(np.asarray(x.data), path), self._array(np.ma.getmaskarray(x), path)
            return Entry(text, (type(x).__name__, repr(x.fill_value), *(part.digest for part in parts)))
        if x.dtype.hasobject:
            digest: object = self._flat(x.reshape(-1).tolist(), plain=False, path=path)
        elif isinstance(x, np.memmap) and x.nbytes > MOST_MAPPED_BYTES and getattr(x, "filename", None):
            if x.mode == "c":
                return self._opaque_entry(path, x, "is a large private map of a file")
            x.flush()  # else a second write to a page would not change the time of the last one
            digest = file_stamp(str(x.filename))  # its file is the input
        else:
            digest = self._bytes_token(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) if x.size else b""
        is_plain = type(x) in (np.ndarray, np.memmap)
        own = b"" if is_plain else self._flat(dict(attributes_of(x)), plain=False, path=path)
        described = repr(x.dtype), str(x.dtype.metadata or "")
        layout = x.shape, x.strides if x.size else (), x.flags.writeable
        return Entry(text, (type(x).__name__, *described, *layout, digest, own))

    def _tensor(self, x: torch.Tensor, path: str) -> Entry:
        text = "a tensor"
        self._depends_on_gradients |= x.requires_grad
        kind = type(x).__name__, str(x.dtype), tuple(x.shape), x.requires_grad, str(x.layout)
        if not self._shared and x.is_shared():
            return Entry(text, kind)
        if not x.is_cpu or x.is_quantized or x.is_nested:
            return self._opaque_entry(path, x, "is not a plain tensor" if x.is_cpu else f"is a tensor on {x.device}")
        with torch.no_grad():
            if x.layout is not torch.strided:
                parts = [x._indices(), x._values()] if x.layout is torch.sparse_coo else None
                if parts is None and x.layout is torch.sparse_csr:
                    parts = [x.crow_indices(), x.col_indices(), x.values()]
                if parts is None:
                    return self._opaque_entry(path, x, f"is a tensor with layout {x.layout}")
                return Entry(text, (kind, *(self._tensor(p, path).digest for p in parts)))
            plain = x.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
            numbers = self._bytes_token(plain.view(torch.uint8).numpy()) if x.numel() else b""
        more = self._flat(vars(x), plain=False, path=path) if vars(x) else b""
        if x.is_leaf and x.grad is not None:
            numbers += self._flat(x.grad.numpy(), plain=True)
        return Entry(text, (kind, x.stride() if x.numel() else (), numbers, more))

    def _table(self, x: Held, path: str) -> Entry:
        columns = [(str(name), column) for name, column in columns_of(x)]
        found = [(name, str(c.dtype), self._column(c, path)) for name, c in columns]
        labels = [(type(name).__name__, str(name)) for name in getattr(x, "columns", ())]
        names = [str(getattr(getattr(x, axis, None), "names", "")) for axis in ("columns", "index")]
        described = [labels, names, str(getattr(x, "name", "")), getattr(x, "attrs", None)]
        more = self._flat(described, plain=False, path=path)
        return Entry(f"a {type(x).__name__} of {len(x)}", (type(x).__name__, x.shape, more, tuple(found)))

    def _column(self, column: Held, path: str) -> object:
        categories = getattr(getattr(column, "dtype", None), "categories", None)  # in pandas, their order counts
        own: bytes | None = None
        if categories is not None:
            own = self._flat([list(categories), column.dtype.ordered], plain=False, path=path)
        return self._array(column.to_numpy(), path).digest, own

    def _file(self, x: Held, path: str) -> Entry:
        name = getattr(x, "name", None)
        if isinstance(x, (io.BytesIO, io.StringIO)):
            return Entry(f"a {type(x).__name__}", self._flat(x.getvalue(), plain=True))
        if isinstance(name, (str, bytes)):
            self.handles.add(path)
            how = [getattr(x, attribute, None) for attribute in ("encoding", "errors", "newlines")]
            return Entry(f"a file {name!r}", (type(x).__name__, *how, file_stamp(os.fsdecode(name))))
        return self._opaque_entry(path, x)

    def _bytes_token(self, data: Held) -> bytes:
        if not self._digests:
            return b""
        self.nbytes += len(data)
        if self.nbytes > MOST_BYTES:
            self.opaque["."] = f"it holds more than {MOST_BYTES >> 30} GB, which takes too long to compare"
            return b"too many"
        return hashlib.blake2b(data, digest_size=16).digest()

    def _native_state(self, x: Held) -> tuple[object, bool]:
        """The pickled state of a native object, and whether it is complete."""
        own = copyreg.dispatch_table.get(type(x))
        plain: Held = object
        # Methods of a user's class may omit something.
        cls: Held = next(base for base in type(x).__mro__ if is_library_class(base))
        try:
            if own is not None:
                return own(x), True
            made: Held = None
            if cls.__reduce_ex__ is not plain.__reduce_ex__:
                made = cls.__reduce_ex__(x, 5)
            elif cls.__reduce__ is not plain.__reduce__:
                made = cls.__reduce__(x)
            elif getattr(cls, "__getstate__", None) is not getattr(plain, "__getstate__", None):
                made = "", cls.__getstate__(x)
            if made is not None:
                if isinstance(made, tuple):
                    return [made[0], *(list(part) if hasattr(part, "__next__") else part for part in made[1:5])], True
                return made, isinstance(made, str)
        except Exception:
            return None, False
        return None, False

    def _opaque_entry(self, path: str, x: object, why: str = "") -> Entry:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        is_plain = type(x) is threading.local and all(type(v) in PLAIN for v in vars(x).values())
        (self.of_thread if is_plain else self.handles).add(path)
        self.opaque[path] = f"{readable(path)} {why or f'is a {kind}, whose state cannot be read'}"
        return Entry(f"a {type(x).__name__}", kind, True)

    # -- comparisons

    def changes(self, later: ValueDigests, opened: dict[str, Entry] | None = None) -> list[str]:
        """Describes what differs in later inputs of the same object. ``opened``: by path, what may exist or not."""
        opened = opened or {}
        out: list[str] = []
        for path in sorted({**self.entries, **later.entries}, key=lambda p: not p.startswith(DATASET)):
            old, new = self.entries.get(path), later.entries.get(path)
            if old is not None and new is not None and old.digest == new.digest:
                continue
            if new is not None and new.digest == IMPORTED:  # what it holds has entries of its own
                continue
            if _is_opened(path, old, new, opened) or (out and path.startswith("class ")):
                continue
            if old is None and "." in path:  # an attribute that was defined in the class
                old = _of_class(path.rpartition(".")[2], self.entries)
            if old is None or new is None:
                out.append(f"{path} is {new.text}" if new is not None else f"{path} no longer exists")
            elif old.text != new.text:
                out.append(f"{path} was {old.text} and is {new.text}")
            else:
                out.append(path)
        return out

    def why_incomplete(self, opened: dict[str, Entry]) -> str:
        """Names the first object without a complete digest that loading samples did not create; "" if none."""
        return next((why for path, why in self.opaque.items() if not lies_in(path, opened)), "")

    def opened(self, later: ValueDigests) -> dict[str, Entry]:
        """What differs in later inputs, after a sample was loaded: the later entries by path. Loading other samples
        creates the same in other items of the same container."""
        absent = Entry("not set", None)
        made = {
            path: later.entries.get(path, absent)
            for path in {**self.entries, **later.entries}
            if self.entries.get(path, absent).digest != later.entries.get(path, absent).digest
        }
        return {_of_any_item(path): entry for path, entry in made.items()} | made

    def made_first(self, later: ValueDigests) -> dict[str, Entry]:
        """Objects that later inputs have where there was nothing, with all that they hold: made on first use."""
        nothing = Entry("None", None)
        made = {
            path
            for path, entry in later.entries.items()
            if isinstance(entry.digest, str) and self.entries.get(path, nothing).text == "None"
        }
        return {path: entry for path, entry in later.entries.items() if lies_in(path, made)}


def _of_class(name: str, entries: dict[str, Entry]) -> Entry | None:
    return next((entry for path, entry in entries.items() if path.endswith(f".{name}']")), None)


def _is_opened(path: str, old: Entry | None, new: Entry | None, opened: dict[str, Entry]) -> bool:
    """Whether loading samples explains a difference: an object created on first use, present or not; or data created by
    it, present or not, but never with other content."""
    known = opened.get(path) or opened.get(_of_any_item(path))
    if known is not None:
        return all(x is None or x.text == "None" or x.digest == known.digest or x.is_opaque for x in (old, new))
    return False


def _of_any_item(path: str) -> str:
    """Generalizes an attribute's path to all items of the dataset's containers."""
    return DATASET + re.sub(r"\[[^]]*]", "[]", path.removeprefix(DATASET)) if path.startswith(DATASET) else path


def lies_in(path: str, paths: Collection[str]) -> bool:
    """Whether a path lies below one of ``paths``."""
    places = f"{path}.", f"{_of_any_item(path)}."
    return any(place.startswith((f"{p}.", f"{p}[")) for p in paths for place in places)
