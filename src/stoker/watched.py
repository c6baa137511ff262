"""What a watched loader is called, which settings it has, and how many samples are in its batches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from . import engine
from .options import AutoWorkers
from .stacks import short


def settings_of(loader: Any) -> dict[str, Any]:
    """A loader's settings by torch's names, for the report."""
    context = loader.multiprocessing_context
    return {
        "dataset": type(loader.dataset).__name__,
        "batch_size": getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size,
        "num_workers": int(loader.num_workers),
        "auto": isinstance(loader.num_workers, AutoWorkers),
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory": bool(loader.pin_memory),
        "in_order": getattr(loader, "in_order", True),
        "worker_method": (engine.state_of(loader).method or (getattr(loader, "worker_method", "process"),))[0],
        "multiprocessing_context": context.get_start_method() if hasattr(context, "get_start_method") else None,
        "iterable": loader._dataset_kind != 0,
    }


def count(batch: Any, default: int) -> int:
    """Samples in a batch: the length of its first tensor or array, of a list of anything else, or ``default``."""
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
    """``file:line`` of the user's code that is making a loader: the nearest frame outside of libraries."""
    nearest = None
    while frame is not None:
        path = frame.f_code.co_filename
        inside = path.startswith("<") or _is_engine(path)
        if not inside:
            here = f"{short(path)}:{frame.f_lineno}"
            nearest = nearest or here
            if "site-packages" not in path and "dist-packages" not in path and not path.startswith(_STDLIB):
                return here
        frame = frame.f_back
    return nearest or "?"


_STDLIB = os.path.dirname(os.__file__) + os.sep
_ENGINES = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, __file__))


def _is_engine(path: str) -> bool:
    return path.startswith(_ENGINES)
