"""Finds files, connections and locks that an object holds. Two processes cannot share one: they would share its offset
or its protocol state."""

from __future__ import annotations

import array
import io
import logging
import os
import socket
import time
import types
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from .object_tree import WIDTH, attributes, is_filesystem, is_table, parts, walk

MAX_OBJECTS = 20_000  # searched at most, breadth first
RECHECKS = 3  # of open descriptors: a file that is only read in passing is closed by then
RECHECK_S = 1e-3
PLAIN = (str, bytes, bytearray, memoryview, array.array, int, float, complex, type(None), range, slice)
CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, property)
SKIPPED = (*PLAIN, *CODE, torch.Tensor, torch.Generator, logging.Logger, weakref.ref)


def held(obj: object, path: str = "dataset") -> str:
    """Path and type of the first object inside that cannot be copied to another process; "" if there is none."""
    todo, seen, left = deque([(path, obj)]), dict[int, object](), MAX_OBJECTS
    while todo and left > 0:
        at, x = todo.popleft()
        if id(x) in seen or isinstance(x, SKIPPED) or (isinstance(x, np.ndarray) and not x.dtype.hasobject):
            continue
        if is_filesystem(x) or is_table(x):  # pickled by arguments and by data, respectively
            continue
        seen[id(x)] = x  # keeps it alive: otherwise another object could reuse its id
        if isinstance(x, (io.IOBase, socket.socket)) and not getattr(x, "closed", False):
            return f"{at} is an open {type(x).__name__}"
        try:
            inner = list(_inside(x))
        except Exception:  # a user-defined proxy object
            inner = []
        left -= 1 + len(inner)
        if not inner and _refuses_pickle(x):
            return f"{at} is a {type(x).__module__}.{type(x).__qualname__}"
        todo += [(at + name, value) for name, value in inner if type(value) not in PLAIN]
    return ""


def iterator_in(obj: object) -> str:
    """Path and type of the first iterator inside, whose position each sample may move; "" if there is none."""
    for at, x in walk(obj):
        if hasattr(type(x), "__next__"):
            return f"{at} is a {type(x).__name__}"
    return ""


def _inside(x: object) -> Iterator[tuple[str, object]]:
    if isinstance(x, (set, frozenset, np.ndarray)):
        items = x.flat if isinstance(x, np.ndarray) else x
        yield from ((f"[{i}]", v) for i, v in enumerate(islice(items, WIDTH)))
    yield from parts(x)
    yield from ((f".{name}", value) for name, value in attributes(x).items())


def _refuses_pickle(x: object) -> bool:
    """Whether an object without attributes, such as one of a C library, raises when pickled."""
    if isinstance(x, (dict, list, tuple, set, frozenset, types.FunctionType, types.MethodType)):
        return False
    try:
        x.__reduce_ex__(4)
    except Exception:
        return True
    return False


def opened(pids: list[int]) -> str:
    """A file or connection that one of these processes has open and this one has not. Raises OSError if one has
    ended."""
    own = _targets("self")
    found = _open_in(pids, own)
    for _ in range(RECHECKS):
        if found:  # it may be open only briefly
            time.sleep(RECHECK_S)
            found &= _open_in(pids, own)
    return min(found)[1] if found else ""


def _open_in(pids: list[int], own: set[str]) -> set[tuple[int, str]]:
    there = {(pid, target) for pid in pids for target in _targets(pid) - own}
    return {
        (pid, target)
        for pid, target in there
        if target.startswith("socket:") or (target[0] == "/" and not target.startswith(_SYSTEM))
    }


_SYSTEM = ("/dev/null", "/dev/urandom", "/dev/shm/", "/memfd:", "/proc/", "/sys/")


def _targets(pid: int | str) -> set[str]:
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:  # closed in the meantime
            continue
    if not found:  # the process has ended but was not reaped
        raise ProcessLookupError(f"process {pid} has ended")
    return found
