"""Looks through torch's ``Subset``, so that all subsets of a dataset share its cache. The folds of a cross-validation,
and the two parts of ``random_split``, load no sample twice."""

from __future__ import annotations

import copy
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from ..core.types import Index, MapDataset
from .samples import positions


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
    out: list[Index] = []
    for at in positions(len(dataset)) if type(dataset) is Subset else ():
        index: Index = at
        inner: object = dataset
        while type(inner) is Subset:
            index, inner = inner.indices[index], inner.dataset
        out.append(index)
    return out
