"""``Build``: fills a dataset's cache on disk before anybody trains. Its workers prepare and never augment.

The one file of staging that knows the loader, and only when it runs: ``stoker cache build`` is its client.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, Subset

from ..core import resources
from ..core.errors import StokerError, StokerWarning
from ..core.options import parse_bytes
from .dataset import Staged
from .store.folder import PART, discard
from .store.manage import nbytes_of
from .store.store import FIRST_SAMPLES
from .store.tiers import TieredStore

BATCH = 16  # samples in a worker's task
LOST_S = 0.05  # of preparing that an interrupt may cost a worker: so long samples are let in together, which is cheaper
WAITING = 4 * FIRST_SAMPLES  # samples that may lie in workers that ended before it was decided how samples lie
TELL_S = 0.1  # between two words of progress
WORDS = 300  # characters of an error
UNTRIED = "they go a way through the dataset's code that no sample went which was tried, so they are made each time"
Tell = Callable[["Build"], None]


class Failed(NamedTuple):
    """What went wrong with a sample.

    Attributes:
        sample: its index; None for what concerns all of them.
        error: in words.
    """

    sample: int | None
    error: str


class Build:
    """The filling of one cache.

    Args:
        dataset: a ``Staged``, a ``Subset`` of one, of which only those samples are let in, or any map-style dataset.
        cache_dir: where caches lie; None: where the ``Staged`` says, else where ``Staged`` has them.
        budget: bytes, "100GB"; None: what the ``Staged`` says, else half of what is free.

    Attributes:
        staged: the dataset with its cache on disk.
        notes: what there was to say when it was opened.
        samples: how many are wanted.
        done: of these, in or tried by now.
        failed: those that raised.
        seconds: of filling.

    Raises:
        UsageError: no map-style dataset, or no border in it.
        StokerError: there can be no cache.
    """

    def __init__(self, dataset: Any, cache_dir: Path | None = None, budget: str | None = None) -> None:
        inner, indices = _staged_in(dataset)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.staged = _on_disk(inner, cache_dir, budget)
            if budget is not None and _begun_with_another(self.staged, budget):
                discard(_store_of(self.staged).medium.path)
                self.staged = _on_disk(inner, cache_dir, budget)
        own = [str(w.message) for w in said if issubclass(w.category, StokerWarning)]
        for w in said:
            if not issubclass(w.category, StokerWarning):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        if self.staged._store is None:
            raise StokerError(own[-1].rstrip(".") if own else "there is no cache")
        self.notes = own
        self._store = _store_of(self.staged)
        if budget is not None and self._store.account.budget != parse_bytes(budget, 0) and not self._store.complete:
            self.notes.append(
                f"it was begun with a budget of {self._store.account.budget:,} bytes and keeps that: stoker cache "
                f"prune {self.path.name} makes room for another"
            )
        self._indices = np.arange(self.staged.samples) if indices is None else np.unique(indices % self.staged.samples)
        self.samples = len(self._indices)
        self.before = self.filled
        self.done = self.before
        self.failed: list[Failed] = []
        self.seconds = 0.0
        self.workers = 0
        self._began = time.monotonic()
        self._refused = ""

    def run(self, workers: int | str = "auto", tell: Tell | None = None) -> None:
        """Fills it. What is in stays in, whatever ends this.

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
                left = self._missing()
                if len(left) <= WAITING and not self.reason:
                    self._fill(left, 0, None)
        finally:
            self.seconds = time.monotonic() - self._began
        if self._store.complete:
            self._store.medium.seal()  # a worker has given it its name

    @property
    def path(self) -> Path:
        """The cache's folder, as it is called now."""
        path: Path = self._store.medium.path
        return path if path.suffix != PART or path.is_dir() else path.with_suffix("")

    @property
    def filled(self) -> int:
        """Samples that are in, of those wanted."""
        return int(np.count_nonzero(self._store.locations[self._indices]))

    @property
    def rate(self) -> float:
        """Samples per second so far."""
        took = self.seconds or time.monotonic() - self._began
        return (self.done - self.before) / took if took > 0 else 0.0

    @property
    def reason(self) -> str:
        """Why nothing more is let in; "" while it is."""
        return self._refused or self._store.reason

    @property
    def problem(self) -> str:
        """Why not all samples are in that did not fail; ""."""
        left = self.samples - self.filled - len(self.failed)
        if left <= 0 and self._store.usable:
            return ""
        return self.reason or f"{left:,} samples cannot be kept: {UNTRIED}"

    def as_dict(self) -> dict[str, Any]:
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

    def _missing(self) -> np.ndarray[Any, Any]:
        """Indices that are not in and did not fail."""
        left = self._indices[self._store.locations[self._indices] == 0]
        return np.setdiff1d(left, [f.sample for f in self.failed]) if self.failed else left

    def _fill(self, indices: np.ndarray[Any, Any], workers: int | str, tell: Tell | None) -> None:
        if not len(indices):
            return
        if tell is not None:
            tell(self)
        loader = _loader(_Items(self.staged, indices), workers)
        told = 0.0
        it = iter(loader)
        self.workers = max(self.workers, int(loader.num_workers))
        try:
            for n, failed in it:
                self.done = min(self.samples, self.done + n)  # some are tried twice
                self.failed += [f for f in failed if f.sample is not None]
                self._refused = next((f.error for f in failed if f.sample is None), self._refused)
                if self.reason:
                    break
                if tell is not None and time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    tell(self)
        finally:
            if loader.num_workers:
                it._shutdown_workers()
        self.failed.sort(key=lambda f: f.sample or 0)


