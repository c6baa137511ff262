"""Decides which code is the user's, and which names it mentions."""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import os
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator

from ..core.marked_code import original
from ..core.packages import is_users
from .library_objects import Held, file_stamp


def qualified_name(x: Held) -> str:
    """Name of a function or class, including its module."""
    return f"{module_name(x.__module__)}.{x.__qualname__}"


def module_name(name: str) -> str:
    """Module name, with ``__main__`` replaced by the name under which another script would import it."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) if name == "__main__" else None
    return os.path.splitext(os.path.basename(file))[0] if file else name


_at_address: dict[int, tuple[weakref.ref[type], int]] = {}  # a class, and how many others were found there before it


def address_of_class(cls: type) -> str:
    """Where a class is in memory: the same in a fork. A class in the place of a deleted one has another address."""
    reference, others = _at_address.get(id(cls), (None, -1))
    if reference is None or reference() is not cls:
        others += 1
        _at_address[id(cls)] = weakref.ref(cls), others
    return f"{id(cls):x}.{others}"


def is_library_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__":
        return False
    if module is not None:
        return not is_users_module(module)
    # From ``exec``, or a module that was loaded and not registered: its code tells, if it has any in Python.
    values = [getattr(x, "__func__", x) for x in vars(cls).values()]
    codes = [x.__code__ for x in values if isinstance(x, types.FunctionType)]
    return not any(map(is_users_code, codes)) if codes else any(map(callable, values))


def runs_library_code(cls: type) -> bool:
    """Whether a library defines methods of a class, which may read any attribute. A user's dataset, too, is a library's
    ``Dataset``; its methods read none."""
    return any(
        is_library_class(base) and not base.__module__.startswith(("builtins", "abc", "typing", "torch.utils.data"))
        for base in cls.__mro__
    )


def is_users_module(module: object) -> bool:
    """Whether a module is neither a library's nor the standard library's."""
    if getattr(module, "__name__", "") == "__main__":
        return True
    file = getattr(module, "__file__", None)
    if file is None:  # a namespace package or a built-in module
        paths = list(getattr(module, "__path__", ()))
        if isinstance(module, types.ModuleType) and module.__spec__ is None:  # created by a script
            return True
        return bool(paths) and is_users(os.path.join(paths[0], "x.py"))
    return is_users(file) and file.endswith((".py", ".pyc"))


def is_users_code(code: types.CodeType) -> bool:
    """Whether code is the user's. Code defined in a notebook cell or by ``exec`` counts as theirs."""
    file = code.co_filename
    if file.startswith("<"):
        return not file.startswith("<frozen ") and not file.startswith("<__array_function__")
    return is_users(file)


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType) -> bytes:
    parts = []
    for c in codes_of(code):
        constants = [
            sorted(map(repr, v)) if isinstance(v, frozenset) else v
            for v in c.co_consts
            if not isinstance(v, types.CodeType)
        ]
        flags = c.co_flags & 0xFFFF  # without those of ``from __future__``
        arguments = c.co_argcount, c.co_posonlyargcount, c.co_kwonlyargcount, flags
        names = c.co_name, c.co_names, c.co_varnames, c.co_freevars, c.co_cellvars
        handlers = getattr(c, "co_exceptiontable", b"")  # Python 3.11; before, in the code
        parts.append((c.co_code, handlers, arguments, names, constants))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def token_of_code(code: types.CodeType) -> bytes:
    return code_digest(original(code))


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code and that of nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def strings_in(constants: Iterable[object]) -> Iterator[str]:
    """Yields identifier-like strings among constants; the names of ``case Box(width=w)`` lie in a tuple."""
    for x in constants:
        if isinstance(x, (tuple, frozenset)):
            yield from strings_in(x)
        elif isinstance(x, str) and x.isidentifier():
            yield x


def matches_positions(code: types.CodeType) -> bool:
    """Whether a function reads attributes by position: ``case Point(x, y)``, with names in ``__match_args__``."""
    return any(op.opname == "MATCH_CLASS" and op.arg for op in dis.get_instructions(code))


IN_TEXTS = frozenset({"query", "eval"})  # methods of pandas that read variables named in a text


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Global variables that a function loads; all names and identifier-like strings that it mentions; modules that it
    imports, with a dot in front for each level of a relative import."""
    read, mentioned, imported = set(), set(), set()
    for c in codes_of(code):
        mentioned |= {*c.co_names, *strings_in(c.co_consts)}
        if not IN_TEXTS.isdisjoint(c.co_names):  # ``frame.query("x > @limit")``
            named = {name for text in c.co_consts if isinstance(text, str) for name in re.findall(r"@(\w+)", text)}
            read |= named
            mentioned |= named
        before: list[object] = []  # values of the last two instructions: the level, and the names after ``import``
        for op in dis.get_instructions(c):
            if op.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                read.add(str(op.argval))
            elif op.opname == "IMPORT_NAME":
                level = before[-2] if len(before) > 1 and isinstance(before[-2], int) else 0
                imported.add("." * level + str(op.argval))
            before.append(op.argval)
    return frozenset(read), frozenset(mentioned), frozenset(imported)


@functools.lru_cache(maxsize=4096)
def constants_in(code: types.CodeType) -> frozenset[str]:
    """Identifier-like strings that a function holds."""
    return frozenset(text for c in codes_of(code) for text in strings_in(c.co_consts))


@functools.lru_cache(maxsize=4096)
def attributes_read(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """Global variables whose attributes a function loads, with the attribute names: ``("sys", "argv")``."""
    found: set[tuple[str, ...]] = set()
    for c in codes_of(code):
        names: tuple[str, ...] = ()
        for op in dis.get_instructions(c):
            if op.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names = (str(op.argval),)
            elif names and op.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                names = (*names, str(op.argval))
                found.add(names)
            elif op.opname not in ("CACHE", "PRECALL"):
                names = ()
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def has_branches(code: types.CodeType) -> bool:
    """Whether a function decides anything: ``with`` and ``assert`` do not count."""
    names = [op.opname for c in codes_of(code) for op in dis.get_instructions(c)]
    jumps = sum("JUMP_IF" in name or name.startswith("POP_JUMP") for name in names)
    return jumps > names.count("WITH_EXCEPT_START") + names.count("LOAD_ASSERTION_ERROR")


@functools.lru_cache(maxsize=4096)
def uses_hashes(code: types.CodeType) -> bool:
    """Whether a function asks for hashes, or builds a set, whose order depends on them."""
    for c in codes_of(code):
        if not HASHES.isdisjoint(c.co_names):
            return True
        if any(op.opname in ("BUILD_SET", "SET_ADD", "SET_UPDATE") for op in dis.get_instructions(c)):
            return True
    return False


HASHES = frozenset({"hash", "__hash__", "set", "frozenset"})


def file_of_module(name: str) -> object:
    """Stamps of the file from which a module would be imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or not is_users(spec.origin):
        return None
    return file_stamp(spec.origin)
