"""Which parts of a library object affect samples: attributes, files behind handles, columns, settings."""

from __future__ import annotations

import collections
import contextlib
import decimal
import fcntl
import locale
import logging
import os
import random
import re
import stat
import struct
import sys
import threading
import time
import types
import warnings
from _multiprocessing import SemLock  # type: ignore[import-not-found]
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..core.errors import StokerWarning

NATIVE_CODE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
# Their contents do not affect samples.
LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, SemLock)
IGNORED = (*GENERATORS, *LOCKS, logging.Handler)
LIBRARY_STATES = {  # the part of a standard-library object that affects samples
    threading.Event: lambda x: x.is_set(),
    threading.Semaphore: lambda x: x._value,
    logging.Logger: lambda x: (x.getEffectiveLevel(), x.disabled, x.manager.disable),
    threading.Thread: lambda x: "",
    os.DirEntry: lambda x: x.path,
    types.MappingProxyType: dict,
    re.Pattern: lambda x: (x.pattern, x.flags),  # its repr is cut off
}
# Immutable, and digesting their content would take as long as reading it.
IMMUTABLE_MODULES = ("pyarrow", "re")
# File handles: identified by their file, whose stamps are inputs too.
HANDLES = {  # by package: attribute that names the file
    "h5py": "filename",
    "lmdb": "path",
    "sqlite3": "",
    "_sqlite3": "",
    "zipfile": "filename",
    "tarfile": "name",
}
OPTIONS = {  # by package: where its options are
    "pandas": ("pandas._config.config", "_global_config"),
    "sklearn": ("sklearn._config", "get_config"),
    "matplotlib": ("matplotlib", "rcParams"),
}
CONTAINERS = (list, tuple, dict, collections.OrderedDict, set, frozenset, collections.deque)
BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)  # methods of native objects: ``self.names.index``
HEAPTYPE = 1 << 9
COMPILERS_LIMIT = 2000  # to which torch.compile raises the recursion limit
Held: TypeAlias = Any  # a value of the user's, of any type


def name_of_native(x: Held) -> object:
    return type(x).__name__, getattr(x, "__module__", ""), getattr(x, "__qualname__", ""), getattr(x, "__name__", "")


def is_compiled_function(x: Held) -> bool:
    """Whether an object is a function of Cython or nanobind, which have function types of their own."""
    name = vars(type(x)).get("__name__")
    return callable(x) and bool(type(x).__flags__ & HEAPTYPE) and isinstance(name, types.GetSetDescriptorType)


def is_bound(x: Held) -> bool:
    """Whether a native function is a method bound to an object."""
    owner = getattr(x, "__self__", None) if isinstance(x, BOUND) else None
    return owner is not None and not isinstance(owner, (types.ModuleType, type))


def file_stamp(path: str) -> tuple[object, ...]:
    """Modification time, size and inode of a file; the path alone if it does not exist."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return (path,)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return path, found.st_mode
    return path, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def stamp_of_descriptor(number: int) -> tuple[object, ...] | None:
    """Stamps of an open file, by descriptor; () if it is not a regular file. None: it has no name, so other processes
    can write to it unnoticed."""
    try:
        found = os.fstat(number) if number > 2 else None
    except (OSError, OverflowError):
        return ()
    if found is None or not stat.S_ISREG(found.st_mode):
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino) if found.st_nlink else None


def files_read(descriptors: Iterable[int], besides: str | os.PathLike[str]) -> list[tuple[object, ...]]:
    """Paths and stamps of the files among these descriptors, perhaps, that are open for reading only and do not lie in
    one folder."""
    out, others = [], os.path.join(os.path.realpath(besides), "")
    for number in descriptors:
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            stamp = stamp_of_descriptor(number)
            if stamp and flags & os.O_ACCMODE == os.O_RDONLY and not path.startswith(others):
                out.append((path, *stamp))
    return sorted(out, key=str)


def stamp_of_handle(x: Held, package: str) -> tuple[object, ...]:
    """Stamps of the file behind a handle; () if there is none, because its contents are in memory, or if the file may
    be written through the handle, which its stamps tell late."""
    changes: tuple[object, ...] = ()
    with contextlib.suppress(Exception):
        if package in ("sqlite3", "_sqlite3"):
            if type(x).__name__ == "Cursor":
                return ()  # its next row is part of its state; asking it anything would drop that
            path = x.execute("PRAGMA database_list").fetchone()[2]
            others = x.execute("PRAGMA data_version").fetchone()[0]  # changes that others have committed
            changes = x.total_changes, x.in_transaction, others  # its own are seen before they are committed
        else:
            file = getattr(x, "file", x)
            path = getattr(file, HANDLES[package])
            path = path() if callable(path) else path
            if getattr(file, "mode", "r") not in ("r", "rb") or (package == "lmdb" and x.flags().get("writemap")):
                return ()
        if path and getattr(x, "driver", "") != "core":  # h5py's in-memory driver
            found = file_stamp(os.fsdecode(path))
            return (*found, *changes) if len(found) > 1 else ()
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
    """Library settings that scripts change and samples depend on."""
    found = (  # a module not imported yet has its defaults
        getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False),
        getattr(sys.modules.get("PIL.Image"), "MAX_IMAGE_PIXELS", 1024 * 1024 * 1024 // 4 // 3),
    )
    precision = torch.get_float32_matmul_precision()
    decimals = decimal.getcontext().copy()
    decimals.clear_flags()  # flags left by earlier calculations
    texts = np.get_printoptions(), vars(torch._tensor_str.PRINT_OPTS), decimals, np.geterr()
    casts = [(torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in ("cpu", "cuda")]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    flushes_denormals = sys.float_info.min / 2 == 0.0  # torch.set_flush_denormal()
    # What raises an error is decided by the first filter that fits, so by those up to the last one that raises. Imports
    # add other filters, and stoker's own warnings belong to no sample.
    filters = [f for f in warnings.filters if f[2] is not StokerWarning]
    raising = [k for k, f in enumerate(filters) if f[0] == "error"]
    raised = [str(f) for f in filters[: max(raising, default=-1) + 1]]
    place = time.tzname, time.timezone, os.environ.get("TZ"), locale.setlocale(locale.LC_ALL)
    of_torch = str(torch.get_default_dtype()), str(torch.get_default_device()), precision, casts, is_deterministic
    limit = max(COMPILERS_LIMIT, sys.getrecursionlimit())
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # may replace torch's functions
    kinds = [f"{type(x).__module__}.{type(x).__qualname__}" for x in modes]
    return *of_torch, *kinds, *map(str, texts), flushes_denormals, raised, place, limit, *found


def classes_of_samples() -> list[type]:
    """Classes of libraries whose objects samples are made from, and whose methods a script can replace."""
    places = (("PIL.Image", "Image"), ("pandas", "DataFrame"), ("pandas", "Series"))
    found = (getattr(sys.modules.get(module), name, None) for module, name in places)
    return [torch.Tensor, *(cls for cls in found if isinstance(cls, type))]


def options_of(packages: Collection[str]) -> dict[str, object]:
    """Options that scripts set in packages: ``pd.set_option``, ``sklearn.set_config``, ``matplotlib.rcParams``."""
    found: dict[str, object] = {}
    for package, (module, name) in OPTIONS.items():
        held = getattr(sys.modules.get(module), name, None) if package in packages else None
        held = held() if callable(held) else held
        if held is not None:
            found[package] = sorted(map(repr, _plain_items(held, "")))
    return found


def _plain_items(held: Held, path: str) -> Iterator[tuple[str, object]]:
    for key, value in dict(held).items():
        if isinstance(value, dict):
            yield from _plain_items(value, f"{path}.{key}")
        elif isinstance(value, (str, int, float, bool, type(None), list, tuple)):
            yield f"{path}.{key}", value


def files_in_memory() -> dict[str, Held]:
    """The files of ``memory://``, which belong to fsspec's class."""
    module = sys.modules.get("fsspec.implementations.memory")
    store = getattr(getattr(module, "MemoryFileSystem", None), "store", None)
    return {"fsspec.implementations.memory": store} if store else {}