class _Items(Dataset[Any]):
    """Prepares samples and lets them in; an item is what went wrong, None where nothing did."""

    def __init__(self, staged: Staged, indices: np.ndarray[Any, Any]) -> None:
        self._staged, self._indices = staged, indices
        self._together = 1  # samples that are let in together

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, k: int) -> Failed | None:
        return self.__getitems__([k])[0]

    def __getitems__(self, ks: Sequence[int]) -> list[Failed | None]:
        indices = self._indices[np.asarray(ks)].tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StokerWarning)  # the store has the reason, and the parent tells it
            staged = self._staged
            store = staged.current()
            refused = self._refused() if store is None else store.account.reason
            if store is None or refused:
                return [Failed(None, refused)] * len(indices)
            out: list[Failed | None] = []
            while len(out) < len(indices):
                some = indices[len(out) : len(out) + self._together]
                began = time.perf_counter()
                out += self._several(store, some)
                slow = time.perf_counter() - began > LOST_S
                self._together = max(1, self._together // 2) if slow else min(BATCH, self._together * 2)
            return out

    def _several(self, store: TieredStore, indices: list[int]) -> list[Failed | None]:
        try:
            self._let_in(store, indices)
        except Exception:  # of one of them: which, and the others go on
            return [self._alone(store, i) for i in indices]
        return [None] * len(indices)

    def _alone(self, store: TieredStore, i: int) -> Failed | None:
        try:
            self._let_in(store, [i])
        except Exception as e:
            words = f"{type(e).__name__}: {e}".strip().splitlines()[0]
            return Failed(i, words if len(words) <= WORDS else words[:WORDS] + "...")
        return None

    def _let_in(self, store: TieredStore, indices: list[int]) -> None:
        where = self._staged.where(store, indices)
        assert where is not None
        self._staged.fill(store, indices, where)

    def _refused(self) -> str:
        staged = self._staged
        assert staged._store is not None
        if not staged._store.usable:
            return staged.account.reason
        return f"the dataset changes while it is read: {'; '.join(staged._changes()[:3])}"


def _joined(items: Sequence[Failed | None]) -> tuple[int, list[Failed]]:
    """How many, and what went wrong."""
    return len(items), [x for x in items if x is not None]


def _loader(items: _Items, workers: int | str) -> Any:
    from ..core.options import Measured
    from ..loader.dataloader import DataLoader
    from ..loader.loader_state import state_of

    many: int | str = workers and "auto"  # workers that take turns
    loader: Any = DataLoader(
        items, BATCH, num_workers=many, collate_fn=_joined, in_order=False, on_worker_death="raise"
    )
    if many == "auto" and workers != "auto":
        loader.resize(int(workers))
    elif many == "auto":  # not measured first: that would prepare samples for nothing, and it adapts as it goes
        state_of(loader).measured = Measured(min(resources.cores_granted(), -(-len(items) // BATCH)))
    return loader


def _staged_in(dataset: Any) -> tuple[Any, np.ndarray[Any, Any] | None]:
    """The ``Staged`` inside a ``Subset``, and which of its samples; or the dataset, and None for all."""
    inner, indices = dataset, None
    while type(inner) is Subset:
        mine = np.asarray(inner.indices)
        indices = mine if indices is None else mine[indices]
        inner = inner.dataset
    return (inner, indices) if isinstance(inner, Staged) else (dataset, None)


def _store_of(staged: Staged) -> Any:
    assert staged._store is not None
    return staged._store.stores[0]


def _begun_with_another(staged: Staged, budget: str) -> bool:
    """Whether the cache is empty and has another budget: a ``Staged`` that was there before has made its folder."""
    if staged._store is None:
        return False
    account = staged.account
    return account.filled == 0 and not account.reason and account.budget != parse_bytes(budget, 0)


def _on_disk(dataset: Any, cache_dir: Path | None, budget: str | None) -> Staged:
    """The dataset with a cache on disk: as it is where it has one, and else one more around what it is made of."""
    if not isinstance(dataset, Staged):
        return Staged(dataset, cache="disk", cache_dir=cache_dir, cache_budget=budget)
    if dataset.cache == "disk" and dataset._store is not None and cache_dir is None and budget is None:
        return dataset
    key, content = dataset._keyed
    return Staged(
        dataset.dataset,
        *dataset._said,
        cache="disk",
        cache_dir=cache_dir or dataset._disk,
        cache_budget=budget,
        cache_key=key,
        cache_content=content,
    )
