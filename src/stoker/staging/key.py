"""What a cache on disk depends on: the source files, the code that runs and its arguments, and the libraries."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import re
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from .reach import DEPTH, PLAIN, reach

LIBRARIES = ("torch", "numpy", "PIL", "torchvision", "cv2", "albumentations", "monai", "timm", "skimage", "scipy")
CONTENT_BYTES = 1 << 20  # read at once
NO_PATHS = (bool, int, float, complex, bytes, type(None), type, torch.Tensor, np.ndarray, types.ModuleType)


class Sources:
    """The files that a dataset's attributes name.

    Attributes:
        files: path, bytes, mtime in ns; in the order in which they are named.
    """

    def __init__(self, dataset: Any, content: bool) -> None:
        self.files: list[list[Any]] = []
        self._content, self._seen = content, set[str]()
        self._look(dataset, DEPTH, set(), str(getattr(dataset, "root", "")) or "")

    def _look(self, x: Any, depth: int, seen: set[int], root: str) -> None:
        if isinstance(x, (str, os.PathLike)):
            self._file(os.fspath(x), root)
        elif depth and id(x) not in seen and not isinstance(x, NO_PATHS):
            seen.add(id(x))
            for v in _inside(x):
                self._look(v, depth - 1, seen, root)

    def _file(self, path: Any, root: str) -> None:
        if not isinstance(path, str) or path in self._seen or not path or len(path) > 4096 or "\0" in path:
            return
        self._seen.add(path)
        for p in (path, os.path.join(root, path)) if root and not os.path.isabs(path) else (path,):
            try:
                found = os.stat(p)
            except OSError:
                continue
            if os.path.isfile(p):
                self.files.append([p, found.st_size, self._hash(p) if self._content else found.st_mtime_ns])
                return

    def _hash(self, path: str) -> str:
        h = hashlib.blake2b(digest_size=16)
        with open(path, "rb") as file:
            while part := file.read(CONTENT_BYTES):
                h.update(part)
        return h.hexdigest()

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.files).encode()).hexdigest()[:16]


def _inside(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        yield from x.values()
        yield from x.keys()
    elif isinstance(x, (list, tuple, set, frozenset)) or type(x).__module__ == "stoker.shared":
        yield from x
    else:
        yield from getattr(x, "__dict__", {}).values()


def _all(x: Any, depth: int, seen: dict[int, Any], h: Any) -> None:
    """Everything plain that a dataset holds, whole: numbers, words, arrays."""
    if isinstance(x, PLAIN):
        h.update(repr(x).encode("utf-8", "surrogatepass") + b";")
        return
    if id(x) in seen or not depth or isinstance(x, (type, types.ModuleType, types.FunctionType)):
        return
    seen[id(x)] = x
    if isinstance(x, torch.Tensor) and x.is_cpu and x.layout is torch.strided and not x.is_quantized:
        h.update(repr((x.dtype, tuple(x.shape))).encode())
        x = x.detach().contiguous().view(-1).view(torch.uint8).numpy() if x.numel() else np.zeros(0)
    if isinstance(x, np.ndarray):
        if not x.dtype.hasobject:
            h.update(repr((x.dtype, x.shape)).encode())
            h.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8) if x.size else b"")
    elif isinstance(x, (set, frozenset)):
        h.update(repr(sorted(map(repr, x))).encode())
    else:
        h.update(b"(")
        for v in _inside(x):
            _all(v, depth - 1, seen, h)
        h.update(b")")


def key_of(
    dataset: Any, walked: list[Any], samples: int, extra: str, content: bool
) -> tuple[dict[str, Any], list[list[Any]]]:
    """What a cache of this dataset depends on, in words, and its source files.

    Args:
        dataset: whose attributes name files and hold arrays; without its random part.
        walked: what runs for a sample: the dataset without its random part, and ``prepare``.
        samples: its length.
        extra: whatever else the user says.
        content: files are known by their content, not by size and time.
    """
    sources = Sources(dataset, content)
    held = hashlib.blake2b(digest_size=8)
    _all(dataset, DEPTH, {}, held)
    code, values = hashlib.sha256(), {}
    roots = {"torch", "numpy"}
    for n, thing in enumerate(walked):
        found = reach(thing)
        roots |= found.roots
        for path in sorted(found.code):
            code.update(f"{path}:{found.code[path]};".encode())
        values.update({k + "'" * n: v for k, v in found.values.items() if not k.startswith(("Sources", "_here"))})
    arguments = {k: _words(v) for k, v in sorted(values.items())}
    libraries = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in LIBRARIES:
        if name in roots:  # not what happens to be imported: another script would have another key
            with contextlib.suppress(ImportError):
                libraries[name] = str(getattr(importlib.import_module(name), "__version__", "?"))
    return {
        "samples": samples,
        "sources": sources.digest,
        "what the dataset holds": held.hexdigest(),
        "the code": code.hexdigest()[:16],
        "arguments": arguments if len(arguments) <= 200 else _hashed(arguments),
        "libraries": libraries,
        "extra": extra,
    }, sources.files


def _words(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else words[:40] + _hashed(words)


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def name_of(dataset: Any) -> str:
    """A name for a folder."""
    kind = "paths" if isinstance(dataset, (list, tuple)) else type(dataset).__name__
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", kind)[:40]
    if not name:
        raise UsageError("a dataset without a name")
    return name
