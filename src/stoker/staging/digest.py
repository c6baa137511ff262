"""Digests of what a dataset holds, equal in every process that has the same.

``digest`` is for the ranks of a node, which run the same code: functions are identified by their place. It fails where
something cannot be compared. ``dependencies_of`` is for the key of a cache on disk, which outlives the code: it goes
into the user's functions and classes, and what cannot be compared is identified by its type.

``core/fingerprint.py`` tells faster whether an object has changed within one process.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import io
import os
import pickle
import random
import sys
import threading
import types
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import one_line
from ..core.marked_code import original
from ..core.packages import is_users
from .executed_code import is_library
from .inputs import codes_of
from .store.encode import CacheError

# Attributes that distinguish ranks. They may differ where the deterministic part does not read them.
OF_RANK = frozenset({"rank", "local_rank", "global_rank", "node_rank", "process_index", "local_process_index", "gpu"})
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
PLAIN = frozenset({str, int, float, bool, bytes, type(None), list, dict, tuple})
LOCKS = (type(threading.Lock()), type(threading.RLock()))
ENTRIES = ("__call__", "forward", "__getitem__", "__getitems__")  # where a call begins


def digest(value: object) -> tuple[str, set[str]]:
    """A digest of everything that a value holds, and which attributes it leaves out. Raises an error where something in
    it cannot be compared: a connection, a handle of C code.

    States of random generators are left out: the deterministic part of a sample does not depend on them. Code is
    identified by its place and its instructions.

    Example:
        >>> digest({"paths": ["a.jpg"]}) == digest({"paths": ["a.jpg"]}), digest(1) == digest(1.0)
        (True, False)
    """
    pickler = _Pickler(_Hash())
    pickler.dump(value)
    return pickler.file.hexdigest(), pickler.left_out


class Dependencies(NamedTuple):
    """What a dataset or a function depends on."""

    content: str  # a digest of everything that it holds, and of the global variables that its code reads
    code: str  # a digest of the user's functions that may run for a sample
    packages: set[str]  # libraries that it uses


def dependencies_of(value: object) -> Dependencies:
    """What a value depends on, equal in every run that has the same. Raises CacheError: it cannot be taken apart."""
    pickler = _KeyPickler(_Hash())
    try:
        pickler.dump(value)
    except Exception as e:
        raise CacheError(f"what the dataset holds cannot be compared: {one_line(e)}") from e
    return Dependencies(pickler.file.hexdigest(), pickler.code.hexdigest(), pickler.packages)


class _Hash:
    """A file that hashes what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.write, self.hexdigest = self._hash.update, self._hash.hexdigest


def _bytes_of(array: NDArray[Any]) -> bytes:
    whole: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else b""
    return hashlib.blake2b(whole, digest_size=16).digest()


class _Pickler(pickle.Pickler):
    """A pickler whose output is compared and never read."""

    def __init__(self, file: _Hash) -> None:
        super().__init__(file, 5)
        self.file = file
        self.left_out: set[str] = set()

    def persistent_id(self, x: Any) -> object:
        return None if type(x) in PLAIN else self.known(x)

    def known(self, x: Any) -> object:
        """What stands for a value that pickle refuses, would copy, or writes differently in each process; else None."""
        if type(x) in (set, frozenset):
            return "set", type(x), sorted(map(repr, x))
        if isinstance(x, types.FunctionType):
            return "function", x.__module__, x.__qualname__, original(x.__code__), *_bound_in(x)
        if isinstance(x, types.CodeType):
            return "code", x.co_filename, x.co_firstlineno, x.co_code, x.co_names, x.co_consts
        if isinstance(x, type):
            return "class", x.__module__, x.__qualname__
        if isinstance(x, types.ModuleType):
            return "module", x.__name__
        if isinstance(x, (*GENERATORS, *LOCKS)):
            return "state", type(x)
        if isinstance(x, io.IOBase) and isinstance(getattr(x, "name", None), str):
            return "file", type(x), getattr(x, "name", "")
        if isinstance(x, np.ndarray) and not x.dtype.hasobject:
            return "array", type(x), repr(x.dtype), x.shape, _bytes_of(x)
        if isinstance(x, torch.Tensor) and x.is_cpu and x.layout is torch.strided and not x.is_quantized:
            plain = x.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
            numbers = _bytes_of(plain.reshape(-1).contiguous().view(torch.uint8).numpy()) if x.numel() else b""
            return "tensor", type(x), repr(x.dtype), tuple(x.shape), vars(x), numbers
        if isinstance(x, torch.Tensor):
            raise pickle.PicklingError("a tensor that is not in memory, or not laid out plainly")
        return None

    def reducer_override(self, x: Any) -> Any:
        kind = type(x)
        plain: Any = object
        own = kind.__reduce_ex__ is not plain.__reduce_ex__ or kind.__reduce__ is not plain.__reduce__
        if own or kind in copyreg.dispatch_table:
            return NotImplemented
        made, args, state, *rest = x.__reduce_ex__(5)
        if type(state) is dict and not OF_RANK.isdisjoint(state):
            self.left_out |= OF_RANK & state.keys()
            state = {k: v for k, v in state.items() if k not in OF_RANK}
        return made, args, state, *rest


