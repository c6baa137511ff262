"""Packs what a node needs to run a script's tasks: dataset and functions, the script's own modules, paths, variables.

Classes and functions of ``__main__`` are pickled by value (cloudpickle). The script's other modules are sent as sources
and imported on the node by name, so that pickles, registries and ``isinstance`` work as here. On the node, code keeps
this machine's file names, by which its source is found. Nothing is written to a node's disk.

A dataset with a cache (``Staged``) is sent without the cache's contents. It brings functions that make it again on a
node, and that make the memory shared by all workers there. The actor only makes that memory.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import pickle
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from stoker.core import packages
from stoker.core.errors import UsageError, one_line
from stoker.core.types import Attributes, Batch
from stoker.staging.change_watch import Discards
from stoker.staging.dataset import Staged
from stoker.workers.protocol import WorkerSpec

from .cluster_cache import CacheOfWorker, NodeCache, new_cache

EXTRA = 'Ray is not installed: pip install "stoker[ray]"'
MODULES_BYTES = 20 << 20  # limit for source files; more cannot be a script's own code
# Variables that are sent, by name: threads and settings of libraries, language and time zone, model and data folders,
# ranks. No others, because any may be a credential, above all one that the script has set itself. Users can name more
# in Ray's ``runtime_env``.
TRAVELS = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|NUMBA|TORCH|PYTORCH|OPENCV|LC)_\w+|LANG|LANGUAGE|TZ|PYTHONHASHSEED"
    r"|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|TRANSFORMERS_(CACHE|OFFLINE)"
    r"|TOKENIZERS_PARALLELISM|NLTK_DATA|(LOCAL_)?(RANK|WORLD_SIZE)"
)


class SpecPickle(NamedTuple):
    """A pickled ``WorkerSpec``."""

    light: WorkerSpec  # the specification without the user's objects
    data: bytes  # the pickle, in which each dataset with a cache has a number
    # by that number, the function that makes the cache on a node, given the number of ranks that have workers there
    caches: list[Callable[[int], NodeCache | None]]


class Module(NamedTuple):
    """A module of the script's own."""

    file: str
    source: bytes


