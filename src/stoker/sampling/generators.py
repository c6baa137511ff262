"""Finds the random generators that a dataset and its helpers hold, by a bounded walk, and seeds them in place.

Libraries share one generator object among many transforms, so a generator is never replaced by another. The walk
follows attributes, items, closures and the globals that the user's functions name. It runs no user code: no property,
no ``__getattr__``, no ``__iter__``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import sys
import threading
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch

from ..core import packages
from ..core.random_state import Generator, bit_generator
from ..core.types import Attributes

DEPTH = 16  # steps: a list item's attribute takes two, a Subset of a dataset with a Compose of transforms 8
NODES = 10_000  # objects visited in one walk
WIDTH = 256  # items of one container; longer ones hold data, so only the first few are visited
FEW = 8
_LEAF = frozenset({bool, int, float, complex, str, bytes, bytearray, type(None), range, slice, torch.Tensor})
_LEAF |= {np.ndarray, torch.nn.Parameter, torch.Size, torch.dtype, torch.device, types.CodeType, memoryview}
_LEAF |= {types.BuiltinFunctionType, types.BuiltinMethodType, types.GetSetDescriptorType, types.MemberDescriptorType}
_LEAF |= {types.WrapperDescriptorType, types.MethodDescriptorType}
NATIVE = (types.BuiltinMethodType, types.MethodWrapperType)
_RECORDS = ("argparse", "builtins", "collections", "functools", "types", "_thread", "_threading_local")
_TYPED = ("<string>", "<stdin>", "<ipython")  # user code that is not in a file
_MASK = (1 << 64) - 1

T = TypeVar("T")
Found: TypeAlias = list[tuple[str, Generator]]  # each with its path


class AwaitedGenerator(NamedTuple):
    """Where a generator may appear or be replaced after a walk."""

    sizes: list[tuple[Attributes, int]]  # namespaces, and how many names each had
    empty: list[tuple[Attributes, str]]  # names whose value was None
    held: list[tuple[Attributes, str, object]]  # names whose value was a generator, and the generator

    def changed(self) -> bool:
        """Whether another walk may find other generators. Takes 1 microsecond."""
        for names, size in self.sizes:
            if len(names) != size:
                return True
        for names, name in self.empty:
            if dict.get(names, name) is not None:
                return True
        return any(dict.get(names, name) is not generator for names, name, generator in self.held)


def in_words(path: str) -> str:
    """Returns a path from a walk over a dataset and a collate function, with their names instead of numbers."""
    return {"0": "dataset", "1": "collate_fn"}.get(path[:1], path[:1]) + path[1:]


def find_generators(*roots: object, watch: AwaitedGenerator | None = None, thread_local: bool = True) -> Found:
    """Finds the generators that can be reached from some objects, each once with its path, except the process-wide
    ones. Paths are the same in every process with the same objects. ``watch``: filled with the places where other
    generators may appear. ``thread_local``: whether to look into this thread's part of a ``threading.local()``."""
    walk = _Walk(watch, thread_local)
    for k, root in enumerate(roots):
        walk.visit(str(k), root, DEPTH)
    return walk.found


def is_generator(x: object) -> TypeGuard[Generator]:
    """Whether ``x`` is a random generator with a state. ``random.SystemRandom`` has none."""
    kind = type(x)
    if issubclass(kind, (random.Random, torch.Generator)):
        return not issubclass(kind, random.SystemRandom)
    return issubclass(kind, (np.random.RandomState, np.random.Generator, np.random.BitGenerator))


def seed_generator(generator: Generator, seed: int) -> None:
    """Seeds a generator in place, with 64 bits; 1 to 3 microseconds for the common kinds."""
    seed &= _MASK
    if isinstance(generator, random.Random):
        random.Random.seed(generator, seed)
    elif isinstance(generator, torch.Generator):
        if generator.device.type == "cpu" or not _forked(generator.device.type):
            generator.manual_seed(seed)
    elif isinstance(generator, np.random.RandomState):
        if isinstance(generator._bit_generator, np.random.MT19937):
            generator.seed(seed & 0xFFFFFFFF)  # an array of two numbers takes 15 times as long
        else:
            state = dict(type(generator._bit_generator)(seed).state)
            generator.set_state({**state, "has_gauss": 0, "gauss": 0.0})
    else:
        _seed_bits(bit_generator(generator), seed)


def path_number(path: str) -> int:
    """Maps a path to a number that is the same in every process."""
    return zlib.crc32(path.encode()) | zlib.adler32(path.encode()) << 32


