"""A digest of a dataset's content that is the same in every process of a run."""

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

# Attributes that tell one rank from another. They may differ where the deterministic part does not read them.
OF_RANK = frozenset({"rank", "local_rank", "global_rank", "node_rank", "process_index", "local_process_index", "gpu"})
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
PLAIN = frozenset({str, int, float, bool, bytes, type(None), list, dict, tuple})
LOCKS = (type(threading.Lock()), type(threading.RLock()))


def digest(value: Any) -> tuple[str, set[str]]:
    """A digest of everything that a value holds, equal for equal content in whichever process; and which attributes it
    leaves out.

    States of random generators are no content: the deterministic part of a sample does not depend on them. Code is
    known by its place and its instructions.

    Raises:
        Exception: something in it has no content that could be compared: a connection, a handle of C code.

    Example:
        >>> digest({"paths": ["a.jpg"]}) == digest({"paths": ["a.jpg"]}), digest(1) == digest(1.0)
        (True, False)
    """
    writer = _Writer()
    pickler = _Pickler(writer, 5)
    pickler.dump(value)
    return writer.hash.hexdigest(), pickler.left_out


class _Writer:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> None:
        self.hash.update(data)


def _bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    whole: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else b""
    return hashlib.blake2b(whole, digest_size=16).digest()


class _Pickler(pickle.Pickler):
    """A pickler for what is compared and never read again."""

    def __init__(self, file: Any, protocol: int) -> None:
        super().__init__(file, protocol)
        self.left_out: set[str] = set()

    def persistent_id(self, x: Any) -> Any:
        return None if type(x) in PLAIN else _known(x)

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


def _known(x: Any) -> Any:
    """What stands for a value that pickle refuses, would copy, or writes differently in each process; else None."""
    if type(x) in (set, frozenset):
        return "set", type(x), sorted(map(repr, x))
    if isinstance(x, types.FunctionType):
        cells = [c.cell_contents for c in x.__closure__ or ()]
        return "function", x.__module__, x.__qualname__, x.__code__, x.__defaults__, x.__kwdefaults__, cells
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
