"""What a cache on disk depends on: the source files, the code that runs and its arguments, and the libraries."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import stat
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..core.errors import UsageError
from ..core.object_tree import TABLES, attributes, walk
from ..core.packages import is_users
from ..core.shared import SharedList
from ..core.types import JsonObject
from .digest import dependencies_of

DEPTH = 8  # of objects in objects, in which file names are looked for
NO_PATHS = (bool, int, float, complex, type(None), type, torch.Tensor, types.ModuleType)
MAX_FOLDERS = 8  # attributes that name a folder, in which other names are looked for
TRIES = 10_000  # names that are looked for in such a folder in vain
TRIES_PER_HIT = 100  # more, for each that is found
MAX_LISTED = 100_000  # files of such a folder


class Sources:
    """The files that a dataset's attributes name."""

    def __init__(self, dataset: object) -> None:
        # path, bytes and time of change in ns, in the order in which they are named
        self.files: list[tuple[str, int, int]] = []
        self._seen: set[str] = set()
        self._tries = dict.fromkeys(_folders_named_by(dataset), TRIES)
        self._visit(dataset, DEPTH, set())
        if not self.files:  # file names are made up from a folder's: "{folder}/{i}.png"
            for folder in self._tries:
                self._add_folder(folder)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.files).encode()).hexdigest()[:16]

    def _visit(self, x: object, depth: int, seen: set[int]) -> None:
        if isinstance(x, (str, bytes, os.PathLike)):
            self._add_named(os.fsdecode(x))
        elif depth and id(x) not in seen and not isinstance(x, NO_PATHS):
            seen.add(id(x))
            for v in _items(x):
                self._visit(v, depth - 1, seen)

    def _add_named(self, path: str) -> None:
        """Adds a file, as it is named or inside a folder that is named."""
        if path in self._seen or not path or len(path) > 4096 or "\0" in path:
            return
        self._seen.add(path)
        if self._add(path) or os.path.isabs(path):
            return
        for folder, tries in self._tries.items():
            if tries > 0:  # texts that are no names, a million captions, are not looked for everywhere
                found = self._add(os.path.join(folder, path))
                self._tries[folder] += TRIES_PER_HIT if found else -1
                if found:
                    return

    def _add_folder(self, folder: str) -> None:
        """Adds the files in a folder and one level below, without hidden ones and caches."""
        for where, folders, names in os.walk(folder):
            below = where != folder
            folders[:] = [] if below else sorted(f for f in folders if not f.startswith("."))
            if "manifest.json" not in names:
                for name in sorted(names):
                    if len(self.files) < MAX_LISTED and not name.startswith("."):
                        self._add_named(os.path.join(where, name))

    def _add(self, path: str) -> bool:
        """Adds a file. Returns whether there is one."""
        try:
            found = os.stat(path)
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):
            return False
        self.files.append((path, found.st_size, found.st_mtime_ns))
        return True


def _folders_named_by(dataset: object) -> list[str]:
    """Folders that attributes name, of the dataset and of objects inside it."""
    out: list[str] = []
    for _, x in walk(dataset):
        for v in attributes(x).values():
            if isinstance(v, (str, bytes, os.PathLike)) and v and len(out) < MAX_FOLDERS:
                with contextlib.suppress(OSError, ValueError):
                    if os.path.isdir(v) and os.fsdecode(v) not in out:
                        out.append(os.fsdecode(v))
    return out


def _items(x: Any) -> Iterator[object]:
    if isinstance(x, dict):
        yield from x.values()
        yield from x.keys()
    elif isinstance(x, (list, tuple, set, frozenset, deque, SharedList)):
        yield from x
    elif isinstance(x, np.ndarray):
        if x.dtype.kind in "OUS":
            yield from x.reshape(-1).tolist()
    elif type(x).__module__.partition(".")[0] in TABLES and hasattr(x, "to_numpy"):
        yield x.to_numpy()
    else:
        yield from attributes(x).values()


def key_of(dataset: object, prepare: object | None, samples: int, extra: str, cut: str = "") -> JsonObject:
    """What a cache of this dataset depends on. ``prepare``: what is run on its samples, if that is known; ``extra``:
    whatever else the user says; ``cut``: which part of the code the samples come from."""
    found = [dependencies_of(part) for part in (dataset, prepare) if part is not None]
    packages = {"torch", "numpy"}.union(*(f.packages for f in found))
    return {
        "samples": samples,
        "the source files": Sources(dataset).digest,
        "what the dataset holds": found[0].content,
        "what prepare uses": "".join(f.content for f in found[1:]),
        "the code": hashlib.sha256("".join((cut, *(f.code for f in found))).encode()).hexdigest()[:16],
        "libraries": _versions(packages),
        "extra": extra,
    }


def _versions(packages: set[str]) -> dict[str, str]:
    """Versions of Python and of libraries. The standard library and the user's own packages have none."""
    out = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in sorted(packages - sys.stdlib_module_names):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin and not is_users(spec.origin):
                out[name] = str(getattr(importlib.import_module(name), "__version__", "?"))
    return out


def name_of(dataset: object) -> str:
    """A name for the folder of a cache."""
    kind = "paths" if isinstance(dataset, (list, tuple)) else type(dataset).__name__
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", kind)[:40]
    if not name:
        raise UsageError("a dataset without a name")
    return name
