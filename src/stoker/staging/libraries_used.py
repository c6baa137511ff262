"""What a cache on disk depends on in libraries: versions, files, settings, and what the script has put into them.

Libraries are the packages that the cached part may use, and all that these use. Which packages a package uses is read
from the global variables of its loaded modules. A package that is loaded and not used, say by the model only, does not
count. A version is not enough: a package may have none, or be changed in place.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import re
import sys
import types
from collections.abc import Collection, Mapping

import numpy as np

from ..core.object_tree import PLAIN
from ..core.packages import is_users
from .library_objects import Held, file_stamp
from .users_code import is_users_module

_is_users = functools.cache(is_users)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
ENDS = ("torch", "numpy")  # what else they load depends on the model (torch.compile), and computes no sample
SKIPPED = frozenset({"builtins", "__main__", "__mp_main__", "stoker", *sys.stdlib_module_names})
OF_ONE_RUN = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # as from uuid4()
LEVELS = 3  # of containers in containers
CONTAINERS = (list, dict, tuple, set, frozenset)
WRAPPERS = {  # by type: attribute with the function
    property: "fget",
    classmethod: "__func__",
    staticmethod: "__func__",
    functools.partial: "func",
    functools.partialmethod: "func",
}
WIDTH = 1000  # items of a library's container that are looked at


def versions_of(packages: Collection[str]) -> dict[str, str]:
    """The version of each package, not the user's or Python's own, with a digest of its main file's size and time."""
    modules = _loaded()
    return {name: _token(name, modules[name]) for name in sorted(_used(packages, modules))}


