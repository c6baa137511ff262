"""What of an object of a library says something about samples: attributes, files behind handles, columns, settings."""

from __future__ import annotations

import collections
import contextlib
import decimal
import logging
import os
import random
import stat
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

NATIVE_CODE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
# What they hold says nothing about samples.
IGNORED = (
    *GENERATORS,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    logging.Handler,
)
LIBRARY_STATES = {  # what of an object of the standard library says something about samples
    threading.Event: lambda x: x.is_set(),
    threading.Semaphore: lambda x: x._value,
    logging.Logger: lambda x: x.level,
    threading.Thread: lambda x: "",
    types.MappingProxyType: dict,
}
# Immutable, and the digest of their content would take as long as reading it.
IMMUTABLE_MODULES = ("pyarrow", "re")
# Handles of files: known by the name of their file, of which the stamps are inputs, too.
HANDLES = {  # by package: the attribute that names the file
    "h5py": "filename",
    "lmdb": "path",
    "sqlite3": "",
    "_sqlite3": "",
    "zipfile": "filename",
    "tarfile": "name",
}
CONTAINERS = (list, tuple, dict, collections.OrderedDict, set, frozenset, collections.deque)
BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)  # methods of native objects: ``self.names.index``
HEAPTYPE = 1 << 9
Held: TypeAlias = Any  # a value of the user's, of which everything is asked


def name_of_native(x: Held) -> object:
    return type(x).__name__, getattr(x, "__module__", ""), getattr(x, "__qualname__", "")


def is_bound(x: Held) -> bool:
    """Whether a native function is a method that is bound to an object."""
    owner = getattr(x, "__self__", None) if isinstance(x, BOUND) else None
    return owner is not None and not isinstance(owner, (types.ModuleType, type))


def file_stamp(path: str) -> tuple[object, ...]:
    """When a file was written, its size and its number; that it is not there."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return (path,)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return path, found.st_mode
    return path, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def stamp_of_descriptor(number: int) -> tuple[object, ...] | None:
    """The stamps of an open file, by its number; () if it is none; None: it has no name, so other processes write to
    it unseen."""
    try:
        found = os.fstat(number) if number > 2 else None
    except (OSError, OverflowError):
        return ()
    if found is None or not stat.S_ISREG(found.st_mode):
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino) if found.st_nlink else None


def stamp_of_handle(x: Held, package: str) -> tuple[object, ...]:
    """The stamps of the file behind a handle; () where there is none: what it holds is in memory."""
    with contextlib.suppress(Exception):
        if package in ("sqlite3", "_sqlite3"):
            path = x.execute("PRAGMA database_list").fetchone()[2]
        else:
            path = getattr(getattr(x, "file", x), HANDLES[package])
            path = path() if callable(path) else path
        if path and getattr(x, "driver", "") != "core":  # of h5py: in memory
            found = file_stamp(os.fsdecode(path))
            return found if len(found) > 1 else ()
    return ()


def columns_of(x: Held) -> Iterator[tuple[object, Held]]:
    if hasattr(x, "get_columns"):  # polars
        yield from ((c.name, c) for c in x.get_columns())
    elif hasattr(x, "columns"):
        yield from ((name, x.iloc[:, k]) for k, name in enumerate(x.columns))
        yield "index", x.index
    else:
        yield "", x
        if hasattr(x, "iloc"):
            yield "index", x.index


def library_settings() -> tuple[object, ...]:
    """Settings of libraries that scripts change, and that samples depend on."""
    found = [
        getattr(sys.modules.get(module), name, default)  # a module that is not imported yet has its defaults
        for module, name, default in (
            ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", False),
            ("PIL.Image", "MAX_IMAGE_PIXELS", 1024 * 1024 * 1024 // 4 // 3),
        )
    ]
    precision = torch.get_float32_matmul_precision()
    decimals = decimal.getcontext().copy()
    decimals.clear_flags()  # what calculations have left there
    texts = np.get_printoptions(), vars(torch._tensor_str.PRINT_OPTS), decimals, np.geterr()
    return str(torch.get_default_dtype()), str(torch.get_default_device()), precision, *map(str, texts), *found


def size_of_arrow(x: Held) -> int:
    try:
        return int(x.nbytes)
    except Exception:
        return 0


def arrow_buffers(x: Held) -> Iterator[memoryview]:
    """The memory of a table or an array of pyarrow, which may be a view of an array that can be written to."""
    for part in getattr(x, "columns", None) or getattr(x, "chunks", None) or ():
        yield from arrow_buffers(part)
    if hasattr(x, "buffers"):
        yield from (memoryview(b) for b in x.buffers() if b is not None)


def attributes_of(x: object) -> Iterator[tuple[str, Held]]:
    """What an object holds in its ``__dict__`` and its slots. No code of its class runs."""
    try:
        own = object.__getattribute__(x, "__dict__")
    except AttributeError:
        own = {}
    yield from sorted(((k, v) for k, v in dict(own).items() if isinstance(k, str)), key=lambda item: item[0])
    for cls in type(x).__mro__:
        if "__slots__" in vars(cls):
            for name, slot in vars(cls).items():
                if type(slot) is types.MemberDescriptorType:
                    try:
                        yield name, slot.__get__(x)
                    except AttributeError:
                        yield name, NOT_SET


NOT_SET = "a slot that is not set"


def native_base(cls: type) -> type:
    """The class in the MRO whose memory layout is not Python's: ``object`` where instances are attributes alone. As
    ``copyreg._reduce_ex`` finds it."""
    for base in cls.__mro__:
        if not base.__flags__ & HEAPTYPE:
            return base
        new = base.__dict__.get("__new__")
        if isinstance(new, types.BuiltinFunctionType) and new.__self__ is base:
            return base
    return object


def items_of(x: Held, native: type) -> Held:
    """A container of Python's own with what another one holds, whatever the methods of its class say."""
    held = native.items(x) if issubclass(native, dict) else native.__iter__(x)  # type: ignore[attr-defined]
    return list(held) if native is collections.deque else native(held)


def token_of_plain(x: object) -> object:
    if isinstance(x, float):
        return "float", x.hex() if x == x else "nan"
    if isinstance(x, complex):
        return "complex", x.real.hex(), x.imag.hex()
    return type(x).__name__, x
