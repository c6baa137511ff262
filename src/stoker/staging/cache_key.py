"""What a cache on disk depends on: source files, the code that runs and the data it reads, and library versions.

The versions are those of packages that the cached part may use, and of all that these use. Which packages a package
uses is read from the global variables of its loaded modules. A package that is loaded and not used, say by the model
only, does not count. A version is not enough: a package may have none, or be changed in place.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import locale
import os
import platform
import re
import sys
import types
from collections.abc import Collection, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from ..core.errors import UsageError
from ..core.packages import is_users
from ..core.types import JsonObject
from .inputs import Inputs
from .library_objects import file_stamp
from .source_files import SourceFiles

READ_BY_LIBRARIES = ("TZ", "LC_", "LANG", "OMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH_", "LD_")
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
ENDS = ("torch", "numpy")  # what else they load depends on the model (torch.compile), and computes no sample
SKIPPED = frozenset({"builtins", "__main__", "__mp_main__", "stoker", *sys.stdlib_module_names})


def key_of(
    inputs: Inputs, opened: Collection[str], sources: SourceFiles, samples: int, extra: str, cut: str
) -> JsonObject:
    """Builds the key of a cache. ``inputs``: made with ``across_runs``; ``opened``: paths of what loading samples
    creates; ``extra``: the user's own text; ``cut``: the part of the code that makes the cached samples."""
    held, code = inputs.keys(opened)
    stamps = repr(sorted(sources.stamps.items())).encode()
    return {
        "samples": samples,
        "the source files": hashlib.sha256(stamps).hexdigest()[:32],
        "what the dataset holds": held,
        "the code": hashlib.sha256((cut + code).encode()).hexdigest()[:32],
        "libraries": {
            "python": ".".join(platform.python_version_tuple()[:2]),
            **versions_of({"torch", "numpy"} | inputs.packages),
        },
        "native modules": _native_modules(inputs.packages),
        "machine": _machine(),
        # Hashes differ between processes, unless PYTHONHASHSEED is set, and so does the order of a set of strings.
        "hashes": str(hash("seed")) if inputs.depends_on_hashes else "",
        "extra": extra,
    }


def _native_modules(packages: Collection[str]) -> str:
    """Digest of the stamps of the user's own extension modules, which have no version and may be built again."""
    files = {
        str(file)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and (file := getattr(module, "__file__", None))
    }
    natives = sorted(file for file in files if file.endswith(tuple(EXTENSION_SUFFIXES)) and is_users(file))
    return hashlib.sha256(repr([file_stamp(file) for file in natives]).encode()).hexdigest()[:16] if natives else ""


def _machine() -> str:
    """Digest of what native code may depend on: the processor's instructions, how many threads share a sum, torch's
    settings, and variables of the environment that libraries read themselves."""
    flags = ""
    with contextlib.suppress(OSError, StopIteration):
        text = Path("/proc/cpuinfo").read_text()
        flags = next(line for line in text.splitlines() if line.startswith(("flags", "Features")))
    settings = torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, torch.get_num_threads()
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(READ_BY_LIBRARIES))
    found = platform.machine(), flags, settings, variables, locale.setlocale(locale.LC_ALL)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def name_of(dataset: object) -> str:
    """A folder name for a cache."""
    kind = "paths" if isinstance(dataset, (list, tuple)) else type(dataset).__name__
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", kind)[:40]
    if not name:
        raise UsageError("the class of the dataset has no name")
    return name


# -- versions of libraries


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
