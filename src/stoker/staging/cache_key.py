"""What a cache on disk depends on: source files, the code that runs and the data it reads, and library versions."""

from __future__ import annotations

import contextlib
import hashlib
import locale
import os
import platform
import re
import sys
from collections.abc import Collection
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from ..core.errors import UsageError
from ..core.packages import is_users
from ..core.types import JsonObject
from .inputs import Inputs
from .library_objects import file_stamp
from .library_versions import versions_of
from .source_files import SourceFiles


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


READ_BY_LIBRARIES = ("TZ", "LC_", "LANG", "OMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH_", "LD_")


def name_of(dataset: object) -> str:
    """A folder name for a cache."""
    kind = "paths" if isinstance(dataset, (list, tuple)) else type(dataset).__name__
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", kind)[:40]
    if not name:
        raise UsageError("the class of the dataset has no name")
    return name
