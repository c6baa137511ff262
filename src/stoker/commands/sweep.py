"""Reads each sample of a map-style dataset once, in workers, and collects those that cannot be read."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Collection, Generator, Sequence

import torch
from torch.utils.data import Dataset, get_worker_info

from ..core.errors import StokerError, StokerWarning
from ..core.random_state import preserved
from ..core.types import Batch, Index, LoaderLike, MapDataset
from ..loader.dataloader import DataLoader
from ..loader.loader_state import state_of
from ..sampling import seeding
from ..workers.faults.policy import Failure

SEED = 0  # for random augmentation, whose draws do not depend on the number of workers, unless there are none


class Sweep:
    """One pass over a dataset, without its loader's ``collate_fn`` and sampler.

    Workers call ``read`` with the dataset and each of ``keys``. ``collate`` merges the results of ``task_samples`` keys
    into one object. A sample that takes longer than ``sample_timeout`` counts as failed."""

    def __init__(
        self,
        loader: LoaderLike,
        keys: Sequence[Index],
        read: Callable[[MapDataset, Index], object],
        collate: Callable[[list[Batch]], object],
        num_workers: int | str,
        task_samples: int,
        sample_timeout: float | None = None,
    ) -> None:
        count = "auto" if num_workers else 0  # with "auto", the next free worker takes the next task
        self._loader: DataLoader[object] = DataLoader(
            _Samples(loader.dataset, read),
            task_samples,
            sampler=keys,
            num_workers=count,
            collate_fn=collate,
            worker_init_fn=functools.partial(_start, loader.worker_init_fn) if count else None,
            multiprocessing_context=loader.multiprocessing_context if count else None,
            generator=torch.Generator().manual_seed(SEED),
            sample_timeout=sample_timeout,
            on_error="skip",
            max_errors=max(1, len(keys)),
            quarantine=None,
        )
        if count == "auto" and num_workers != "auto":
            self._loader.resize(int(num_workers))
        self.seconds = 0.0

    def results(self) -> Generator[Batch, None, None]:
        """Yields the results of ``collate`` in order. Once it returns, raises or is closed, the workers have ended.
        Raises StokerError if workers died without a sample to blame, or ``worker_init_fn`` raised."""
        began = time.monotonic()
        iterator = None
        try:
            with warnings.catch_warnings(), preserved():
                warnings.simplefilter("ignore", StokerWarning)  # failed samples are in the result
                seeding.seed_worker(SEED, 0)  # for reading with 0 workers
                iterator = iter(self._loader)
                for batch in iterator:
                    self.seconds = time.monotonic() - began
                    yield batch
        except StokerError:
            raise
        except Exception as e:  # the last line of its text says what happened in the worker
            raise StokerError(f"reading the samples failed: {(str(e).strip().splitlines() or [''])[-1]}") from e
        finally:
            if iterator is not None and self._loader.num_workers:
                iterator._shutdown_workers()
        self.seconds = time.monotonic() - began

    @property
    def workers(self) -> int:
        """The number of worker processes."""
        return int(self._loader.num_workers)

    @property
    def failures(self) -> Collection[Failure]:
        """The samples that could not be read so far."""
        ledger = state_of(self._loader).ledger
        return ledger.failed.values() if ledger is not None else ()

    @property
    def failed(self) -> list[Failure]:
        """``failures`` in the order of their keys."""
        return sorted(self.failures, key=lambda f: (type(f.index) is str, f.index))


class _Samples(Dataset[object]):
    """The results of ``read`` for each sample of a map-style dataset."""

    def __init__(self, dataset: MapDataset, read: Callable[[MapDataset, Index], object]) -> None:
        self.dataset = dataset
        self._read = read

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Index) -> object:
        return self._read(self.dataset, key)


def _start(init_fn: Callable[[int], None] | None, worker: int) -> None:
    """The ``worker_init_fn``: calls the user's, after making ``get_worker_info()`` return the user's dataset."""
    info = get_worker_info()
    if info is not None:
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # it is frozen
    if init_fn is not None:
        init_fn(worker)
