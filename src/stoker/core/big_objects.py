"""Finds containers of many small Python objects in a dataset, which every forked worker copies page by page."""

from __future__ import annotations

import itertools
import sys
import types
from collections import deque
from collections.abc import Collection
from typing import NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from .object_tree import CONTAINERS, DEPTH, PLAIN, WIDTH, Table, attributes, children, package_of

NODES = 20_000  # objects visited at most
SAMPLES = (64, 16, 8, 4)  # items of a container from which its size is estimated, by depth
Container: TypeAlias = Collection[object] | NDArray[np.object_]  # one of ``CONTAINERS``, or an array of objects


class Big(NamedTuple):
    """A container of many small objects."""

    path: str  # where it is, as in ``dataset.samples``
    words: str  # ``a list of 2,000,000 dicts``
    nbytes: int  # estimated memory of its objects
    remedy: str  # code that packs it into one buffer: ``stoker.share(dataset.samples)``


def big(dataset: object, at_least: int) -> list[Big]:
    """Finds containers and tables in a dataset that hold many small Python objects and take ``at_least`` bytes each.
    Reading such an object writes its reference count, so a forked worker copies its page; a numeric array has a single
    count. Sizes are estimated from a few items."""
    return _big(dataset, at_least, "dataset", DEPTH, {})


def _big(obj: object, at_least: int, path: str, depth: int, seen: dict[int, object]) -> list[Big]:
    if type(obj) in PLAIN or id(obj) in seen or not depth or len(seen) > NODES:
        return []
    seen[id(obj)] = obj  # kept alive: otherwise another object could reuse its id
    whole: list[Big] = []
    if isinstance(obj, CONTAINERS) or _is_object_array(obj):
        nbytes = _weight(obj)
        if nbytes < at_least or not len(obj):
            return []
        whole = [Big(path, _description(obj), nbytes, f"stoker.share({_as_list(obj, path)})")]
        if len(obj) > WIDTH or not isinstance(obj, (list, tuple, dict)):
            return whole
    elif package_of(type(obj)) == "pandas":
        return _of_table(obj, at_least, path)
    inside = [b for step, x in children(obj) for b in _big(x, at_least, path + step, depth - 1, seen)]
    return inside or whole


def _is_object_array(x: object) -> TypeGuard[NDArray[np.object_]]:
    return isinstance(x, np.ndarray) and x.dtype.hasobject and x.ndim > 0


def _as_list(obj: object, path: str) -> str:
    """Code that turns a container into a list, which ``share`` requires."""
    if isinstance(obj, np.ndarray):
        return f"{path}.tolist()"
    if isinstance(obj, (set, frozenset)):
        return f"sorted({path})"
    if isinstance(obj, dict):
        return f"list({path}.items())"
    return f"list({path})" if isinstance(obj, deque) else path


def _of_table(frame: Table, at_least: int, path: str) -> list[Big]:
    try:
        columns = [frame] if frame.ndim == 1 else [frame.iloc[:, i] for i in range(min(WIDTH, frame.shape[1]))]
        arrays = [c.to_numpy() for c in columns if c.dtype == object]
        nbytes = sum(_weight(a) for a in arrays if _is_object_array(a))
        n, kind = len(frame), type(frame).__name__
    except Exception:  # an index, a group, another version
        return []
    remedy = f"stoker.share({path}.tolist())" if kind == "Series" else f"stoker.share({path}.to_dict('records'))"
    return [Big(path, f"a {kind} of {n:,} rows with objects in it", nbytes, remedy)] if nbytes >= at_least else []


def _some_items(obj: Container, most: int) -> list[object]:
    """A few items of a container; ``(key, value)`` pairs for a dict."""
    if isinstance(obj, np.ndarray):
        obj = obj.reshape(-1) if obj.flags.c_contiguous else obj[..., 0] if obj.ndim > 1 else obj
    if isinstance(obj, (list, tuple, np.ndarray)):
        return list(obj[:: max(1, len(obj) // most)][:most])
    return list(itertools.islice(obj.items() if isinstance(obj, dict) else obj, most))


def _description(obj: Container) -> str:
    kinds = {
        type(x[1] if isinstance(obj, dict) and isinstance(x, tuple) else x).__name__
        for x in _some_items(obj, SAMPLES[0])
    }
    of = f"{kinds.pop()}s" if len(kinds) == 1 else "objects"
    if isinstance(obj, np.ndarray):
        return f"an array of {obj.size:,} {of}"
    return f"{'an' if type(obj).__name__[0] in 'AEIOaeio' else 'a'} {type(obj).__name__} of {len(obj):,} {of}"


def _weight(obj: object, deep: int = 0) -> int:
    """Estimated bytes of an object and of everything inside it that nothing else references."""
    if isinstance(obj, torch.Tensor) or (isinstance(obj, np.ndarray) and not _is_object_array(obj)):
        return 200  # the object alone; its numbers are not copied
    size = sys.getsizeof(obj, 64)
    if deep == len(SAMPLES):
        return size
    if isinstance(obj, CONTAINERS) or _is_object_array(obj):
        return _container_weight(obj, size, deep)
    if type(obj).__module__ != "builtins" and not isinstance(obj, (type, types.ModuleType)):
        own = attributes(obj)
        size += sum(_weight(v, deep + 1) for v in own.values()) + (100 if own else 0)
    return size


def _container_weight(obj: Container, size: int, deep: int) -> int:
    some = _some_items(obj, SAMPLES[deep])
    if not some:
        return size
    parts = [[*x] if isinstance(obj, dict) and isinstance(x, tuple) else [x] for x in some]
    distinct = {id(x): x for part in parts for x in part}
    weight = sum(_weight(x, deep + 1) for x in distinct.values())
    if len(some) > 8 and len({id(part[-1]) for part in parts}) * 2 < len(some) and not isinstance(obj, dict):
        return weight  # the same few objects repeated: labels, None
    return size + int(weight / len(some) * (obj.size if isinstance(obj, np.ndarray) else len(obj)))