def hooks_of_all_modules() -> dict[str, Held]:
    """Functions that torch calls with each module, from ``register_module_forward_hook`` and the like."""
    found = vars(torch.nn.modules.module).items()
    return {f"torch.nn.{name}": held for name, held in found if name.startswith("_global_") and held}


def levels_of_loggers() -> tuple[object, ...]:
    """Levels that decide which loggers are enabled."""
    manager = logging.root.manager
    loggers = ((name, x) for name, x in sorted(manager.loggerDict.items()) if isinstance(x, logging.Logger))
    found = [(name, x.level, x.disabled) for name, x in loggers if x.level or x.disabled]
    return manager.disable, logging.root.level, *found


def working_folder() -> str:
    """Where relative paths begin; "" if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def size_of_arrow(x: Held) -> int:
    try:
        return int(x.nbytes)
    except Exception:
        return 0


def arrow_buffers(x: Held) -> Iterator[memoryview]:
    """Yields the memory of a pyarrow table or array, which may be a view of a writable array."""
    for part in getattr(x, "columns", None) or getattr(x, "chunks", None) or ():
        yield from arrow_buffers(part)
    if hasattr(x, "buffers"):
        yield from (memoryview(b) for b in x.buffers() if b is not None)


def attributes_of(x: object) -> Iterator[tuple[str, Held]]:
    """Yields what an object holds in its ``__dict__`` and slots. Runs no code of its class."""
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


POINTER = struct.calcsize("P")


def native_base(cls: type) -> type:
    """The first class in the MRO with a native layout, as in ``copyreg._reduce_ex``; ``object``: attributes only."""
    for base in cls.__mro__:
        if not base.__flags__ & HEAPTYPE:
            return base
        new = base.__dict__.get("__new__")
        if isinstance(new, types.BuiltinFunctionType) and new.__self__ is base:
            return base
        if _has_hidden_fields(base):
            return base
    return object


def _has_hidden_fields(cls: type) -> bool:
    """Whether native code keeps more in an object than its attributes, as in those of ``hashlib``."""
    base = cls.__base__
    own = cls.__basicsize__ - (base.__basicsize__ if base is not None else 0)
    members = vars(cls)
    known = ("__dict__" in members) + ("__weakref__" in members)
    if own > known * POINTER:
        known += sum(isinstance(x, types.MemberDescriptorType) for x in list(members.values()))
    return own > known * POINTER


def items_of(x: Held, native: type) -> Held:
    """Copies a container into its native type, bypassing overridden methods."""
    held = native.items(x) if issubclass(native, dict) else native.__iter__(x)  # type: ignore[attr-defined]
    return list(held) if native is collections.deque else native(held)


def token_of_plain(x: object) -> object:
    if isinstance(x, float):
        return "float", x.hex() if x == x else struct.pack("d", x)  # a NaN has a sign
    if isinstance(x, complex):
        return "complex", struct.pack("dd", x.real, x.imag)
    return type(x).__name__, x
