"""Names a sample for people: by its index, and its file if the dataset has a list of them."""

from __future__ import annotations

import bisect
from typing import Any

from ...core.types import Index

FILES = ("samples", "imgs", "images", "files", "paths", "filenames")
MAX_INDEX = 200  # characters of an index that is an object
MAX_DEPTH = 16  # datasets inside each other, at most


def listed(dataset: object, index: Index) -> str:
    """The file of a sample, from a list that is an attribute of the dataset; "" if there is none."""
    for name in FILES:
        files = getattr(dataset, name, None)
        if isinstance(files, (list, tuple)) and isinstance(index, int) and -len(files) <= index < len(files):
            entry = files[index]
            first = entry[0] if isinstance(entry, (list, tuple)) and entry else entry
            if isinstance(first, str) or hasattr(first, "__fspath__"):
                return str(first)
    return ""


def file_of(dataset: Any, index: Index) -> str:
    """The file of a sample; through subsets, concatenations and wrappers with as many samples. "" if none is known.

    Example:
        >>> from torch.utils.data import Subset
        >>> class Photos(list):
        ...     files = ["a.jpg", "b.jpg"]
        >>> file_of(Subset(Photos([1, 2]), [1]), 0)
        'b.jpg'
    """
    try:
        for _ in range(MAX_DEPTH):
            if isinstance(dataset, (list, tuple)) and isinstance(index, int) and type(dataset[index]) is str:
                return str(dataset[index])  # a staged list of paths
            found = listed(dataset, index)
            if found:
                return found
            ends, inner = getattr(dataset, "cumulative_sizes", None), getattr(dataset, "dataset", None)
            if ends is not None:
                index = index + len(dataset) if index < 0 else index
                k = bisect.bisect_right(ends, index)
                dataset, index = dataset.datasets[k], index - (ends[k - 1] if k else 0)
            elif inner is not None and hasattr(dataset, "indices"):
                dataset, index = inner, int(dataset.indices[index])
            elif inner is not None and len(inner) == len(dataset):
                dataset = inner
            else:
                break
    except Exception:  # a dataset's attributes may be properties that do anything
        pass
    return ""


def called(index: Index, file: str) -> str:
    """The name of a sample in messages.

    Example:
        >>> called(17, "a.jpg"), called("k", "")
        ('sample 17 (a.jpg)', "sample 'k'")
    """
    text = repr(index)
    text = text if len(text) <= MAX_INDEX else text[:MAX_INDEX] + "..."
    return f"sample {text}" + (f" ({file})" if file else "")
