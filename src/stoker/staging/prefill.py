"""``Build``: fills a dataset's cache on disk before the training. Its workers prepare samples and never augment them.

``stoker cache build`` is its client.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from ..core import resources
from ..core.errors import StokerError, StokerWarning
from ..core.options import Measured, parse_bytes
from ..core.types import JsonObject
from ..loader.dataloader import DataLoader
from ..loader.loader_state import state_of
from .dataset import Staged
from .store.folder import PART, Folder, discard
from .store.manage import nbytes_of
from .store.store import FIRST_SAMPLES, Store

BATCH = 16  # samples in a worker's task
LOST_S = (
    0.05  # of preparing that an interrupt may cost a worker; samples are stored together up to that, which is cheaper
)
WAITING = 4 * FIRST_SAMPLES  # samples that may be lost with workers that ended before it was decided how to store them
PROGRESS_S = 0.1  # between two calls of ``tell``
ERROR_LENGTH = 300  # characters
UNTRIED = "they go a way through the dataset's code that no sample went which was tried, so they are made each time"
Tell = Callable[["Build"], None]


class Failed(NamedTuple):
    """What went wrong with a sample.

    Attributes:
        sample: its index; None for what concerns all of them.
        error: for people.
    """

    sample: int | None
    error: str


class Build:
    """The filling of one cache.

    Args:
        dataset: a ``Staged``, a ``Subset`` of one, of which only those samples are stored, or any map-style dataset.
        cache_dir: of caches; None: what the ``Staged`` says, else the default of ``Staged``.
        budget: bytes, "100GB"; None: what the ``Staged`` says, else half of what is free.

    Attributes:
        staged: the dataset with its cache on disk.
        notes: warnings from when it was opened.
        samples: that are wanted.
        before: of these, stored when it began.
        done: of these, stored or tried by now.
        failed: those that raised.
        seconds: of filling.
        workers: that filled it.

    Raises:
        UsageError: no map-style dataset, or one without a deterministic part.
        StokerError: there can be no cache.
    """

    def __init__(self, dataset: Any, cache_dir: Path | None = None, budget: str | None = None) -> None:
        inner, indices = _staged_in(dataset)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            staged = _on_disk(inner, cache_dir, budget)
            if budget is not None and _is_empty_with_another_budget(staged, budget):
                discard(_disk_of(staged)[1].path)
                staged = _on_disk(inner, cache_dir, budget)
        self.notes = [str(w.message) for w in caught if issubclass(w.category, StokerWarning)]
        for w in caught:
            if not issubclass(w.category, StokerWarning):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        if staged._store is None:
            raise StokerError(self.notes[-1].rstrip(".") if self.notes else "there is no cache")
        self.staged = staged
        self._store, self._folder = _disk_of(staged)
        stats = self._store.account
        if budget is not None and stats.budget != parse_bytes(budget, 0) and not self._store.complete:
            self.notes.append(
                f"it was begun with a budget of {stats.budget:,} bytes and keeps that: stoker cache "
                f"prune {self.path.name} makes room for another"
            )
        self._indices = np.arange(staged.samples) if indices is None else np.unique(indices % staged.samples)
        self.samples = len(self._indices)
        self.before = self.filled
        self.done = self.before
        self.failed: list[Failed] = []
        self.seconds = 0.0
        self.workers = 0
        self._began = time.monotonic()
        self._refused = ""

    def run(self, workers: int | str = "auto", tell: Tell | None = None) -> None:
        """Fills it. What is stored stays, whatever ends this.

        Args:
            workers: processes; 0 works in this one; "auto": as many as cores are granted.
            tell: called now and then.

        Raises:
            StokerError: a worker died.
        """
        self._began = time.monotonic()
        try:
            if self.filled < self.samples and not self.reason:
                self._fill(self._missing(), workers, tell)
                missing = self._missing()
                if len(missing) <= WAITING and not self.reason:
                    self._fill(missing, 0, None)
        finally:
            self.seconds = time.monotonic() - self._began
        if self._store.complete:
            self._store.medium.seal()  # a worker has renamed the folder

    @property
    def path(self) -> Path:
        """The cache's folder, under its present name."""
        path = self._folder.path
        return path if path.suffix != PART or path.is_dir() else path.with_suffix("")

    @property
    def filled(self) -> int:
        """Samples that are stored, of those wanted."""
        return int(np.count_nonzero(self._store.locations[self._indices]))

    @property
    def rate(self) -> float:
        """Samples per second so far."""
        took = self.seconds or time.monotonic() - self._began
        return (self.done - self.before) / took if took > 0 else 0.0

    @property
    def reason(self) -> str:
        """Why no more samples are stored; "" while they are."""
        return self._refused or self._store.reason

    @property
    def problem(self) -> str:
        """Why samples are not stored that did not fail; ""."""
        missing = self.samples - self.filled - len(self.failed)
        if missing <= 0 and self._store.usable:
            return ""
        return self.reason or f"{missing:,} samples cannot be kept: {UNTRIED}"

    def as_dict(self) -> JsonObject:
        """For JSON."""
        return {
            "name": self.path.name.removesuffix(PART),
            "path": str(self.path),
            "samples": self.samples,
            "filled": self.filled,
            "added": self.filled - self.before,
            "nbytes": nbytes_of(self.path),
            "seconds": self.seconds,
            "samples_per_s": self.rate,
            "workers": self.workers,
            "failed": [f._asdict() for f in self.failed],
            "problem": self.problem,
            "notes": self.notes,
        }

    def _missing(self) -> NDArray[np.int64]:
        """Indices that are not stored and did not fail."""
        missing = self._indices[self._store.locations[self._indices] == 0]
        return np.setdiff1d(missing, [f.sample for f in self.failed]) if self.failed else missing

    def _fill(self, indices: NDArray[np.int64], workers: int | str, tell: Tell | None) -> None:
        if not len(indices):
            return
        if tell is not None:
            tell(self)
        loader = _loader(_Fills(self.staged, indices), workers)
        last_told = 0.0
        it: Any = iter(loader)
        self.workers = max(self.workers, int(loader.num_workers))
        try:
            for n, failed in it:
                self.done = min(self.samples, self.done + n)  # some are tried twice
                self.failed += [f for f in failed if f.sample is not None]
                self._refused = next((f.error for f in failed if f.sample is None), self._refused)
                if self.reason:
                    break
                if tell is not None and time.monotonic() - last_told > PROGRESS_S:
                    last_told = time.monotonic()
                    tell(self)
        finally:
            if loader.num_workers:
                it._shutdown_workers()
        self.failed.sort(key=lambda f: f.sample or 0)


