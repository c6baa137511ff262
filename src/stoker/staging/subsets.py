"""Looks through what stands around a dataset, so that it has one cache: torch's ``Subset``, and streams that read it.

The folds of a cross-validation, and the two parts of ``random_split``, load no sample twice.
"""

from __future__ import annotations

import ast
import copy
import types
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, Subset

from ..core.types import Index, MapDataset
from .samples import positions
from .source import known_tree


def with_whole(dataset: object, other: MapDataset) -> MapDataset:
    """Returns the same subset of another dataset. Workers are told that they have the original subset."""
    if type(dataset) is not Subset:
        return other
    out = copy.copy(dataset)
    vars(out).update(dataset=with_whole(dataset.dataset, other), stands_for=dataset)
    return cast(MapDataset, out)


def indices(dataset: object) -> NDArray[np.int64] | None:
    """Returns indices in the whole dataset; None if it is not a subset, or its indices are not numbers."""
    out: NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        own = np.asarray(dataset.indices)
        out = own if out is None else own[out]
        dataset = dataset.dataset
    return out if out is not None and out.dtype.kind in "iu" else None


def for_trial(dataset: MapDataset) -> list[Index]:
    """Returns indices in the whole dataset for some samples of a subset; none if it is not a subset."""
    out: list[Index] = list(positions(len(dataset))) if type(dataset) is Subset else []
    inner: object = dataset
    while type(inner) is Subset:
        out, inner = [inner.indices[index] for index in out], inner.dataset
    return out


def dataset_inside(stream: object) -> str:
    """Name of a stream's attribute that can be replaced by the same dataset with a cache; "" if there is none. The
    stream's methods must use it only for samples and its length, so that nothing in a worker changes it: detectron2's
    ``ToIterableDataset`` yields ``self.dataset[i]``."""
    found = [name for name, value in vars(stream).items() if _is_map_style(value)]
    if not isinstance(stream, IterableDataset) or len(found) != 1:
        return ""
    classes = type(stream).__mro__[: type(stream).__mro__.index(IterableDataset)]
    functions = [f for c in classes for n, f in vars(c).items() if callable(f) and n != "__init__"]
    return found[0] if all(_only_asks_for_samples(f, found[0]) for f in functions) else ""


def _is_map_style(value: object) -> bool:
    is_dataset = isinstance(value, Dataset) and not isinstance(value, IterableDataset)
    return is_dataset and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _only_asks_for_samples(function: object, name: str) -> bool:
    """Whether a method uses an attribute only as ``self.name[i]`` and ``len(self.name)``."""
    tree = known_tree(function.__code__) if isinstance(function, types.FunctionType) else None
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    asked = [x.value for x in nodes if isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Load)]
    asked += [x.args[0] for x in nodes if isinstance(x, ast.Call) and ast.unparse(x.func) == "len" and x.args]
    uses = [x for x in nodes if isinstance(x, ast.Attribute) and x.attr == name]
    by_name = {x.id for x in nodes if isinstance(x, ast.Name)} & {"vars", "getattr", "setattr"}
    return not by_name and all(any(x is y for y in asked) for x in uses)