@dataclass(frozen=True)
class Shipment:
    """A worker specification and the environment that it needs."""

    spec: SpecPickle
    sources: dict[str, str]  # by file, those of the script's main file and a notebook's cells: nodes cannot import them
    modules: dict[str, Module]  # the script's own, by name
    paths: list[str]  # the trainer's ``sys.path``; entries that exist on the node are added
    folder: str  # the trainer's working directory, which is used if it exists on the node
    variables: dict[str, str]  # of the trainer's environment, as ``TRAVELS``; set on the node if missing there
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))  # known only to holders of this shipment

    @classmethod
    def of(cls, pickled: SpecPickle) -> Shipment:
        """Packs a specification from ``pickled_spec`` with the present environment."""
        variables = {k: v for k, v in os.environ.items() if TRAVELS.fullmatch(k)}
        return cls(pickled, _main_sources(), _own_modules(), [p for p in sys.path if p], os.getcwd(), variables)

    def settle(self) -> None:
        """Gives this process, on the node, the trainer's environment."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        for name, value in self.variables.items():
            os.environ.setdefault(name, value)
        sys.path += [p for p in self.paths if p not in sys.path and os.path.exists(p)]


def pickled_spec(spec: WorkerSpec) -> SpecPickle:
    """Pickles the specification for a node. An unchanged specification has the same pickle. Raises UsageError if it
    cannot be pickled, has a tensor on a device, or Ray is not installed."""
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(EXTRA) from None

    caches: list[Callable[[int], NodeCache | None]] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, x: object) -> object:
            if isinstance(x, torch.Tensor) and x.device.type != "cpu":
                raise UsageError(
                    f"the dataset has a tensor on {x.device}, and other nodes have no such device: keep it on the CPU, "
                    "and move batches in the loop"
                )
            if not isinstance(x, Staged):
                return super().reducer_override(x)
            samples = x._samples if x.usable else 0
            sites = None if x.split is None or x.split.memo is None else x.split.memo.sites
            caches.append(partial(new_cache, samples, sites, x._budget))
            return _on_node, (type(x), _without_contents(x, samples), len(caches) - 1)

    file = io.BytesIO()
    try:
        Pickler(file, protocol=5).dump(spec)
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(f"the dataset cannot be pickled ({one_line(e)})") from e
    light = replace(spec, dataset=None, collate_fn=_nothing, init_fn=None, on_error=None)
    return SpecPickle(light, file.getvalue(), caches)


def _without_contents(staged: Staged, samples: int) -> Attributes:
    """Returns the state of a dataset whose cache, if it has any samples, is made again on another machine."""
    state = staged.__getstate__() | dict.fromkeys(("_store", "_table", "_folder"))
    state |= {"_epoch": 0, "_first_epoch": 0}
    state |= {"_discards": Discards(), "_epochs_are_announced": True}
    state["cache"] = "ram" if samples else None  # also read by code that checks for changes
    return state


_caches: Sequence[CacheOfWorker | None] = ()  # in a node's workers: the node's caches


def _on_node(cls: type[Staged], state: Attributes, number: int) -> Staged:
    cache = _caches[number]
    staged = object.__new__(cls)
    memories = () if cache is None else cache.memories
    staged.__setstate__({**state, "cache": state["cache"] if memories else None, "_memories": memories})
    staged._filler.elsewhere = cache
    return staged


class ShippedSpec(WorkerSpec):
    """A specification with the dataset still pickled: workers unpickle it, the process that starts them does not."""

    shipment: Shipment
    caches: list[NodeCache | None]

    @classmethod
    def of(cls, shipment: Shipment, num_workers: int) -> ShippedSpec:
        out = cls(**{**vars(shipment.spec.light), "num_workers": num_workers})
        object.__setattr__(out, "shipment", shipment)
        object.__setattr__(out, "caches", [new(out.ranks[1]) for new in shipment.spec.caches])
        return out

    def __reduce__(self) -> tuple[Callable[..., WorkerSpec], tuple[object, ...]]:
        shipment = self.shipment
        return _unpickle, (shipment.spec.data, shipment.sources, shipment.modules, self.caches, self.num_workers)


def _nothing(samples: object) -> Batch:
    raise AssertionError("the process that starts workers collates nothing")


def _unpickle(
    data: bytes,
    sources: dict[str, str],
    modules: dict[str, Module],
    caches: list[CacheOfWorker | None],
    num_workers: int,
) -> WorkerSpec:
    global _caches
    for file, source in sources.items():
        _note_source(file, source)
    sys.meta_path.insert(0, _Importer(modules))
    _caches = caches
    spec: WorkerSpec = pickle.loads(data)
    return replace(spec, num_workers=num_workers)


def _note_source(file: str, source: str) -> None:
    # Without a modification time, so that no file of this node replaces it.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file


class _Importer(MetaPathFinder, SourceLoader):  # type: ignore[misc]  # typeshed's own bases need it too
    """Imports the script's own modules from their sources."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self._modules = modules
        self._sources = {module.file: module.source for module in modules.values()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname in self._modules:
            file = self._modules[fullname].file
            inside = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
            return spec_from_file_location(fullname, file, loader=self, submodule_search_locations=inside)
        if any(name.startswith(f"{fullname}.") for name in self._modules):  # a namespace package
            return ModuleSpec(fullname, None, is_package=True)
        return None

    def get_filename(self, fullname: str) -> str:
        return self._modules[fullname].file

    def get_data(self, path: str) -> bytes:
        source = self._sources[path]
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # importing the module will raise it
            _note_source(path, decode_source(source))
        return source


def _main_sources() -> dict[str, str]:
    """Returns the sources of code that is pickled by value, by file name as in code objects."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    cells = [file for file, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None]
    return {file: "".join(linecache.getlines(file)) for file in [main, *cells] if file}


def _own_modules() -> dict[str, Module]:
    """Returns by name all imported modules that are not installed; for packages, every file."""
    out: dict[str, Module] = {}
    packages_seen: set[str] = set()
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name in ("__main__", "__mp_main__") or name.partition(".")[0] in packages_seen:
            continue
        if not path or not path.endswith(".py") or not os.path.isfile(path) or not packages.is_users(path):
            continue
        file = Path(path)
        if file.name != "__init__.py":
            out[name] = Module(path, file.read_bytes())
            continue
        packages_seen.add(name.partition(".")[0])
        for part in sorted(file.parent.rglob("*.py")):
            inside = part.relative_to(file.parent).with_suffix("").parts
            of_part = ".".join((name, *inside)).removesuffix(".__init__")
            out[of_part] = Module(str(part), part.read_bytes())
    size = sum(len(module.source) for module in out.values())
    if size > MODULES_BYTES:
        raise UsageError(
            f"the script's own modules are {size >> 20} MB of source files, and {MODULES_BYTES >> 20} are shipped at "
            "most: install them on the nodes"
        )
    return out
