"""The datasets inside a dataset, and which of them has a sample. It runs no code of theirs but properties."""

from __future__ import annotations

import bisect
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from .types import Index

NESTED = 16  # datasets inside each other, at most
MOST = 2_000  # datasets in all
FILES = ("samples", "imgs", "images", "files", "paths", "filenames")  # attributes that list files


def without_subsets(dataset: object) -> Any:
    """The dataset that torch's ``Subset`` is of, through all of them; the dataset itself where it is none."""
    kind = getattr(sys.modules.get("torch.utils.data"), "Subset", None)  # to import torch takes a second
    while kind is not None and type(dataset) is kind:
        dataset = dataset.dataset  # type: ignore[attr-defined]
    return dataset


def inner_datasets(dataset: Any) -> Iterator[Any]:
    """The dataset, and those inside it: of a ``Subset``, a ``ConcatDataset``, a ``Staged`` or a wrapper of the user's.

    Example:
        >>> from torch.utils.data import Subset
        >>> [type(d).__name__ for d in inner_datasets(Subset([1, 2], [0]))]
        ['Subset', 'list']
    """
    waiting, seen = [dataset], set[int]()
    while waiting and len(seen) < MOST:
        d = waiting.pop(0)
        if d is None or id(d) in seen:
            continue
        seen.add(id(d))
        yield d
        with contextlib.suppress(Exception):  # of a property, or of a __getattr__ that raises KeyError
            waiting.append(getattr(d, "dataset", None))
            several = getattr(d, "datasets", None)
            if isinstance(several, (list, tuple, dict)):
                waiting += several.values() if isinstance(several, dict) else several


def unwrap(dataset: Any, index: Index) -> tuple[Any, Index] | None:
    """The dataset inside a dataset that has its sample, and the index of the sample there; None where that is unknown.
    It knows subsets, concatenations, and wrappers with as many samples as they wrap."""
    ends = getattr(dataset, "cumulative_sizes", None)
    if ends is not None:
        index = index + len(dataset) if index < 0 else index
        k = bisect.bisect_right(ends, index)
        return dataset.datasets[k], index - (ends[k - 1] if k else 0)
    inner = getattr(dataset, "dataset", None)
    if inner is None:
        return None
    if hasattr(dataset, "indices"):
        return inner, int(dataset.indices[index])
    return (inner, index) if len(inner) == len(dataset) else None


def listed_file(dataset: Any, index: Index) -> str:
    """The file of a sample, from a list that the dataset itself has; "" where it has none."""
    for name in FILES:
        files = getattr(dataset, name, None)
        if isinstance(files, (list, tuple)) and isinstance(index, int) and -len(files) <= index < len(files):
            entry = files[index]
            first = entry[0] if isinstance(entry, (list, tuple)) and entry else entry
            if isinstance(first, str) or hasattr(first, "__fspath__"):
                return str(first)
    return ""


def file_of(dataset: Any, index: Index) -> str:
    """The file of a sample, from the dataset or from one inside it; "" where that is unknown.

    Example:
        >>> from torch.utils.data import Subset
        >>> class Photos(list):
        ...     files = ["a.jpg", "b.jpg"]
        >>> file_of(Subset(Photos([1, 2]), [1]), 0)
        'b.jpg'
    """
    with contextlib.suppress(Exception):  # a dataset's attributes may be properties that do anything
        for _ in range(NESTED):
            if isinstance(dataset, (list, tuple)) and isinstance(index, int) and type(dataset[index]) is str:
                return str(dataset[index])  # a staged list of paths
            found = listed_file(dataset, index)
            inner = None if found else unwrap(dataset, index)
            if inner is None:
                return found
            dataset, index = inner
    return ""
