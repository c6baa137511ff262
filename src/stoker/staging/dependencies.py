"""The code that may run for a sample, and the values it uses: what the key of a cache on disk is made of.

A walk over attributes, items, closures, defaults and the globals that code names. Nothing is called. It goes into the
user's code and into packages of transforms, and not into Python's library, torch or NumPy, which the key knows by their
versions.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import multiprocessing.sharedctypes
import os
import random
import re
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

DEPTH = 8
ENTRIES = ("__call__", "forward", "__getitem__", "__getitems__")  # where a call begins
REPR = 1000  # characters of an object that only says what it is
WIDTH = 1000  # items of one container that are looked at
NODES = 20_000
SAMPLE_BYTES = 1 << 16  # of a large array, what is hashed
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, np.dtype)
TRANSFORMS = {"torchvision", "monai", "albumentations", "albucore", "kornia", "timm"}  # whose methods are followed
CLOSED = {"torch", "torchaudio", "numpy", "PIL", "scipy", "skimage", "cv2", "stoker"}
NATIVE = (types.BuiltinFunctionType, types.MethodDescriptorType, np.ufunc, type(np.concatenate))
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)


class Dependencies(NamedTuple):
    """What a walk found.

    Attributes:
        values: plain values and digests of arrays, by path.
        code: a digest of each function, by path.
        packages: that the code names.
    """

    values: dict[str, Any]
    code: dict[str, str]
    packages: set[str]


def dependencies_of(obj: Any) -> Dependencies:
    """What a dataset or a function depends on, as far as Python code and attributes tell."""
    walk = _Walk()
    walk.visit(obj, _name_of(obj), DEPTH)
    return walk.out


def _name_of(obj: Any) -> str:
    if isinstance(obj, functools.partial):
        return f"partial({_name_of(obj.func)})"
    name = getattr(obj, "__name__", None) if callable(obj) and not isinstance(obj, torch.nn.Module) else None
    return str(name or type(obj).__name__)


def _is_closed(package: str) -> bool:
    """Its functions and classes are not followed."""
    return package in CLOSED or package in sys.stdlib_module_names


class _Walk:
    def __init__(self) -> None:
        self.out = Dependencies({}, {}, set())
        self._seen: dict[int, Any] = {}

    @staticmethod
    def _note(table: dict[str, Any], path: str, value: Any) -> None:
        """Under a path of its own: an instance's attribute, its class' of the same name and a base class' are three."""
        while path in table and table[path] is not value and table[path] != value:
            path += "'"
        table[path] = value

    def visit(self, x: Any, path: str, depth: int) -> None:
        if isinstance(x, PLAIN):
            self._note(self.out.values, path, x)
            return
        if id(x) in self._seen or not depth or len(self._seen) > NODES:
            return
        self._seen[id(x)] = x
        if isinstance(x, NATIVE):
            owner = getattr(x, "__self__", None)
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self.visit(owner, path, 2)
        elif isinstance(x, (*GENERATORS, types.ModuleType)) or x is os.environ:
            pass  # states are no content; which variables are asked for nobody knows
        elif isinstance(x, (torch.Tensor, np.ndarray)):
            self._note(self.out.values, path, _digest_of_array(x))
        elif isinstance(x, enum.Enum):
            self._note(self.out.values, path, str(x))
        elif isinstance(x, (os.PathLike, re.Pattern)):  # not what they remember of themselves
            self._note(self.out.values, path, os.fspath(x) if isinstance(x, os.PathLike) else (x.pattern, x.flags))
        elif isinstance(x, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(x, path, depth)
        elif isinstance(x, (staticmethod, classmethod)):
            self.visit(x.__func__, path, depth - 1)
        elif isinstance(x, property):
            self.visit(x.fget, path, depth - 1)
        elif isinstance(x, type):
            self._class(x, path, depth)
        elif isinstance(x, (list, tuple, set, frozenset, dict)):
            self._container(x, path, depth)
        else:
            self._instance(x, path, depth)

    def _container(self, x: Any, path: str, depth: int) -> None:
        self._note(self.out.values, f"len({path})", len(x))
        if isinstance(x, dict):
            for k, v in list(x.items())[:WIDTH]:
                self.visit(v, f"{path}[{k!r}]", depth - 1)
        elif isinstance(x, (set, frozenset)):
            self._note(self.out.values, path, sorted(map(repr, list(x)[:WIDTH])))
        else:
            for i, v in enumerate(x[:WIDTH]):
                self.visit(v, f"{path}[{i}]", depth - 1)

    def _instance(self, x: Any, path: str, depth: int) -> None:
        shared = isinstance(x, multiprocessing.sharedctypes.SynchronizedBase)
        if shared or type(x).__module__ in ("_ctypes", "ctypes") or hasattr(type(x), "__next__"):
            return
        package = type(x).__module__.split(".")[0]
        self.out.packages.add(package)
        held = _held(x)
        if not held and package in sys.stdlib_module_names:  # a date, a fraction
            words = repr(x)
            if " at 0x" not in words:
                self._note(self.out.values, path, words[:REPR])
        for k, v in held.items():
            self.visit(v, f"{path}.{k}", depth - 1)
        self._class(type(x), path, depth)

    def _class(self, cls: type, path: str, depth: int) -> None:
        """Class attributes are state, too; and what the methods name that a call goes through."""
        bases = [base for base in cls.__mro__ if not _is_closed(base.__module__.split(".")[0])]
        called = _called(bases)
        for base in bases:
            for k, v in list(vars(base).items()):
                if isinstance(v, (types.FunctionType, staticmethod, classmethod, property)):
                    if k in called:
                        self.visit(v, f"{path}.{k}", depth - 1)
                elif not callable(v) and not k.startswith("__"):
                    self.visit(v, f"{path}.{k}", depth - 1)

    def _function(self, x: Any, path: str, depth: int) -> None:
        if isinstance(x, functools.partial):
            for k, v in (("func", x.func), ("args", x.args), ("keywords", x.keywords)):
                self.visit(v, path if k == "func" else f"{path}.{k}", depth - 1)
            return
        if isinstance(x, types.MethodType):
            self.visit(x.__self__, f"{path}.__self__", depth - 1)
            self.visit(x.__func__, path, depth - 1)
            return
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if not isinstance(value, type):  # __class__, for super()
                self.visit(value, f"{path}:{name}", depth - 1)
        for i, v in enumerate((*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())):
            self.visit(v, f"{path}:default{i}", depth - 1)
        self._note(self.out.code, path, _digest_of_code(x.__code__))
        for code in _codes(x.__code__):
            self.out.packages.update(_imports(code))
            for first, *rest in _names(code):
                named: Any = x.__globals__.get(first, getattr(sys.modules["builtins"], first, None))
                words = first
                for attribute in rest:
                    if not isinstance(named, (types.ModuleType, type)):
                        break
                    named, words = getattr(named, attribute, None), f"{words}.{attribute}"
                self._global(named, words, depth)

    def _global(self, value: Any, words: str, depth: int) -> None:
        """What a global name stands for."""
        if value is None:
            return
        module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if module is None:
            owner = getattr(value, "__self__", None)
            module = getattr(type(owner) if owner is not None else value, "__module__", "") or ""
        package = str(module).split(".")[0]
        self.out.packages.add(package)
        code = isinstance(value, (types.FunctionType, type, *NATIVE))
        if not (code and (_is_closed(package) or package in TRANSFORMS)):
            self.visit(value, words, depth - 1)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> frozenset[str]:
    """Packages that are imported inside a function."""
    return frozenset(
        str(op.argval).split(".")[0] for op in dis.get_instructions(code) if op.opname == "IMPORT_NAME" and op.argval
    )


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The dotted names that begin with a global: ``("np", "random", "rand")``."""
    out: dict[tuple[str, ...], None] = {}
    current: list[str] = []
    for op in dis.get_instructions(code):
        if op.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            out[tuple(current)] = None
            current = [str(op.argval)]
        elif op.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            current += [str(op.argval)] if current else []
        elif op.opname not in ("PRECALL", "CACHE", "PUSH_NULL", "NOP", "RESUME", "EXTENDED_ARG"):
            out[tuple(current)] = None
            current = []
    return tuple(names for names in (*out, tuple(current)) if names)


def _called(bases: list[type]) -> set[str]:
    """Methods that a call, or a look at an item, may come to: by the names in the code of those before."""
    methods: dict[str, list[types.FunctionType]] = {}
    for base in bases:
        for k, v in vars(base).items():
            f = v.fget if isinstance(v, property) else getattr(v, "__func__", v)
            if isinstance(f, types.FunctionType):
                methods.setdefault(k, []).append(f)
    found, todo = set(), [k for k in ENTRIES if k in methods]
    while todo:
        k = todo.pop()
        if k not in found:
            found.add(k)
            names = {n for f in methods[k] for code in _codes(f.__code__) for n in code.co_names}
            todo += [n for n in (methods if "getattr" in names else names) if n in methods]
    return found


@functools.lru_cache(maxsize=4096)
def _digest_of_code(code: types.CodeType) -> str:
    """Of what runs, without where it is written."""
    h = hashlib.sha256()
    for c in _codes(code):
        plain = [
            sorted(map(repr, v)) if isinstance(v, frozenset) else v
            for v in c.co_consts
            if not isinstance(v, types.CodeType)
        ]
        h.update(repr((c.co_code, c.co_names, c.co_varnames, plain)).encode())
    return h.hexdigest()[:16]


def _held(x: Any) -> dict[str, Any]:
    held = dict(getattr(x, "__dict__", {}))
    for base in type(x).__mro__:
        slots = vars(base).get("__slots__", ())
        for k in (slots,) if isinstance(slots, str) else slots:
            if hasattr(x, k):
                held[k] = getattr(x, k)
    return held


def _digest_of_array(x: Any) -> tuple[Any, ...]:
    """What an array or tensor looks like; of a large one a part."""
    if isinstance(x, torch.Tensor):
        look: tuple[Any, ...] = (str(x.dtype), tuple(x.shape), str(x.device))
        if not x.is_cpu or x.layout is not torch.strided or x.is_quantized:
            return (*look, x._version)
        flat = x.detach().reshape(-1)
        step = max(1, flat.numel() * x.element_size() // SAMPLE_BYTES)
        data = flat[::step].contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    else:
        look = (x.dtype.str, x.shape)
        if x.dtype.hasobject:
            return look
        step = max(1, x.nbytes // SAMPLE_BYTES)
        data = np.ascontiguousarray(x.reshape(-1)[::step]).tobytes() if x.size else b""
    return (*look, hashlib.blake2b(data, digest_size=8).hexdigest())
