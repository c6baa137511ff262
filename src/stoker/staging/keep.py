"""Keeps a run's cache for the next run of the same script (``stoker run --apply --keep``).

::

    run 1    each epoch fills the cache in memory, as ever. When the next epoch begins and the inputs are unchanged, or
             the script ends so, another process, of lowest priority, copies the samples to disk
    run 2    what is missing in memory is read from disk before it is made

The folder's name has the key of what the samples depend on (``cache_key``). A sample is written only after its inputs
were compared once more, since a script may change its dataset in the middle of an epoch. Nothing is unpickled, each
sample has a checksum (``store.folder``), and a sample that turns out to be stale removes the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.compare import equal_bits
from ..core.errors import UsageError
from ..core.options import parse_bytes
from ..core.types import JsonObject, Sample
from .isolate import run_isolated
from .store.decode import layout, stored_copy
from .store.encode import CacheError, pickled
from .store.folder import Folder, discard, open_for, paths_for
from .store.manage import listed
from .store.memory import MemoryTables
from .store.store import Gone, Store
from .store.tables import Samples

KEEP = "STOKER_KEEP"  # of the environment: a size, or "" for nothing
DISK_SHARE = 0.1  # of the free disk and of what caches take, at most, for all of them
AT_ONCE = 32 << 20  # bytes that are written before they are brought to the disk
MOST_AT_ONCE = 4096  # samples
START_S = 10.0
WRITER = """
import json, os, sys
os.nice(19)
task = json.loads(sys.argv[1])
sys.path[:] = task.pop("path")
from stoker.staging.keep import write
write(**task)
"""
GROWN = 0.02  # more samples than were written before: less is not worth a process
FEWEST = 16


def quota(folder: Path) -> int:
    """Bytes that all caches in a folder may take together; 0: nothing is kept. Raises UsageError: not a size."""
    asked = os.environ.get(KEEP, "")
    if not asked or asked == "no":
        return 0
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    most = int((free + sum(cache.nbytes for cache in listed(folder))) * DISK_SHARE)
    return most if asked == "disk" else min(free, parse_bytes(asked, most, "--keep"))


class KeptSamples:
    """The samples of one cache that earlier runs left on disk, and those that this run adds."""

    def __init__(self, base: Path, name: str, key: JsonObject, samples: int, most: int) -> None:
        self._base, self._name, self._key, self._samples, self._most = base, name, key, samples, most
        self._process = os.getpid()
        self._written = 0  # samples that were handed to a child to be written
        self._ended = False
        self._store: Store | None = None
        self.found = 0  # samples that earlier runs left
        for path in paths_for(base, name, key):
            if self._store is None and path.is_dir():
                with contextlib.suppress(OSError, CacheError):
                    self._store = Store(Folder(path), samples, most)
                    self.found = self._written = int(np.count_nonzero(self._store.locations))

    def is_right(self, make: Callable[[int], Sample]) -> bool:
        """Whether a sample that is made again, in a child process, is the one on disk. If not, the folder is removed:
        the key missed something."""
        stored = [] if self._store is None else np.flatnonzero(self._store.locations).tolist()
        if not stored:
            return True
        i = stored[len(stored) // 2]
        found = self.fetch([i], 0.0).get(i)
        if found is None:
            return True  # damaged: it is made anew

        def is_same() -> bool:
            return equal_bits(stored_copy(make(i)), layout(found[0], False).put(found[1]))

        try:
            same = run_isolated(is_same)
        except UsageError:  # it cannot be made here: the script sees why
            same = False
        if not same:
            self.discard()
        return same

    def look_again(self) -> None:
        """An epoch begins: nothing to do, for a folder that this run found is not written to by others."""

    def fetch(self, missing: Sequence[int], part_s: float) -> Samples:
        """Those of these samples that are on disk and intact, as a store takes them."""
        store, out = self._store, Samples()
        if store is None or not missing or not store.usable:
            return out
        with contextlib.suppress(Gone, CacheError, OSError):
            where = store.where(np.array(missing, np.int64)).tolist()
            for i, location in zip(missing, where, strict=True):
                if location:
                    out[i] = store.stored(location)
        return out

    def save(self, store: Store) -> None:
        """Begins to write the samples of the cache in memory whose inputs were just found unchanged."""
        if self._ended or os.getpid() != self._process or not store.usable:
            return
        filled = np.flatnonzero(store.locations)
        if len(filled) < FEWEST or len(filled) <= self._written * (1 + GROWN):
            return
        self._written = len(filled)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._start_writer(store, filled)

    def _start_writer(self, store: Store, filled: NDArray[np.int64]) -> None:
        """Starts a process of its own: a fork would copy each page that the script writes to meanwhile. The shell ends
        at once, so the writer is no child of the script, which may wait for its children."""
        if not isinstance(store.medium, MemoryTables):
            return  # on disk already
        indices = os.memfd_create("stoker-indices")
        try:
            os.write(indices, filled.tobytes())
            fds = [store.medium.fd, indices]
            task = {
                "path": sys.path,
                "fds": fds,
                "samples": self._samples,
                "nbytes": store.account.nbytes,
                "to": [str(self._base), self._name, self._key, self._most],
            }
            shell = ["/bin/sh", "-c", '"$@" &', "sh"]
            subprocess.run(
                [*shell, sys.executable, "-I", "-c", WRITER, json.dumps(task)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
                timeout=START_S,
            )
        finally:
            os.close(indices)

    def discard(self) -> None:
        """Samples may be stale: they are not served to later runs, either."""
        self.end()
        for path in reversed(paths_for(self._base, self._name, self._key)):  # a writer renames the second to the first
            if path.is_dir():
                discard(path)
        self._store = None

    def end(self) -> None:
        """Nothing is written from now on: the dataset is another one."""
        self._ended = True


def _make_room(base: Path, name: str, key: JsonObject, size: int, most: int) -> bool:
    """Removes the caches that were used longest ago until there is room for one more. Returns whether there is."""
    own = paths_for(base, name, key)
    others = [cache for cache in listed(base) if cache.path not in own]
    taken = sum(cache.nbytes for cache in others)
    while others and taken + size > most >= size:
        taken -= others[-1].nbytes
        discard(others.pop().path)
    return taken + size <= most


def write(fds: Sequence[int], samples: int, nbytes: int, to: tuple[str, str, JsonObject, int]) -> None:
    """In the writer: copies the samples of a cache in memory, of which the second descriptor has the indices."""
    base, name, key, most = Path(to[0]), *to[1:]
    memory = MemoryTables.of(fds[0], pickles=True)
    store = Store(memory, samples, nbytes)
    store.never_look()
    indices = np.frombuffer(os.pread(fds[1], os.fstat(fds[1]).st_size, 0), np.int64)
    if not _make_room(base, name, key, nbytes, most):
        return
    folder, _ = open_for(base, name, key)
    try:
        _copy(store, indices, folder, Store(folder, samples, nbytes + nbytes // 8))
    except CacheError:  # values that are pickled, or of the script's own classes
        discard(folder.path)


def _copy(store: Store, indices: NDArray[np.int64], folder: Folder, kept: Store) -> None:
    batch: Samples = {}
    size = 0
    for i in indices[kept.locations[indices] == 0].tolist():
        location = int(store.where(np.array([i]))[0])
        if not location:
            continue
        batch[i] = type_spec, leaves = store.stored(location)
        if pickled(type_spec):
            raise CacheError("it is not read between runs")
        size += sum(x.nbytes for x in leaves)
        if size > AT_ONCE or len(batch) >= MOST_AT_ONCE:
            kept.admit(batch, 0)
            folder.sync()
            batch, size = {}, 0
    kept.admit(batch, 0)
    folder.sync()
