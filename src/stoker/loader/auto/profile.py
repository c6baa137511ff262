"""What tuning found, kept in a file where ``num_workers="auto"`` finds it again.

One JSON file for each dataset class and what it was found on: machine, dataset, code. A profile of another machine, a
changed dataset or changed code is not used, and that is said.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import platform
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

from ..._version import __version__
from ...core import resources
from ...core.files import write
from ...core.object_tree import walk

KEPT = 8  # keys in one file
MOST = 1 << 16  # workers
SCHEMA = 1
_OWN = ("torch", "builtins", "stoker")


def folder() -> Path:
    """``$STOKER_PROFILES``, else ``stoker/profiles`` where caches belong (XDG Base Directory Specification)."""
    named = os.environ.get("STOKER_PROFILES")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "stoker" / "profiles"


def key_of(loader: Any) -> dict[str, dict[str, Any]]:
    """What an answer depends on, in three groups."""
    grant = resources.read(with_gpus=False)
    dataset = loader.dataset
    try:
        length: int | None = len(dataset)
    except TypeError:
        length = None
    return {
        "machine": {
            "cores": grant.cores,
            "cores_host": grant.cores_host,
            "memory_gb": round(grant.memory / 1e9),
            "cpu": _cpu(),
            "gpus": list(resources.gpu_names()),
        },
        "dataset": {
            "type": type(dataset).__qualname__,
            "samples": length,
            "batch_size": getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size,
        },
        "code": {
            "source": _code(loader),
            "python": ".".join(map(str, sys.version_info[:2])),
            "torch": torch.__version__,
            "stoker": __version__,
        },
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _code(loader: Any) -> str:
    """A hash of the source of what runs for a sample: the dataset's classes, what they hold that can be called, and
    the collate function."""
    sources: dict[str, None] = {}
    seen: set[type | types.FunctionType] = set()
    for _, thing in walk((loader.dataset, loader.collate_fn)):
        if not callable(thing) and not hasattr(thing, "__getitem__"):
            continue
        kind = thing if isinstance(thing, (types.FunctionType, type)) else type(thing)
        if kind in seen:
            continue
        seen.add(kind)
        for cls in inspect.getmro(kind) if isinstance(kind, type) else (kind,):
            if cls.__module__.split(".")[0] in _OWN:
                continue
            try:
                sources.setdefault(inspect.getsource(cls))
            except (OSError, TypeError):
                sources.setdefault(f"{cls.__module__}.{cls.__qualname__}")
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]


def path_of(loader: Any) -> Path:
    """The file for a loader's dataset: by its class and where that is written."""
    cls = type(loader.dataset)
    inner = loader.dataset
    while getattr(type(inner), "__module__", "").startswith("torch.") and hasattr(inner, "dataset"):
        inner = inner.dataset  # a Subset of it
        cls = type(inner)
    try:
        where = os.path.realpath(inspect.getfile(cls))
    except (OSError, TypeError):
        where = cls.__module__
    digest = hashlib.sha256(f"{where}:{cls.__qualname__}".encode()).hexdigest()[:12]
    return folder() / f"{cls.__name__}-{digest}.json"


def save(loader: Any, answer: dict[str, Any]) -> Path | None:
    """Keeps ``answer``: ``{"process": workers, "thread": workers, "rate": ..}``. None where it cannot be written."""
    path = path_of(loader)
    key = key_of(loader)
    try:
        entries = [e for e in _entries(path) if e["key"] != key][-KEPT + 1 :]
    except Exception:  # what stands there is no profile; find said so
        entries = []
    entries.append({"key": key, "answer": answer, "at": time.strftime("%Y-%m-%d %H:%M:%S")})
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(path, json.dumps({"schema": SCHEMA, "entries": entries}, indent=1))
    except OSError:
        return None
    return path


def find(loader: Any) -> tuple[dict[str, Any] | None, str]:
    """The answer for a loader as it is now, and words: where it comes from, or what is another. ``(None, "")`` where
    nothing was ever kept. Never raises."""
    try:
        path = path_of(loader)
        entries = _entries(path)
        if not entries:
            return None, ""
        key = key_of(loader)
        for e in reversed(entries):
            if e["key"] == key:
                return dict(e["answer"]), f"stoker tune, {e['at']}"
        near = min(reversed(entries), key=lambda e: len(_changes(e["key"], key)))
        changes = "; ".join(_changes(near["key"], key)[:3])
        return None, f"the profile of {near['at']} is not used: {changes}. stoker tune makes a new one"
    except Exception as e:  # a file that somebody else wrote
        return None, f"the profile cannot be read ({type(e).__name__}: {e})"


def _entries(path: Path) -> list[dict[str, Any]]:
    """What a file says.

    Raises:
        ValueError: that is no profile.
    """
    try:
        text = path.read_text()
    except OSError:
        return []
    kept = json.loads(text)
    if not isinstance(kept, dict) or kept.get("schema") != SCHEMA:
        return []
    entries = kept.get("entries")
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError("its entries are none of stoker tune's")
    return entries


def _is_entry(e: Any) -> bool:
    """Whether it can be used without a second look."""
    if not (isinstance(e, dict) and isinstance(e.get("at"), str) and isinstance(e.get("answer"), dict)):
        return False
    key, answer = e.get("key"), e["answer"]
    if not (isinstance(key, dict) and all(isinstance(group, dict) for group in key.values())):
        return False
    counts = [answer[name] for name in ("process", "thread", "num_workers") if name in answer]
    rate = answer.get("rate", 0.0)
    good = all(type(n) is int and 0 <= n <= MOST for n in counts)
    return good and type(rate) in (int, float) and 0 <= rate < math.inf


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    out = []
    for group, fields in new.items():
        for name, value in fields.items():
            before = old.get(group, {}).get(name)
            if before != value:
                words = "the code has changed" if name == "source" else f"{group} {name} was {before}, is {value}"
                out.append(words)
    return out
