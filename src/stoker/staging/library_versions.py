"""Which versions of which libraries cached samples depend on: of packages that the cached part may use, and of all that
these use.

Which packages a package uses is read from the global variables of its loaded modules. A package that is loaded and not
used, say by the model only, does not count. A version is not enough: a package may have none, or be changed in place.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import sys
import types
from collections.abc import Collection, Mapping

from ..core.packages import is_users

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
ENDS = ("torch", "numpy")  # what else they load depends on the model (torch.compile), and computes no sample
SKIPPED = frozenset({"builtins", "__main__", "__mp_main__", "stoker", *sys.stdlib_module_names})


def versions_of(packages: Collection[str]) -> dict[str, str]:
    """The version of each package, with a digest of the size and time of its main file. The standard library and the
    user's own packages have none."""
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
    return out


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
    for file in [own] if own else sorted(filter(None, map(_file, modules))):  # a namespace package has no file
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
