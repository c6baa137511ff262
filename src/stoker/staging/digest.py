"""Digests of what a dataset holds, equal in every process that has the same.

``digest`` is for the ranks of a node, which run the same code: functions are identified by their place. It fails where
something cannot be compared.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
import random
import threading
import types
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.marked_code import original

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


def _bound_in(fn: types.FunctionType) -> tuple[object, ...]:
    """The values that a function refers to: defaults of its parameters, and variables of functions around it."""
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not set yet
            cells.append(None)
    return fn.__defaults__, fn.__kwdefaults__, cells