class _KeyPickler(_Pickler):
    """Goes into the user's functions and classes, too; those of libraries are identified by their names."""

    def __init__(self, file: _Hash) -> None:
        super().__init__(file)
        self.code = _Hash()
        self.packages: set[str] = set()
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object: else its id might become that of another
        self._texts: dict[str, str] = {}

    def persistent_id(self, x: Any) -> object:
        if type(x) is str:
            return self._texts.setdefault(x, x)  # whether equal texts are one object differs from run to run
        return super().persistent_id(x)

    def known(self, x: Any) -> object:
        if isinstance(x, (types.FunctionType, type)):
            if id(x) in self._seen:
                return "again", self._seen[id(x)][0]
            self._seen[id(x)] = len(self._seen), x
            return self._function(x) if isinstance(x, types.FunctionType) else self._class(x)
        if isinstance(x, types.ModuleType):
            return self._named(x.__name__, x.__name__)
        if isinstance(x, types.MethodType):
            return "method", x.__self__, x.__func__
        if isinstance(x, functools._lru_cache_wrapper):
            return "cached", x.__wrapped__
        if isinstance(x, os.PathLike):
            return "path", os.fspath(x)  # not what it remembers of itself
        if hasattr(type(x), "__next__") or x is os.environ:
            return "state", type(x).__qualname__
        if isinstance(x, torch.Tensor) and not x.is_cpu:
            return "tensor", repr(x.dtype), tuple(x.shape), repr(x.device)
        return super().known(x)

    def reducer_override(self, x: Any) -> Any:
        own: Any = copyreg.dispatch_table.get(type(x))
        try:
            made = x.__reduce_ex__(5) if own is None else own(x)
        except Exception:  # a connection, a handle of C code
            made = type(x).__qualname__
        return (str, (made,)) if isinstance(made, str) else made

    def _named(self, module: str, name: str) -> tuple[str, str]:
        """Identifies something of a library."""
        self.packages.add(module.partition(".")[0])
        return "library", name

    def _function(self, fn: types.FunctionType) -> tuple[object, ...]:
        if is_library(fn.__code__):
            return self._named(fn.__module__ or "", f"{fn.__module__}.{fn.__qualname__}")
        instructions = original(fn.__code__)
        self.code.write(_instructions(instructions))
        names = {name for code in codes_of(instructions) for name in code.co_names}
        self.packages |= {name.partition(".")[0] for name in _arguments(instructions, "IMPORT_NAME")}
        used: dict[str, object] = {}
        for name in sorted(_arguments(instructions, "LOAD_GLOBAL", "LOAD_NAME")):
            value = used[name] = fn.__globals__.get(name)
            if isinstance(value, types.ModuleType) and _is_users_module(value):
                used |= {f"{name}.{k}": v for k, v in vars(value).items() if k in names}
        return "function", fn.__qualname__, used, *_bound_in(fn)

    def _class(self, cls: type) -> tuple[object, ...]:
        bases = [base for base in cls.__mro__ if _is_users_module(sys.modules.get(base.__module__))]
        self.packages |= {base.__module__.partition(".")[0] for base in cls.__mro__}
        if cls not in bases:
            return self._named(cls.__module__, f"{cls.__module__}.{cls.__qualname__}")
        called = _called(bases)
        held: dict[str, object] = {}
        for base in bases:
            for k, v in vars(base).items():
                fn = _function_in(v)
                if fn is None and not callable(v) and not k.startswith("__"):
                    held[f"{base.__qualname__}.{k}"] = v
                elif fn is not None and k in called:
                    held[f"{base.__qualname__}.{k}"] = fn
        return "class", cls.__qualname__, held


def _bound_in(fn: types.FunctionType) -> tuple[object, ...]:
    """The values that a function refers to: defaults of its parameters, and variables of functions around it."""
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not set yet
            cells.append(None)
    return fn.__defaults__, fn.__kwdefaults__, cells


def _is_users_module(module: object) -> bool:
    file = getattr(module, "__file__", None) or "<frozen builtin>"
    return getattr(module, "__name__", "") == "__main__" or is_users(file)


def _function_in(member: Any) -> types.FunctionType | None:
    """The function behind what a class holds under a name."""
    fn = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    fn = getattr(fn, "__wrapped__", fn)
    return fn if isinstance(fn, types.FunctionType) else None


def _called(bases: list[type]) -> set[str]:
    """Methods that a call, or a request for an item, may reach: by the names in the code of those before."""
    methods: dict[str, list[types.FunctionType]] = {}
    for base in bases:
        for k, v in vars(base).items():
            fn = _function_in(v)
            if fn is not None:
                methods.setdefault(k, []).append(fn)
    found: set[str] = set()
    todo = [k for k in ENTRIES if k in methods]
    while todo:
        k = todo.pop()
        if k not in found:
            found.add(k)
            names = {name for fn in methods[k] for code in codes_of(fn.__code__) for name in code.co_names}
            todo += [name for name in (methods if "getattr" in names else names) if name in methods]
    return found


def _arguments(code: types.CodeType, *names: str) -> set[str]:
    """Arguments of some instructions of a function: the variables that it loads, the modules that it imports."""
    return {str(op.argval) for c in codes_of(code) for op in dis.get_instructions(c) if op.opname in names}


def _instructions(code: types.CodeType) -> bytes:
    """What runs, without its place in a file."""
    parts = []
    for c in codes_of(code):
        constants = [
            sorted(map(repr, v)) if isinstance(v, frozenset) else v
            for v in c.co_consts
            if not isinstance(v, types.CodeType)
        ]
        parts.append((c.co_code, c.co_names, c.co_varnames, constants))
    return repr(parts).encode()
