"""What ``stoker tune`` found, kept in a file where ``num_workers="auto"`` finds it again.

There is one JSON file for each dataset class. An entry holds what its result depends on: machine, dataset and code. It
is used only where all of that is the same; otherwise ``find`` says what has changed.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import sys
import time
from pathlib import Path
from types import FunctionType
from typing import Annotated

import msgspec
import torch

from ..._version import __version__
from ...core import resources
from ...core.files import cache_folder, write
from ...core.object_tree import walk
from ...core.types import LoaderLike

SCHEMA = 3  # is in the name of the file, so files of other versions are not found
ENTRIES = 8  # in one file
SOURCE = "code source"
LIBRARIES = ("torch", "builtins", "stoker")  # their versions are in the key, not their source


Key = dict[str, str | int | None]  # what a result depends on


class Tuned(msgspec.Struct, frozen=True):
    """A result: the setting, and its samples per second."""

    num_workers: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    rate: Annotated[float, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True):
    """A result, what it depends on, and when it was found."""

    key: Key
    tuned: Tuned
    at: str


def folder() -> Path:
    """``$STOKER_PROFILES``, else ``stoker/profiles`` where the system keeps caches."""
    named = os.environ.get("STOKER_PROFILES")
    return Path(named) if named else cache_folder("profiles")


def key_of(loader: LoaderLike) -> Key:
    """What a result for this loader depends on."""
    machine = resources.read(with_gpus=False)
    try:
        samples: int | None = len(loader.dataset)
    except TypeError:
        samples = None
    return {
        "machine cores": machine.cores,
        "machine cores_host": machine.cores_host,
        "machine memory_gb": round(machine.memory / 1e9),
        "machine cpu": _cpu(),
        "machine gpus": ", ".join(resources.gpu_names()),
        "dataset type": type(loader.dataset).__qualname__,
        "dataset samples": samples,
        "dataset batch_size": getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size,
        SOURCE: _code(loader),
        "code python": ".".join(map(str, sys.version_info[:2])),
        "code torch": str(torch.__version__),
        "code stoker": __version__,
    }


def _changes(old: Key, new: Key) -> list[str]:
    names = [name for name in new if old.get(name) != new[name]]
    return [
        "the code has changed" if name == SOURCE else f"{name} was {old.get(name)}, is {new[name]}" for name in names
    ]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _code(loader: LoaderLike) -> str:
    """A hash of the source of what runs for a sample: the classes and functions of all objects that the dataset and the
    collate function hold."""
    kinds: set[type | FunctionType] = set()
    for root in (loader.dataset, loader.collate_fn):
        for _, part in walk(root):
            cls = part if isinstance(part, type) else type(part)
            kinds.update([part] if isinstance(part, FunctionType) else cls.__mro__)
    sources = set()
    for kind in kinds:
        if kind.__module__.split(".")[0] not in LIBRARIES:
            try:
                sources.add(inspect.getsource(kind))
            except (OSError, TypeError):
                sources.add(f"{kind.__module__}.{kind.__qualname__}")
    return hashlib.sha256("\n".join(sorted(sources)).encode()).hexdigest()[:16]


def path_of(loader: LoaderLike) -> Path:
    """The file for a loader's dataset: by its class, and the file in which that is written."""
    inner = loader.dataset
    while type(inner).__module__.startswith("torch.") and hasattr(inner, "dataset"):
        inner = inner.dataset  # of a Subset
    cls = type(inner)
    try:
        written = os.path.realpath(inspect.getfile(cls))
    except (OSError, TypeError):
        written = cls.__module__
    digest = hashlib.sha256(f"{SCHEMA}:{written}:{cls.__qualname__}".encode()).hexdigest()[:12]
    return folder() / f"{cls.__name__}-{digest}.json"


def save(loader: LoaderLike, tuned: Tuned) -> Path | None:
    """Keeps a result. Returns its file; None where it cannot be written."""
    path, key = path_of(loader), key_of(loader)
    try:
        entries = [e for e in _entries(path) if e.key != key][-ENTRIES + 1 :]
    except ValueError:  # the file is damaged, which find says, or no profile at all
        entries = []
    entries.append(Entry(key, tuned, time.strftime("%Y-%m-%d %H:%M:%S")))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(path, msgspec.json.format(msgspec.json.encode(entries), indent=1).decode())
    except OSError:
        return None
    return path


def find(loader: LoaderLike) -> tuple[Tuned | None, str]:
    """The result for a loader as it is now, and words: when it was found, or why there is none. ``(None, "")`` where
    nothing was ever kept. Never raises."""
    try:
        entries = _entries(path_of(loader))
        if not entries:
            return None, ""
        key = key_of(loader)
        for e in reversed(entries):
            if e.key == key:
                return e.tuned, f"stoker tune, {e.at}"
        near = min(reversed(entries), key=lambda e: len(_changes(e.key, key)))
        changes = "; ".join(_changes(near.key, key)[:3])
        return None, f"the profile of {near.at} is not used: {changes}. stoker tune makes a new one"
    except Exception as e:  # a user's dataset may raise, too
        return None, f"the profile cannot be read ({type(e).__name__}: {e})"


def _entries(path: Path) -> list[Entry]:
    """What a file says; nothing where there is none.

    Raises:
        ValueError: it is not a profile.
    """
    try:
        text = path.read_bytes()
    except OSError:
        return []
    return msgspec.json.decode(text, type=list[Entry])
