"""Runs a loader and writes down everything a script could see of it, in a form that can be compared."""

from __future__ import annotations

import hashlib
import pickle
import random
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Config = dict[str, Any]


def canon(x: Any) -> Any:
    """A value as nested tuples: types, dtypes, strides and bits."""
    if isinstance(x, torch.Tensor):
        flat = x.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        bits = digest(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else ""
        return ("tensor", type(x).__name__, str(x.dtype), tuple(x.shape), x.stride(), x.requires_grad, bits)
    if isinstance(x, np.ndarray):
        # Since Python 3.14 torch's arrays stay read-only where samples were; stoker's batches are always writable.
        writable = x.flags.writeable or pickle.DEFAULT_PROTOCOL >= 5
        return ("array", str(x.dtype), x.shape, x.strides, writable, digest(x.tobytes()))
    if isinstance(x, Mapping):
        return (type(x).__name__, tuple((k, canon(v)) for k, v in x.items()))
    if isinstance(x, (list, tuple)):
        return (type(x).__name__, tuple(canon(v) for v in x))
    if hasattr(x, "__dataclass_fields__"):
        return (type(x).__name__, tuple((k, canon(v)) for k, v in vars(x).items()))
    return (type(x).__name__, repr(x))


def told(e: BaseException) -> tuple[Any, ...]:
    """An exception as its type, and the first and the last line of its words; between them is the worker's traceback."""
    lines = [line for line in str(e).strip().splitlines() if line.strip()] or [""]
    return (type(e).__name__, lines[0], _steady(lines[-1]))


def _steady(text: str) -> str:
    if "UnboundLocalError" in text:
        return "torch's worker failed while it was starting"
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def digest(b: bytes) -> str:
    return hashlib.sha1(b).hexdigest()[:12]


def random_state(generator: torch.Generator | None) -> tuple[str, ...]:
    out = [digest(torch.get_rng_state().numpy().tobytes()), digest(repr(random.getstate()).encode())]
    name, words, *rest = np.random.get_state()
    out.append(digest(words.tobytes() + repr((name, rest)).encode()))  # words in words would take a third of the time
    out.append(digest(generator.get_state().numpy().tobytes()) if generator is not None else "")
    return tuple(out)


def run(cls: Callable[..., Any], build: Callable[[], tuple[tuple[Any, ...], Config]], plan: Config) -> list[Any]:
    """Two epochs of a loader: what came out, what was raised and warned, and the random state it left.

    Args:
        cls: torch's class or stoker's.
        build: makes the arguments afresh, for they hold state.
        plan: ``epochs``, ``leave_after`` (batches of the first epoch, or None), ``ask_len``, ``limit``.
    """
    torch.manual_seed(plan["seed"])
    random.seed(plan["seed"])
    np.random.seed(plan["seed"])
    trace: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args, kwargs = build()
        try:
            loader = cls(*args, **kwargs)
        except Exception as e:
            return [("constructor", *told(e))]
        for epoch in range(plan["epochs"]):
            if plan["ask_len"]:
                try:
                    trace.append(("len", len(loader)))
                except Exception as e:
                    trace.append(("len", *told(e)))
            trace += _epoch(loader, plan["leave_after"] if epoch == 0 else None, plan["limit"])
            trace.append(("random", *random_state(kwargs.get("generator"))))
        end(loader._iterator)
        del loader
    seen = [(w.category.__name__, re.sub(r"0x[0-9a-f]+", "0x", str(w.message))) for w in caught]
    return [*trace, ("warnings", tuple(w for w in seen if w[0] not in ("ResourceWarning", "DeprecationWarning")))]


def _epoch(loader: Any, leave_after: int | None, limit: int) -> list[Any]:
    out: list[Any] = []
    try:
        it = iter(loader)
    except Exception as e:
        return [("iter", *told(e))]
    for n in range(limit):
        if n == leave_after:
            break
        try:
            out.append(("batch", canon(next(it))))
        except StopIteration as e:
            # A StopIteration of the dataset's own ends a for loop as the epoch's end does; go on to see which it was.
            out.append(("stop", str(e).splitlines()[:1]))
            if not str(e):
                break
        except Exception as e:
            out.append(("raised", *told(e)))
    out.append(("yielded", it._num_yielded))
    if not loader.persistent_workers:
        end(it)
    return out


def end(it: Any) -> None:
    """Ends an iterator's workers now. Left to the garbage collector, torch's wait five seconds for each other."""
    if hasattr(it, "_shutdown_workers"):
        it._shutdown_workers()
