"""Counts failed samples when their batch is delivered, limits their number, warns once, and writes them to a file."""

from __future__ import annotations

import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ...core.errors import SampleError
from ...core.metrics import LoaderMetrics
from ...core.types import Batch, Index
from ...core.warn import warn_user
from .policy import Failure, Partial, called

DEFAULT_SHARE = 0.01  # of the samples may fail,
DEFAULT_MIN = 10  # and at least this many of any dataset
MAX_NAMED = 5  # samples in a message
MAX_PATH = 2000  # characters kept of a file's name
OPEN_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def bound(max_errors: int | float | None, samples: int | None) -> int:
    """Returns how many samples may fail."""
    if isinstance(max_errors, int):
        return max_errors
    share = DEFAULT_SHARE if max_errors is None else max_errors
    most = int(share * (samples or 0))
    return max(DEFAULT_MIN, most) if max_errors is None else most


def quarantine(path: Path, failures: Iterable[Failure], dataset: str) -> None:
    """Appends a line of JSON for each failure. Raises OSError if the file cannot be written to. Each line is one
    write(2) to a file opened with ``O_APPEND``, so lines of several ranks do not mix. Only the owner can read the file
    (0600), and links, pipes, devices and other users' files are not written to."""
    fd = os.open(path, OPEN_FLAGS, 0o600)
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a regular file owned by this user")
        if st.st_mode & 0o077:
            os.fchmod(fd, 0o600)
        for f in failures:
            when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            entry = {**f._asdict(), "file": f.file[:MAX_PATH], "dataset": dataset, "time": when}
            line = json.dumps(entry).encode() + b"\n"
            if os.write(fd, line) != len(line):
                raise OSError(f"no space left for {path}")
    finally:
        os.close(fd)


class ErrorLog:
    """The failed samples of one loader, over all its epochs. A sample counts once, however often it fails, and when its
    batch is delivered, in the sampler's order. So the batch at which the limit is exceeded does not depend on the
    number of workers. ``path``: of the quarantine file; None to write none."""

    def __init__(self, samples: int | None, max_errors: int | float | None, path: str | None, dataset: str) -> None:
        self.samples = samples
        self.limit = bound(max_errors, samples)
        self.dataset = dataset
        # Relative to the directory in which the script made the loader, even if it changes directory later.
        self._path = None if path is None else Path(os.path.abspath(path))
        self.failed: dict[Index, Failure] = {}  # by index, in order of arrival
        self.metrics = LoaderMetrics()  # where the counts are shown

    def open(self, partial: Partial) -> Batch:
        """Counts the failures and returns the batch inside. Raises SampleError if more samples failed than allowed."""
        self.add(partial.failures)
        return partial.data

    def add(self, failures: Iterable[Failure]) -> None:
        """Counts failures. Raises SampleError if more samples failed than allowed."""
        new = list({f.index: f for f in failures if f.index not in self.failed}.values())
        self.failed.update((f.index, f) for f in new)
        if new:
            self._report(new)
            self._write(new)
        if len(self.failed) > self.limit:
            raise SampleError(self._too_many(), tuple(self.failed.values()))

    def _report(self, new: list[Failure]) -> None:
        faults = self.metrics.faults
        faults["samples"] = len(self.failed)
        faults["first"] = [f._asdict() for f in list(self.failed.values())[:MAX_NAMED]]
        if self._path is not None:
            faults["quarantine"] = str(self._path)
        if len(self.failed) == len(new):
            f = new[0]
            listed = f"; all are listed in {self._path}" if self._path is not None else ""
            warn_user(
                f"{called(f.index, f.file)} could not be loaded and is skipped ({f.error}). Up to {self.limit:,} "
                f"samples may fail{listed}."
            )

    def _write(self, new: list[Failure]) -> None:
        if self._path is None:
            return
        try:
            quarantine(self._path, new, self.dataset)
        except OSError as e:
            self._path = None
            self.metrics.faults.pop("quarantine", None)
            warn_user(f"failed samples are not recorded in the quarantine file: {e}")

    def _too_many(self) -> str:
        kinds = Counter(f.error.partition(":")[0] for f in self.failed.values())
        counts = ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common(MAX_NAMED))
        first = "; ".join(f"{called(f.index, f.file)}: {f.error}" for f in list(self.failed.values())[:MAX_NAMED])
        of = "" if self.samples is None else f" of {self.samples:,}"
        return (
            f"{len(self.failed):,} samples{of} could not be loaded, and max_errors allows {self.limit:,} ({counts}). "
            f"The first: {first}. stoker verify lists all broken samples"
        )