def _loaded() -> dict[str, list[types.ModuleType]]:
    """The loaded modules of each library."""
    out: dict[str, list[types.ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        is_library = top not in SKIPPED and isinstance(module, types.ModuleType)
        if is_library and not ((file := _file(module)) and is_users(file)):
            out.setdefault(top, []).append(module)
    # A folder without __init__.py is a module without a file, and may be the user's.
    return {name: modules for name, modules in out.items() if any(map(_file, modules))}


def _file(module: types.ModuleType) -> str:
    file = vars(module).get("__file__")
    return file if isinstance(file, str) else ""


def _used(packages: Collection[str], modules: Mapping[str, list[types.ModuleType]]) -> set[str]:
    """The packages, and all that they use."""
    out: set[str] = set()
    waiting = [name for name in packages if name in modules]
    while waiting:
        name = waiting.pop()
        if name not in out:
            out.add(name)
            if name in ENDS:
                continue
            waiting += (uses_of(name, modules[name]) & modules.keys()) - out
    return out


_known: dict[str, tuple[int, set[str]]] = {}  # by package: how many modules were loaded, and what they use


def uses_of(name: str, modules: Collection[types.ModuleType]) -> set[str]:
    """The packages to which global variables of these modules belong."""
    count, found = _known.get(name, (0, set()))
    if count != len(modules):
        owners: set[object] = set()
        for module in modules:
            for value in list(vars(module).values()):
                kind = type(value)
                if kind is types.ModuleType:
                    owners.add(value.__name__)
                elif kind in FUNCTIONS or issubclass(kind, type):  # not isinstance(), which may run the value's code
                    owners.add(value.__module__)
                owners.add(kind.__module__)
        found = {owner.partition(".")[0] for owner in owners if isinstance(owner, str)}
        _known[name] = len(modules), found
    return found


def _token(name: str, modules: Collection[types.ModuleType]) -> str:
    package = next((module for module in modules if module.__name__ == name), None)
    version, own = "", ""
    if package is not None:
        version, own = str(vars(package).get("__version__", "")), _file(package)
    stamps = []
    for file in [own] if name in ENDS else sorted(filter(None, map(_file, modules))):
        with contextlib.suppress(OSError):
            found = os.stat(file)
            stamps.append((found.st_size, found.st_mtime_ns))
    digest = hashlib.sha256(repr(stamps).encode()).hexdigest()[:8]
    return f"{version or _version_of_distribution(name) or '?'} ({digest})"


@functools.cache
def _version_of_distribution(name: str) -> str:
    with contextlib.suppress(Exception):
        return importlib.metadata.version(name)
    return ""


def installed() -> list[str]:
    """Stamps of everything that is installed: libraries may import others as they run."""
    return sorted(str(file_stamp(str(getattr(x, "_path", x)))) for x in importlib.metadata.distributions())


# -- what scripts change in libraries


def settings_of(packages: Collection[str]) -> list[tuple[str, str, str]]:
    """Plain global variables of these packages and of those that they use, with what containers and classes hold.
    Public names in lower case are left out: most are what a loop at the end of an import left behind."""
    modules = _loaded()
    found = []
    for package in sorted(_used(packages, modules) - set(ENDS)):
        for module in sorted(modules[package], key=lambda module: module.__name__):
            for name, value in sorted(vars(module).items()):
                is_own = issubclass(type(value), type) and value.__module__ == module.__name__
                is_setting = name.isupper() or name.startswith("_") or isinstance(value, (bool, dict)) or is_own
                if is_setting and not name.startswith("__") and (text := _text_of(value, LEVELS)):
                    found.append((module.__name__, name, text))
    return found


def _text_of(value: Held, levels: int) -> str:
    """A plain value, or the plain ones in a short container or a class, as text; "" if it belongs to one run."""
    if type(value) in PLAIN:
        is_address = isinstance(value, int) and value > 1 << 40
        return "" if is_address or (isinstance(value, str) and OF_ONE_RUN.search(value)) else repr(value)
    if not levels:
        return ""
    return repr(sorted(filter(None, (_text_of(x, levels - 1) for x in _items(value)))))  # sets have no order


def _items(value: Held) -> list[Held]:
    """The items of a short container, or the members of a class."""
    with contextlib.suppress(Exception):  # it may change meanwhile
        if issubclass(type(value), type):
            own = vars(value)
            return [x for name in own if not name.startswith("__") for x in (name, own[name])]
        if isinstance(value, dict) and len(value) <= WIDTH:
            return [x for item in dict.items(value) for x in item]
        if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= WIDTH:
            return list(value)
    return []


def put_into_libraries(packages: Collection[str]) -> dict[str, Held]:
    """The user's functions and classes that are found in these packages, what they use, or the standard library:
    methods that a script has replaced, functions that it has registered. By the name of the place."""
    out: dict[str, Held] = {}
    modules = list(sys.modules.items())
    users = {name for name, module in modules if name == "__main__" or (is_users_module(module) and _file(module))}
    searched = _used({"torch", "numpy", *packages}, _loaded()) | sys.stdlib_module_names
    for module_name, module in modules:
        file = _file(module) if type(module) is types.ModuleType else ""
        if file and not _is_users(file) and module_name.partition(".")[0] in searched:
            _search(vars(module), module_name, users, LEVELS, out)
            for name, value in list(vars(module).items()):
                if issubclass(type(value), type) and value.__module__ == module_name:
                    _search(vars(value), f"{module_name}.{name}", users, LEVELS, out)
    handler = np.geterrcall()
    return out if handler is None else {**out, "numpy.geterrcall()": handler}


def _search(values: Mapping[Held, Held], where: str, users: Collection[str], levels: int, out: dict[str, Held]) -> None:
    """Adds functions and classes of modules of the user's among values, and in containers among them."""
    for name, value in list(values.items()):
        kind = type(value)
        if kind in PLAIN or name == "__builtins__":  # found as the module ``builtins``
            continue
        fn = getattr(value, WRAPPERS[kind]) if kind in WRAPPERS else value
        is_put = False
        if type(fn) is types.FunctionType:
            file = fn.__code__.co_filename  # "<string>" for the methods of dataclasses
            is_put = fn.__module__ in users or (not file.startswith("<") and _is_users(file))
        elif issubclass(kind, type):
            is_put = value.__module__ in users
        elif issubclass(kind, CONTAINERS) and levels >= 0 and (items := _items(value)):
            _search(dict(enumerate(items)), f"{where}.{name}", users, levels - 1, out)
        if is_put:
            out[f"{where}.{name}"] = value
