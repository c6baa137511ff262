"""The parent's account of what failed: counted when a batch is delivered, bounded, and written down."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...core.errors import SampleError, StokerWarning
from ...core.metrics import LoaderMetrics
from . import quarantine
from .policy import Failure, Partial
from .sample_name import called

SHARE = 0.01  # of the samples may fail, where nothing else is said
LEAST = 10  # and so many of any dataset
FEW = 5  # that are named


def bound(max_errors: int | float | None, samples: int | None) -> int:
    """How many samples may fail.

    Example:
        >>> bound(None, 50_000), bound(None, 100), bound(0.5, 8), bound(3, None)
        (500, 10, 4, 3)
    """
    if isinstance(max_errors, int):
        return max_errors
    share = SHARE if max_errors is None else max_errors
    most = int(share * (samples or 0))
    return max(LEAST, most) if max_errors is None else most


class ErrorLog:
    """What failed of one loader, from its first epoch to its last. A sample counts once, however often it fails.

    Counting happens where batches leave in the sampler's order, so the batch at which the bound is passed does not
    depend on how many workers there are.

    Args:
        samples: how many the dataset has, if it says.
        max_errors: see ``bound``.
        path: of the quarantine; None: none.
        dataset: what the dataset is called.

    Attributes:
        failed: by index, in the order in which they came.
        metrics: where the counts are shown.
    """

    def __init__(self, samples: int | None, max_errors: int | float | None, path: str | None, dataset: str) -> None:
        self.samples, self.most, self.dataset = samples, bound(max_errors, samples), dataset
        # Where the script was when it made the loader, wherever it goes.
        self._path = None if path is None else Path(os.path.abspath(path))
        self.failed: dict[Any, Failure] = {}
        self.metrics = LoaderMetrics()

    def open(self, partial: Partial) -> Any:
        """The batch inside, once what is missing in it is accounted for.

        Raises:
            SampleError: that was one too many.
        """
        self.add(partial.failures)
        return partial.data

    def add(self, failures: Iterable[Failure]) -> None:
        """Counts failures.

        Raises:
            SampleError: that was one too many.
        """
        new = [f for f in failures if f.index not in self.failed]
        new = list({f.index: f for f in new}.values())
        self.failed.update((f.index, f) for f in new)
        if new:
            self._tell(new)
            self._write(new)
        if len(self.failed) > self.most:
            raise SampleError(self._too_many(), tuple(self.failed.values()))

    def _tell(self, new: list[Failure]) -> None:
        faults = self.metrics.faults
        faults["samples"] = len(self.failed)
        faults["first"] = [f._asdict() for f in list(self.failed.values())[:FEW]]
        if self._path is not None:
            faults["quarantine"] = str(self._path)
        if len(self.failed) == len(new):
            f = new[0]
            listed = f"; all are listed in {self._path}" if self._path is not None else ""
            warnings.warn(
                f"{called(f.index, f.file)} could not be loaded, and the loop goes on without it ({f.error}). Up to "
                f"{self.most:,} samples may fail{listed}.",
                StokerWarning,
                stacklevel=6,
            )

    def _write(self, new: list[Failure]) -> None:
        if self._path is None:
            return
        try:
            quarantine.append(self._path, new, self.dataset)
        except OSError as e:
            self._path = None
            self.metrics.faults.pop("quarantine", None)
            warnings.warn(f"samples that fail are not listed: {e}", StokerWarning, stacklevel=7)

    def _too_many(self) -> str:
        kinds = Counter(f.error.partition(":")[0] for f in self.failed.values())
        counts = ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common(FEW))
        first = "; ".join(f"{called(f.index, f.file)}: {f.error}" for f in list(self.failed.values())[:FEW])
        of = "" if self.samples is None else f" of {self.samples:,}"
        return (
            f"{len(self.failed):,} samples{of} could not be loaded, and max_errors allows {self.most:,} ({counts}). "
            f"The first: {first}. stoker verify lists all that are broken"
        )
