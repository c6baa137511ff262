"""Files, connections and locks that an object holds. Two processes that both use one disturb each other: they share its
offset, or its place in a protocol."""

from __future__ import annotations

import array
import functools
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
from typing import Any

import numpy as np
import torch

WIDTH = 100  # items of a container that are looked at; the others are taken to be of the same kind
MOST = 20_000  # objects that are looked at, those nearest to the surface first
LOOKS = 3  # more, at what a process has open: what is open in all of them stays so
LOOK_S = 1e-3
PLAIN = (str, bytes, bytearray, memoryview, array.array, int, float, complex, type(None), range, slice)
CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, property)
SKIPPED = (*PLAIN, *CODE, torch.Tensor, torch.Generator, logging.Logger, weakref.ref)


def held(obj: Any, path: str = "dataset") -> str:
    """The path of the first thing inside that cannot be copied to another process, and what it is; "" for none.

    Example:
        >>> held({"rows": [1, 2], "name": "x"})
        ''
    """
    todo, seen, left = deque([(path, obj)]), dict[int, Any](), MOST
    while todo and left > 0:
        at, x = todo.popleft()
        if id(x) in seen or isinstance(x, SKIPPED) or (isinstance(x, np.ndarray) and not x.dtype.hasobject):
            continue
        seen[id(x)] = x  # kept, else another object might get its id
        if isinstance(x, (io.IOBase, socket.socket)) and not getattr(x, "closed", False):
            return f"{at} is an open {type(x).__name__}"
        try:
            inner = list(_inside(x))
        except Exception:  # somebody's proxy
            inner = []
        left -= 1 + len(inner)
        if not inner and _refused(x):
            return f"{at} is a {type(x).__module__}.{type(x).__qualname__}"
        todo += [(at + name, value) for name, value in inner if type(value) not in PLAIN]
    return ""


def _inside(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, dict):
        yield from ((f"[{k!r}]", v) for k, v in islice(x.items(), WIDTH))
    elif isinstance(x, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", v) for i, v in enumerate(islice(x, WIDTH)))
    elif isinstance(x, np.ndarray):
        yield from ((f"[{i}]", v) for i, v in enumerate(islice(x.flat, WIDTH)))
    elif isinstance(x, functools.partial):
        yield from ((".func", x.func), (".args", x.args), (".keywords", x.keywords))
    elif isinstance(x, types.MethodType):
        yield from ((".__func__", x.__func__), (".__self__", x.__self__))
    elif isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=False):
            try:
                yield f".{name}", cell.cell_contents
            except ValueError:  # nothing in it yet
                continue
    for name, value in list(getattr(x, "__dict__", {}).items()):
        yield f".{name}", value
    for c in type(x).__mro__:
        slots = vars(c).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(x, name, None)
            if value is not None:
                yield f".{name}", value


def _refused(x: Any) -> bool:
    """Whether an object without attributes, as of a C library, says that it cannot be pickled."""
    if isinstance(x, (dict, list, tuple, set, frozenset, types.FunctionType, types.MethodType)):
        return False
    try:
        x.__reduce_ex__(4)
    except Exception:
        return True
    return False


def opened(pids: list[int]) -> str:
    """A file or connection that one of these processes has open and this one has not; "" for none.

    Raises:
        OSError: one of them has ended.
    """
    own = _targets("self")
    found = _kept(pids, own)
    for _ in range(LOOKS):
        if found:  # or it is being read just now
            time.sleep(LOOK_S)
            found &= _kept(pids, own)
    return min(found)[1] if found else ""


def _kept(pids: list[int], own: set[str]) -> set[tuple[int, str]]:
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
        except FileNotFoundError:  # it was closed meanwhile
            continue
    if not found:  # a process that has ended, and is not waited for
        raise ProcessLookupError(f"process {pid} has ended")
    return found
