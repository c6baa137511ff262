"""What a cache on disk depends on: source files, the code that runs and the data it reads, and library versions."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import platform
import re
import sys
from collections.abc import Collection

from ..core.errors import UsageError
from ..core.packages import is_users
from ..core.types import JsonObject
from .inputs import Inputs
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
        "libraries": _versions({"torch", "numpy"} | inputs.packages),
        "extra": extra,
    }


def _versions(packages: set[str]) -> dict[str, str]:
    """Versions of Python and libraries. The standard library and the user's own packages have none."""
    out = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in sorted(packages - sys.stdlib_module_names):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin and not is_users(spec.origin):
                out[name] = str(getattr(importlib.import_module(name), "__version__", "?"))
    return out


def name_of(dataset: object) -> str:
    """A folder name for a cache."""
    kind = "paths" if isinstance(dataset, (list, tuple)) else type(dataset).__name__
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", kind)[:40]
    if not name:
        raise UsageError("a dataset without a name")
    return name