def _seed_bits(bits: np.random.BitGenerator, seed: int) -> None:
    kind = type(bits)
    if kind not in (np.random.PCG64, np.random.PCG64DXSM):
        bits.state = kind(seed).state
        return
    # PCG64(seed) takes 10 us to mix its seed; this seed is mixed already, and so are these products of it.
    word = seed * 0x9E3779B97F4A7C15F39CC0605CEDC835 & (1 << 128) - 1
    numbers = {"state": word ^ word >> 67, "inc": (seed * 0xDA942042E4DD58B5 << 1 | 1) & (1 << 128) - 1}
    bits.state = {"bit_generator": kind.__name__, "state": numbers, "has_uint32": 0, "uinteger": 0}


def _forked(device: str) -> bool:
    """Whether this process was forked from one that uses the device, and so cannot use it."""
    module = getattr(torch, device, None)
    return bool(getattr(module, "_is_in_bad_fork", bool)())


def own_copies(*roots: object) -> tuple[Any, ...]:
    """Copies objects so that one thread has its own generators; objects that lead to no generator stay shared. Raises
    whatever copying an object raises."""
    parents: dict[int, list[object]] = {}
    walk = _Walk(None, thread_local=False, parents=parents)
    for k, root in enumerate(roots):
        walk.visit(str(k), root, DEPTH)
    spine: dict[int, object] = {}
    ways: list[object] = [g for _, g in walk.found]
    while ways:
        x = ways.pop()
        if id(x) not in spine:
            spine[id(x)] = x
            ways += parents.get(id(x), ())
    memo: dict[int, object] = {}
    for x in spine.values():
        if hasattr(type(x), "_stoker_batches"):
            raise TypeError("a cache is shared by all samples and cannot be copied")
        if isinstance(x, torch.Generator):
            memo[id(x)] = torch.Generator(x.device)
            continue
        direct = [x.__self__] if type(x) is types.MethodType else [*_items(x), *(namespace(x) or {}).values()]
        memo.update((id(child), child) for child in direct if id(child) not in spine)
    return tuple(copy.deepcopy(root, memo) if id(root) in spine else root for root in roots)


def _items(x: object) -> Iterator[object]:
    if isinstance(x, dict):
        yield from dict.values(x)
    bases: tuple[Any, ...] = (list, tuple, deque)
    for base in bases:
        if isinstance(x, base):
            yield from base.__iter__(x)


# -- the walk


class _Walk:
    def __init__(
        self, watch: AwaitedGenerator | None, thread_local: bool, parents: dict[int, list[object]] | None = None
    ) -> None:
        self.found: Found = []
        self._watch, self._thread_local, self._parents = watch, thread_local, parents
        legacy = np.random.mtrand._rand
        process_wide = random._inst, torch.default_generator, legacy, legacy._bit_generator
        self._seen: dict[int, object] = {
            id(g): g for g in (*process_wide, *getattr(torch.cuda, "default_generators", ()))
        }

    def visit(self, path: str, x: object, depth: int) -> None:
        owner: object = getattr(x, "__self__", None) if type(x) in NATIVE else None
        if is_generator(owner):  # ``self.coin = random.Random(5).random``
            x = owner
        if type(x) in _LEAF or id(x) in self._seen or not depth or len(self._seen) > NODES:
            return
        self._seen[id(x)] = x  # kept alive, because the id of a freed object may be reused
        if is_generator(x):
            self.found.append((path, x))
            return
        if self._watch is not None:
            self._note(self._watch, x)
        if not self._thread_local and isinstance(x, threading.local):
            return
        for step, child in children(x):
            if self._parents is not None:
                self._parents.setdefault(id(child), []).append(x)
            self.visit(path + step if step[:1] != "@" else step[1:], child, depth - 1)

    def _note(self, watch: AwaitedGenerator, x: object) -> None:
        names = x if type(x) is dict and len(x) <= FEW else namespace(x)
        if names is not None:
            watch.sizes.append((names, len(names)))
            for name, value in list(names.items())[:WIDTH]:
                if value is None:
                    watch.empty.append((names, name))
                elif is_generator(value):
                    watch.held.append((names, name, value))
        if type(x) is types.FunctionType and _users_file(x.__code__.co_filename):
            names = x.__globals__
            watch.empty.extend((names, name) for name in _all_names(x.__code__) if names.get(name, self) is None)


def namespace(x: object) -> Attributes | None:
    """Returns an object's ``__dict__``; None if it has none, or its type cannot hold user objects."""
    kind: Any = type(x)
    if issubclass(kind, type) or not _open(kind):
        return None
    try:
        base: Any = threading.local if issubclass(kind, threading.local) else object
        names = base.__getattribute__(x, "__dict__")
    except Exception:
        return None
    return names if type(names) is dict else None


