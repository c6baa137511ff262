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

from ..core.dataset_tree import attributes
from ..core.errors import UsageError
from ..core.packages import is_users
from .digest import fingerprint
from .store.folder import SourceFile, content_digest

DEPTH = 8  # of objects in objects, in which file names are looked for
TABLES = ("pandas", "polars")
NO_PATHS = (bool, int, float, complex, type(None), type, torch.Tensor, types.ModuleType)
FOLDERS = 8  # attributes that name a folder, in which other names are looked for
TRIES, GAIN = 10_000, 100  # names that are looked for there in vain, and how many more for each that is found
LISTED = 100_000  # files of such a folder


class Sources:
    """The files that a dataset's attributes name.

    Attributes:
        files: path, bytes, mtime in ns; in the order in which they are named.
    """

    def __init__(self, dataset: Any, content: bool) -> None:
        self.files: list[SourceFile] = []
        self._content, self._seen = content, set[str]()
        self._folders: dict[str, int] = {}  # with how often more it is worth a try
        self._find_folders(dataset, DEPTH, set())
        self._look(dataset, DEPTH, set())
        if not self.files:  # its names are made up from a folder's: "{folder}/{i}.png"
            for folder in self._folders:
                self._list(folder)

    def _find_folders(self, x: Any, depth: int, seen: set[int]) -> None:
        """Attributes that name a folder, of the dataset and what it wraps."""
        attributes = getattr(x, "__dict__", None)
        if not depth or id(x) in seen or isinstance(x, NO_PATHS) or not isinstance(attributes, dict):
            return
        seen.add(id(x))
        for v in attributes.values():
            if isinstance(v, (str, bytes, os.PathLike)):
                with contextlib.suppress(OSError, ValueError):
                    if v and len(self._folders) < FOLDERS and os.path.isdir(v) and os.fsdecode(v) not in self._folders:
                        self._folders[os.fsdecode(v)] = TRIES
            else:
                self._find_folders(v, depth - 1, seen)

    def _list(self, folder: str) -> None:
        """The files in it and one level below, but for what is hidden and for caches."""
        for where, folders, names in os.walk(folder):
            below = where != folder
            folders[:] = [] if below else sorted(f for f in folders if not f.startswith("."))
            if "manifest.json" not in names:
                for name in sorted(names):
                    if len(self.files) < LISTED and not name.startswith("."):
                        self._file(os.path.join(where, name))

    def _look(self, x: Any, depth: int, seen: set[int]) -> None:
        if isinstance(x, (str, bytes, os.PathLike)):
            self._file(os.fsdecode(x))
        elif depth and id(x) not in seen and not isinstance(x, NO_PATHS):
            seen.add(id(x))
            for v in _inside(x):
                self._look(v, depth - 1, seen)

    def _file(self, path: str) -> None:
        if path in self._seen or not path or len(path) > 4096 or "\0" in path:
            return
        self._seen.add(path)
        if self._take(path) or os.path.isabs(path):
            return
        for folder, odds in self._folders.items():
            if odds > 0:  # words that are no names, a million captions, are not looked for everywhere
                found = self._take(os.path.join(folder, path))
                self._folders[folder] += GAIN if found else -1
                if found:
                    return

    def _take(self, path: str) -> bool:
        """Notes a file, if it is one."""
        try:
            found = os.stat(path)
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):
            return False
        self.files.append((path, found.st_size, content_digest(path) if self._content else found.st_mtime_ns))
        return True

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.files).encode()).hexdigest()[:16]


def _inside(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        yield from x.values()
        yield from x.keys()
    elif isinstance(x, (list, tuple, set, frozenset, deque)) or type(x).__module__ == "stoker.core.shared":
        yield from x
    elif isinstance(x, np.ndarray):
        if x.dtype.kind in "OUS":
            yield from x.reshape(-1).tolist()
    elif type(x).__module__.partition(".")[0] in TABLES and hasattr(x, "to_numpy"):
        yield x.to_numpy()
    else:
        yield from attributes(x).values()


def key_of(
    dataset: Any, walked: list[Any], samples: int, extra: str, content: bool, cut: str = ""
) -> tuple[dict[str, Any], list[SourceFile]]:
    """What a cache of this dataset depends on, in words, and its source files.

    Args:
        dataset: whose attributes name files and hold arrays.
        walked: what runs for a sample: the dataset, and ``prepare``.
        samples: its length.
        extra: whatever else the user says.
        content: files are known by their content, not by size and time.
        cut: which part of the code the samples come from.
    """
    sources = Sources(dataset, content)
    found = list(map(fingerprint, walked))
    packages = {"torch", "numpy"}.union(*(f.packages for f in found))
    return {
        "samples": samples,
        "sources": sources.digest,
        "what the dataset holds": found[0].content,
        "what prepare uses": "".join(f.content for f in found[1:]),
        "the code": hashlib.sha256("".join((cut, *(f.code for f in found))).encode()).hexdigest()[:16],
        "libraries": _versions(packages),
        "extra": extra,
    }, sources.files


def _versions(packages: set[str]) -> dict[str, str]:
    """Versions of Python, and of libraries that are none of Python's own nor the user's."""
    out = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in sorted(packages - sys.stdlib_module_names):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin and not is_users(spec.origin):
                out[name] = str(getattr(importlib.import_module(name), "__version__", "?"))
    return out


def name_of(dataset: Any) -> str:
    """A name for a folder."""
    kind = "paths" if isinstance(dataset, (list, tuple)) else type(dataset).__name__
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", kind)[:40]
    if not name:
        raise UsageError("a dataset without a name")
    return name
