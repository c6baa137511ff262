"""How reports describe a loader: its name, its settings, and the number of samples in its batches."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.data.dataloader as torch_loader

from ..core import packages
from ..core.division import divides
from ..core.options import AutoWorkers
from ..core.stacks import short
from ..core.types import Batch, JsonObject
from .loader_state import state_of


def settings_of(loader: object) -> JsonObject:
    """Returns a loader's settings by torch's names, for the report. A class that only resembles torch's may lack
    some."""

    def get(name: str, default: object = None) -> Any:
        return getattr(loader, name, default)

    context, whole = get("multiprocessing_context"), owner(loader)
    is_stream = get("_dataset_kind", 0) != 0
    return {
        "class": type(whole).__qualname__,
        "dataset": type(getattr(whole, "dataset", None)).__name__,
        "batch_size": getattr(get("batch_sampler"), "batch_size", None)
        or get("batch_size")
        or getattr(whole, "bs", None),
        "num_workers": int(get("num_workers", 0)),
        "auto": isinstance(get("num_workers"), AutoWorkers),
        "prefetch_factor": get("prefetch_factor"),
        "persistent_workers": bool(get("persistent_workers")),
        "pin_memory": bool(get("pin_memory")),
        "in_order": get("in_order", True),
        "worker_method": get("worker_method", "process"),
        "multiprocessing_context": context.get_start_method() if hasattr(context, "get_start_method") else None,
        "iterable": is_stream,
        "divides": is_stream and divides(get("dataset")),
    }


def owner(loader: object) -> object:
    """Returns the loader that the user knows: fastai passes an internal object to torch's iterators, whose dataset is
    the object itself."""
    return vars(loader).get("d", loader) if getattr(loader, "dataset", None) is loader else loader


def name_of(loader: object) -> str:
    """Returns a loader's name for reports: the line that created it, if that was observed."""
    whole = owner(loader)
    return state_of(loader).name or f"{type(whole).__name__} of {type(getattr(whole, 'dataset', None)).__name__}"


def bypass(loader: object, it: object) -> str:
    """Why stoker's engine cannot serve a loader; "" if it can."""
    cls = type(it)
    if cls.__module__.startswith("stoker.") or (cls in _TORCHS and isinstance(loader, torch_loader.DataLoader)):
        return ""
    if cls.__module__.startswith("torchdata."):
        return "torchdata's StatefulDataLoader has its own iterators, and its state_dict() describes those"
    if cls in _TORCHS:
        return f"{type(owner(loader)).__module__} uses torch's iterators without a DataLoader"
    if isinstance(it, torch_loader._BaseDataLoaderIter):
        return f"it uses its own iterator class, {cls.__qualname__}"
    return f"its class {type(loader).__qualname__} makes batches without torch's iterators"


_TORCHS = (torch_loader._SingleProcessDataLoaderIter, torch_loader._MultiProcessingDataLoaderIter)


def count(batch: Batch, default: int) -> int:
    """Samples in a batch: the length of its first tensor, array or list of other values; else ``default``."""
    for _ in range(4):
        if isinstance(batch, torch.Tensor) or hasattr(batch, "__array__"):
            return int(batch.shape[0]) if batch.ndim else default
        if isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and len(batch):
            if not isinstance(batch[0], (torch.Tensor, Mapping, Sequence)) or isinstance(batch[0], (str, bytes)):
                return len(batch)
            batch = batch[0]
        else:
            break
    return default


def made_at(frame: FrameType | None) -> str:
    """``file:line`` of the user's code that is creating a loader: the nearest frame outside libraries."""
    nearest = None
    while frame is not None:
        path = frame.f_code.co_filename
        if packages.is_users(path) or not path.startswith(("<", *packages.OWN, packages.torch())):
            here = f"{short(path)}:{frame.f_lineno}"
            nearest = nearest or here
            if packages.is_users(path):
                return here
        frame = frame.f_back
    return nearest or "?"


# datasets of loaders that a script's own code created, and the loaders' names
_datasets: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_names: dict[int, str] = {}
_PURPOSE = re.compile("(train|val|eval|test|predict).*loader")


def new_name(loader: object, dataset: object, frame: FrameType | None) -> str:
    """Names a loader that is being created. A loader that a framework rebuilds from the script's with another sampler
    keeps the name."""
    name = made_at(frame)
    # Skips constructors of subclasses, and functions around them that hold the loader: they belong to the call itself.
    engines = *packages.OWN, packages.torch()
    while frame is not None and (
        frame.f_code.co_filename.startswith(engines) or any(value is loader for value in frame.f_locals.values())
    ):
        frame = frame.f_back
    if frame is not None and not packages.is_users(frame.f_code.co_filename):
        for made_of in (dataset, getattr(dataset, "dataset", None)):
            if _datasets.get(id(made_of)) is made_of and made_of is not None:
                return _names[id(made_of)]
        # A framework creates all its loaders from one line of the script, the one that calls ``train()``.
        purpose = _purpose(frame)
        return f"{name} ({purpose})" if purpose else name
    with contextlib.suppress(TypeError):  # a list cannot be weakly referenced
        _datasets[id(dataset)] = dataset
        _names[id(dataset)] = name
    return name


def _purpose(frame: FrameType | None) -> str:
    """The library function whose name tells what the loader is for, such as ``get_eval_dataloader``; "" if none
    does."""
    while frame is not None and not packages.is_users(frame.f_code.co_filename):
        if _PURPOSE.search(frame.f_code.co_name):
            return frame.f_code.co_name
        frame = frame.f_back
    return ""
