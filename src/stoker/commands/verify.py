"""``verify``: reads a whole dataset in parallel and lists what is broken. ``stoker verify`` is its command."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset

from ..core.errors import StokerError, StokerWarning, UsageError
from ..core.random_state import preserved
from ..loader.auto.tasks import keys_of
from ..loader.dataloader import DataLoader
from ..loader.loader_state import state_of
from ..workers.faults import quarantine
from ..workers.faults.policy import Failure
from ..workers.fetcher import staged_in

BATCH = 8  # samples in a worker's task
TELL_S = 0.1  # between two words of progress
Tell = Callable[["Verified"], None]


@dataclass
class Verified:
    """What was found, and so far what is being found.

    Attributes:
        samples: to be read.
        read: read by now, those that failed included.
        failed: what could not be read, in the order of the indices.
        seconds: it took.
        workers: that read.
    """

    samples: int
    read: int = 0
    failed: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    workers: int = 0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.read / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": 1,
            "samples": self.samples,
            "read": self.read,
            "failed": [f._asdict() for f in self.failed],
            "seconds": self.seconds,
            "samples_per_s": self.rate,
            "workers": self.workers,
        }


def verify(
    loader: Any,
    workers: int | str = "auto",
    again: Path | None = None,
    tell: Tell | None = None,
    sample_timeout: float | None = None,
) -> Verified:
    """Reads each sample of a loader's dataset once. Neither collate function nor cache are asked.

    Args:
        loader: whose samples, those of a ``SubsetRandomSampler`` or all.
        workers: processes; 0 reads in this one, and then a sample that kills ends all.
        again: a quarantine's file: only samples that it lists are read.
        tell: called now and then.
        sample_timeout: seconds that a sample may take before it counts as broken.

    Raises:
        UsageError: a stream; a file that cannot be read; a ``sample_timeout`` without workers.
        StokerError: workers die and no sample is to blame.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"{type(loader.dataset).__name__} is a stream: it ends with its first error, so nobody can list the others"
        )
    keys = keys_of(loader)
    if again is not None:
        keys = _listed(again, len(loader.dataset))
    found = Verified(len(keys))
    began = told = time.monotonic()
    if not found.samples:
        return found
    mine = _loader(loader, keys, workers, sample_timeout)
    it = None
    try:
        with warnings.catch_warnings(), preserved():
            warnings.simplefilter("ignore", StokerWarning)  # what failed is in the result
            if tell is not None:
                tell(found)
            it = iter(mine)
            ledger = state_of(mine).ledger
            assert ledger is not None  # of a loader with on_error=
            found.workers = int(mine.num_workers)
            for n in it:
                now = time.monotonic()
                found.read, found.seconds = found.read + n, now - began
                if tell is not None and now - told > TELL_S:
                    told = now
                    found.failed = list(ledger.failed.values())
                    tell(found)
    finally:
        if it is not None and mine.num_workers:
            it._shutdown_workers()
    found.failed = sorted(ledger.failed.values(), key=lambda f: (type(f.index) is str, f.index))
    found.read, found.seconds = found.read + len(found.failed), time.monotonic() - began
    if found.read != found.samples:
        raise StokerError(f"{found.read:,} of {found.samples:,} samples were read, and nobody knows why not the others")
    return found


class _Items(Dataset[int]):
    """Loads samples and keeps nothing of them. What a staged dataset is made of is read, not its cache."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._staged = staged_in(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> int:
        if self._staged is None:
            self.dataset[index]
            return 1
        dataset: Any = self.dataset
        while type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        dataset._whole(index)
        return 1


class _Keys(Sampler[Any]):
    def __init__(self, keys: Sequence[Any]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _loader(inner: Any, keys: Sequence[Any], workers: int | str, sample_timeout: float | None) -> DataLoader[Any]:
    many: int | str = workers and "auto"  # workers that take turns
    mine: DataLoader[Any] = DataLoader(
        _Items(inner.dataset),
        BATCH,
        sampler=_Keys(keys),
        num_workers=many,
        collate_fn=len,
        worker_init_fn=inner.worker_init_fn if many else None,
        multiprocessing_context=inner.multiprocessing_context if many else None,
        generator=torch.Generator().manual_seed(0),
        on_error="skip",
        max_errors=max(1, len(keys)),
        quarantine=None,
        sample_timeout=sample_timeout,
    )
    if many == "auto" and workers != "auto":
        mine.resize(int(workers))
    return mine


def _listed(path: Path, samples: int) -> list[Any]:
    """Samples that a quarantine lists, each once, in order: numbers within the dataset, and words."""
    try:
        found = {f.index for f in quarantine.read(path)}
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}") from e
    good = {i for i in found if not isinstance(i, int) or -samples <= i < samples}
    return sorted(good, key=lambda i: (type(i) is str, i))
