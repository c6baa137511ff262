"""Hands the cache of a dataset to running workers when a trial ends in the middle of their epoch. An iterator without
workers asks before each batch, too.

::

    the script's process                                     a worker
    --------------------                                     --------
    makes a ``LatePlan``, starts workers with it         ->  has it, by fork or by pickle
    asks before each batch whether the trial has ended       looks before each task whether something was written
    ``publish``: writes the ``Staged``, pickled          ->  ``read``: makes it anew around its own dataset, and
    without its dataset                                      opens the cache's memory by ``/proc/<pid>/fd`` (proc(5))
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Callable

import numpy as np

from ..core.dataset_tree import without_subsets
from ..core.random_state import RandomState
from ..core.types import MapDataset
from .dataset import Staged
from .store.encode import CacheError
from .store.memory import MemoryTables, identity
from .subsets import with_whole

NBYTES = 1 << 22  # virtual size; untouched pages take no memory
START = 4096  # offset of the pickle; its length precedes it
DATASET = "dataset"


class LateHere:
    """Carries a dataset with a cache to an iterator without workers. ``ask``: as for ``LatePlan``."""

    is_here = True

    def __init__(self, ask: Callable[[LateHere], bool]) -> None:
        self._ask = ask
        self._dataset: MapDataset | None = None

    def ask(self) -> bool:
        """Asks whether the trial has ended. Returns whether to ask again."""
        return self._ask(self)

    def publish(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def read(self, dataset: MapDataset) -> MapDataset | None:
        """Returns what was published; None if nothing was."""
        return self._dataset


class LatePlan:
    """Shared memory that carries a ``Staged`` from one process to others. ``ask``: called in the first process before
    each batch; returns whether to call it again."""

    is_here = False

    def __init__(self, ask: Callable[[LatePlan], bool]) -> None:
        self._ask: Callable[[LatePlan], bool] | None = ask
        self._map(MemoryTables(NBYTES))

    def _map(self, memory: MemoryTables) -> None:
        self._memory = memory
        self._length = memory.table("length", np.int64, 1, 0)
        self._data = memory.table("data", np.uint8, NBYTES - START, START)

    def __getstate__(self) -> MemoryTables:
        return self._memory

    def __setstate__(self, memory: MemoryTables) -> None:
        self._ask = None
        self._map(memory)

    def ask(self) -> bool:
        """Asks whether the trial has ended. Returns whether to ask again."""
        return self._ask is not None and self._ask(self)

    def publish(self, staged: Staged) -> None:
        """Hands it to all workers. Raises an exception if it cannot be pickled or is too large."""
        file = io.BytesIO()
        _PlanPickler(file, staged).dump(staged)
        data = np.frombuffer(file.getvalue(), np.uint8)
        self._data[: len(data)] = data
        self._length[0] = len(data)  # last: a worker may look at any time

    def read(self, dataset: MapDataset) -> MapDataset | None:
        """Wraps a worker's own dataset in what was published; None if nothing was. May raise any exception."""
        length = int(self._length[0])
        if not length:
            return None
        states = RandomState()
        staged = _PlanUnpickler(io.BytesIO(self._data[:length].tobytes()), without_subsets(dataset)).load()
        states.restore()
        return with_whole(dataset, staged)


class _PlanPickler(pickle.Pickler):
    """Pickles a ``Staged`` with its cache but without its dataset."""

    def __init__(self, file: io.BytesIO, staged: Staged) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._staged = staged

    def persistent_id(self, x: object) -> str | None:
        return DATASET if x is self._staged.dataset else None

    def reducer_override(self, x: object) -> object:  # type: ignore[override]
        if isinstance(x, MemoryTables):
            return _opened, (f"/proc/{os.getpid()}/fd/{x.fd}", identity(x.fd), x.pickles)
        if x is self._staged:
            return copyreg.__newobj__, (Staged,), {**x.__getstate__(), "_store": x._store, "_table": x._table}  # type: ignore[attr-defined]
        return NotImplemented


class _PlanUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, dataset: MapDataset) -> None:
        super().__init__(file)
        self._dataset = dataset

    def persistent_load(self, name: str) -> MapDataset:
        return self._dataset


def _opened(path: str, wanted: tuple[int, int], pickles: bool) -> MemoryTables:
    """Opens the memory if it still exists. The descriptor may have been closed and its number reused for a file of the
    script's. ``O_PATH`` does not affect a file, and guarantees that the file opened for writing is the one that was
    checked."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if identity(found) != wanted:
            raise CacheError("the cache was closed in the meantime")
        return MemoryTables.of(os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC), pickles)
    finally:
        os.close(found)
