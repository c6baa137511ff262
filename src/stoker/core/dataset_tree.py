"""Finds the datasets nested inside a dataset, and which one holds a sample. Runs no user code except properties."""

from __future__ import annotations

import bisect
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

from .types import Index, MapDataset

NESTED = 16  # datasets nested in each other, at most
MOST = 2_000  # datasets in total
FILES = ("samples", "imgs", "images", "files", "paths", "filenames")  # attributes that list files


def without_subsets(dataset: object) -> Any:
    """Unwraps nested ``torch.utils.data.Subset``s; returns any other dataset unchanged."""
    kind = getattr(sys.modules.get("torch.utils.data"), "Subset", None)  # importing torch takes a second
    while kind is not None and type(dataset) is kind:
        dataset = dataset.dataset  # type: ignore[attr-defined]
    return dataset


def inner_datasets(dataset: object) -> Iterator[object]:
    """Yields the dataset and those nested in it: in a ``Subset``, ``ConcatDataset``, ``Staged`` or user-defined
    wrapper."""
    waiting, seen = [dataset], set[int]()
    while waiting and len(seen) < MOST:
        d = waiting.pop(0)
        if d is None or id(d) in seen:
            continue
        seen.add(id(d))
        yield d
        with contextlib.suppress(Exception):  # from a property, or from a __getattr__ that raises KeyError
            waiting.append(getattr(d, "dataset", None))
            several = getattr(d, "datasets", None)
            if isinstance(several, (list, tuple, dict)):
                waiting += several.values() if isinstance(several, dict) else several


def unwrap(dataset: MapDataset, index: Index) -> tuple[MapDataset, Index] | None:
    """Returns the inner dataset that holds a sample, and the sample's index there; None if unknown. Handles subsets,
    concatenations, and wrappers of the same length as the dataset they wrap."""
    ends = getattr(dataset, "cumulative_sizes", None)
    if ends is not None:
        index = index + len(dataset) if index < 0 else index
        k = bisect.bisect_right(ends, index)
        several: Sequence[MapDataset] = getattr(dataset, "datasets", ())
        return several[k], index - (ends[k - 1] if k else 0)
    inner = getattr(dataset, "dataset", None)
    if inner is None:
        return None
    if hasattr(dataset, "indices"):
        return inner, int(dataset.indices[index])
    return (inner, index) if len(inner) == len(dataset) else None


def listed_file(dataset: object, index: Index) -> str:
    """Returns a sample's file from a list that the dataset itself holds; "" if there is none."""
    for name in FILES:
        files = getattr(dataset, name, None)
        if isinstance(files, (list, tuple)) and isinstance(index, int) and -len(files) <= index < len(files):
            entry = files[index]
            first = entry[0] if isinstance(entry, (list, tuple)) and entry else entry
            if isinstance(first, str) or hasattr(first, "__fspath__"):
                return str(first)
    return ""


def file_of(dataset: object, index: Index) -> str:
    """Returns a sample's file, from the dataset or from one nested in it; "" if unknown."""
    with contextlib.suppress(Exception):  # a dataset's attributes may be properties that do anything
        for _ in range(NESTED):
            if isinstance(dataset, (list, tuple)) and isinstance(index, int) and type(dataset[index]) is str:
                return str(dataset[index])  # a staged list of paths
            found = listed_file(dataset, index)
            inner = None if found else unwrap(cast("MapDataset", dataset), index)
            if inner is None:
                return found
            dataset, index = inner
    return ""