def children(x: Any) -> Iterator[tuple[str, object]]:
    """Yields the objects that ``x`` refers to, each with its path step; "@" begins a new path."""
    kind: Any = type(x)
    for base in (list, tuple, deque):
        if issubclass(kind, base):
            for k, value in enumerate(_first(base.__iter__(x), base.__len__(x))):
                yield f"[{k}]", value
    if issubclass(kind, dict):
        pairs = OrderedDict.items(x) if issubclass(kind, OrderedDict) else dict.items(x)
        for k, (key, value) in enumerate(_first(iter(pairs), dict.__len__(x))):
            yield f"[{key!r}]" if type(key) in (str, int) else f"[#{k}]", value
    if kind is types.FunctionType:
        yield from _of_function(x)
    elif kind is types.MethodType:
        yield ".__func__", x.__func__
        yield "", x.__self__
    elif issubclass(kind, functools.partial):
        yield from (("", x.func), (".args", x.args), (".keywords", x.keywords))
    elif kind in (staticmethod, classmethod):
        yield "", x.__func__
    elif issubclass(kind, type):
        yield from _of_class(x, {})
    else:
        yield from _of_instance(x)


def _first(items: Iterator[T], size: int) -> list[T]:
    try:
        return list(itertools.islice(items, size if size <= WIDTH else FEW))
    except RuntimeError:  # another thread is changing it
        return []


def _of_instance(x: Any) -> Iterator[tuple[str, object]]:
    names = namespace(x)
    kind: type = type(x)
    if hasattr(kind, "_stoker_batches"):  # a cache around a dataset: seeds must be the same with and without it
        yield "", x.dataset
        yield from ((f".{name}", value) for name, value in zip(("prepare", "augment"), x._said, strict=True))
        yield ".augment_batch", x.augment_batch
        return
    if names is not None:
        for name, value in list(names.items())[:WIDTH]:
            yield f".{name}", value
    if not _open(kind):
        return
    for c in kind.__mro__[:-1]:
        for name in _names(c, len(vars(c)))[0]:
            with contextlib.suppress(AttributeError):  # still unset
                yield f".{name}", vars(c)[name].__get__(x)
    yield from _of_class(kind, names or {})


def _of_class(kind: type, own: Attributes) -> Iterator[tuple[str, object]]:
    """Yields a class's attributes, except those that an instance overrides; properties as their functions."""
    hidden = set(own)
    for c in kind.__mro__[:-1]:
        members = vars(c)
        for name in _names(c, len(members))[1]:
            value = members[name]
            if name not in hidden or type(value) is types.FunctionType:  # super() reaches overridden functions
                hidden.add(name)
                if is_generator(value):  # libraries replace it in instances by their own
                    yield f".{name}", value
                    continue
                value = value.fget if type(value) is property else value
                yield f"@{_module(c.__module__)}.{c.__qualname__}.{name}", value


@functools.lru_cache(maxsize=4096)
def _names(c: type, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns a class's slots, and its attributes that may lead to generators; for libraries' classes, only attributes
    that are generators."""
    slots, names = [], []
    if not _open(c):
        return (), ()
    users = _users_class(c)
    for name, value in vars(c).items():
        if type(value) is types.MemberDescriptorType:
            slots.append(name)
        elif is_generator(value):
            names.append(name)
        elif users and type(value) not in _LEAF and name not in ("__init__", "__dict__", "__weakref__"):
            names.append(name)  # except __init__, whose draws happen before any sample is loaded
    return tuple(slots), tuple(names)


def _of_function(f: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # still empty
            yield f".{name}", cell.cell_contents
    yield ".__defaults__", f.__defaults__
    yield ".__kwdefaults__", f.__kwdefaults__
    if f.__dict__:
        yield ".__dict__", f.__dict__
    if not _users_file(f.__code__.co_filename):
        return
    names = f.__globals__
    module = _module(str(names.get("__name__")))
    for name in _named(f.__code__, names):
        value = names[name]
        if type(value) is not types.ModuleType:
            yield f"@{module}.{name}", value
            continue
        there = vars(value)
        if _users_file(there.get("__file__") or "<frozen "):
            for inner in _named(f.__code__, there):
                yield f"@{_module(value.__name__)}.{inner}", there[inner]


@functools.lru_cache(maxsize=4096)
def _all_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that code refers to, including those in functions defined in it."""
    out = list(code.co_names)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            out += _all_names(constant)
    return tuple(dict.fromkeys(out))


def _named(code: types.CodeType, names: Attributes) -> Iterator[str]:
    return (name for name in _all_names(code) if name in names and type(names[name]) not in _LEAF)


def _users_file(path: str) -> bool:
    return packages.is_users(path) or path.startswith(_TYPED)


@functools.cache
def _users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or _users_file(getattr(module, "__file__", None) or "<frozen ")


@functools.cache
def _open(kind: type) -> bool:
    """Whether instances may hold user objects: the standard library's loggers, locks and files do not."""
    package = str(kind.__module__).partition(".")[0]
    if package in _RECORDS or package not in sys.stdlib_module_names:
        return True
    return _users_file(getattr(sys.modules.get(package), "__file__", None) or "<frozen ")


def _module(name: str) -> str:
    return "__main__" if name == "__mp_main__" else name