class _Fills(Dataset["Failed | None"]):
    """Prepares and stores a sample for each item, which is what went wrong; None where nothing did."""

    def __init__(self, staged: Staged, indices: NDArray[np.int64]) -> None:
        self._staged = staged
        self._indices = indices
        self._together = 1  # samples that are stored together

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, k: int) -> Failed | None:
        return self.__getitems__([k])[0]

    def __getitems__(self, ks: Sequence[int]) -> list[Failed | None]:
        indices = self._indices[np.asarray(ks)].tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StokerWarning)  # the store has the reason, and the parent reports it
            store = self._staged.current()
            refused = self._why_refused() if store is None else store.account.reason
            if store is None or refused:
                return [Failed(None, refused)] * len(indices)
            out: list[Failed | None] = []
            while len(out) < len(indices):
                some = indices[len(out) : len(out) + self._together]
                began = time.perf_counter()
                out += self._fill(store, some)
                slow = time.perf_counter() - began > LOST_S
                self._together = max(1, self._together // 2) if slow else min(BATCH, self._together * 2)
            return out

    def _fill(self, store: Store, indices: list[int]) -> list[Failed | None]:
        where = self._staged.where(store, indices)
        assert where is not None
        try:
            self._staged.fill(store, indices, where)
        except Exception as e:
            if len(indices) > 1:  # find out which one, and store the others
                return [failed for i in indices for failed in self._fill(store, [i])]
            text = f"{type(e).__name__}: {e}".strip().splitlines()[0]
            return [Failed(indices[0], text if len(text) <= ERROR_LENGTH else text[:ERROR_LENGTH] + "...")]
        return [None] * len(indices)

    def _why_refused(self) -> str:
        if not self._staged.usable:
            return self._staged.account.reason
        return f"the dataset changes while it is read: {'; '.join(self._staged._changes()[:3])}"


def _collate(items: Sequence[Failed | None]) -> tuple[int, list[Failed]]:
    """How many, and what went wrong."""
    return len(items), [x for x in items if x is not None]


def _loader(fills: _Fills, workers: int | str) -> DataLoader[Any]:
    many: int | str = workers and "auto"  # workers that take turns
    loader: DataLoader[Any] = DataLoader(
        fills, BATCH, num_workers=many, collate_fn=_collate, in_order=False, on_worker_death="raise"
    )
    if many == "auto" and workers != "auto":
        loader.resize(int(workers))
    elif many == "auto":  # not measured first: that would prepare samples in vain, and the number adapts
        state_of(loader).measured = Measured(min(resources.cores_granted(), -(-len(fills) // BATCH)))
    return loader


def _staged_in(dataset: Any) -> tuple[Any, NDArray[np.int64] | None]:
    """The ``Staged`` inside a ``Subset``, and which of its samples; or the dataset, and None for all."""
    inner, indices = dataset, None
    while type(inner) is Subset:
        mine = np.asarray(inner.indices)
        indices = mine if indices is None else mine[indices]
        inner = inner.dataset
    return (inner, indices) if isinstance(inner, Staged) else (dataset, None)


def _disk_of(staged: Staged) -> tuple[Store, Folder]:
    """The store on disk, and its folder."""
    assert staged._store is not None
    store = staged._store
    assert isinstance(store.medium, Folder)
    return store, store.medium


def _is_empty_with_another_budget(staged: Staged, budget: str) -> bool:
    """Whether its folder was made with another budget, by a ``Staged`` in the user's script."""
    stats = staged.account
    return (
        staged._store is not None and not stats.filled and not stats.reason and stats.budget != parse_bytes(budget, 0)
    )


def _on_disk(dataset: Any, cache_dir: Path | None, budget: str | None) -> Staged:
    """The dataset with a cache on disk: itself, or another ``Staged`` of what is inside it."""
    if not isinstance(dataset, Staged):
        return Staged(dataset, cache="disk", cache_dir=cache_dir, cache_budget=budget)
    if dataset.cache == "disk" and dataset._store is not None and cache_dir is None and budget is None:
        return dataset
    return dataset._on_disk(cache_dir, budget)
