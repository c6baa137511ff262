"""Keeps a run's cache for the next run of the same script (``stoker run --apply --keep``).

::

    run 1    Each epoch fills the cache in memory. When the next epoch begins, or the script ends, and the inputs are
             unchanged, a writer process with the lowest priority copies the samples to disk.
    run 2    A sample that is missing in memory is read from disk. Only if it is missing there too is it made.

The key of the inputs (``cache_key``) is part of the folder's name, and stands in its manifest. A script may change its
dataset in mid-epoch, so the inputs are compared again before the epoch's samples are written. Nothing is unpickled, and
each sample has a checksum (``store.folder``). A stale sample removes the folder.

A script never writes to the folder, maps no file of it and takes no lock, so nobody else can make it wait or end it.
Writers run one after the other, because together they must not exceed the quota.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.files import make_folder
from ..core.options import parse_bytes
from ..core.types import JsonObject, Sample
from .open_store import differing_sample, disk_free
from .store.encode import CacheError, pickled
from .store.folder import LOCK_S, Folder, ReadFolder, check_base, discard, is_of, open_for, paths_for
from .store.head import SPEC_BYTES
from .store.manage import listed, remove_remnants
from .store.memory import Lock, MemoryTables
from .store.store import Gone, Store
from .store.tables import BLOCK, PAGE, Samples

KEEP = "STOKER_KEEP"  # environment variable: "disk", a size, or "no" or "" to keep nothing
DISK_SHARE = 0.1  # of the free disk plus the bytes of all caches: the most that they may take together
SYNC_BYTES = 32 << 20  # written between two calls of fdatasync(2): bounds the dirty pages
SYNC_SAMPLES = 4096  # likewise
START_S = 10.0  # time limit for starting the writer, in seconds
WRITER = """
import json, os, sys
os.nice(19)
task = json.loads(sys.argv[1])
sys.path[:] = task.pop("path")
from stoker.staging.keep import write
write(**task)
"""
GROWN = 0.02  # share of new samples that is worth another writer
FEWEST = 16  # samples that are worth a writer
WRITING = ".writing"  # file that a writer locks
WRITERS_S = 600.0  # how long a writer waits for others
SPARE = 16  # a block of 16 pages that does not begin with a page takes another one


def quota(folder: Path) -> int:
    """Returns the bytes that all caches in a folder may take together; 0 to keep none. Raises UsageError if ``--keep``
    is not a size, OSError if the disk cannot be asked."""
    asked = os.environ.get(KEEP, "")
    if not asked or asked == "no":
        return 0
    free = disk_free(folder)
    most = int((free + sum(cache.nbytes for cache in listed(folder))) * DISK_SHARE)
    return most if asked == "disk" else min(free, parse_bytes(asked, most, "--keep"))


class KeptSamples:
    """Samples of one cache on disk: those of earlier runs, and those that this run adds. ``base``: the folder of all
    caches; ``samples``: length of the dataset; ``most``: bytes that all caches may take."""

    def __init__(self, base: Path, name: str, key: JsonObject, samples: int, most: int) -> None:
        self._base, self._name, self._key, self._samples, self._most = base, name, key, samples, most
        self._process = os.getpid()
        self._written = 0  # samples on disk or handed to a writer
        self._ended = False
        self._mended = 0  # damaged samples that a writer was told of
        self._store: Store | None = None
        self.found = 0  # samples from earlier runs
        self.threads = 0  # native threads with which they were made; 0 if that is unknown
        self.threads_matter = True  # other numbers of threads may make other bits
        self.why_not = ""  # why this run leaves none
        if not base.exists():
            return
        check_base(base)
        for path in paths_for(base, name, key):
            if not self.found and path.is_dir():
                with contextlib.suppress(OSError, CacheError):
                    self._open(path)

    def _open(self, path: Path) -> None:
        if not is_of(path, self._key):
            return  # renamed; the writer removes it
        store = Store(ReadFolder(path), self._samples, self._most)
        if store.ready():
            self._store = store
            self.found = self._written = int(np.count_nonzero(store.locations))

    def is_right(self, make: Callable[[int], Sample]) -> bool:
        """Whether samples from earlier runs may be served: one, made again, is the same. If not, removes the folder."""
        if not self.found or self._store is None:
            return True
        differing, is_known = differing_sample(self._store, make)
        if differing is not None:
            self.discard()
        elif not is_known and len(self._store.damaged):  # too many: begins anew
            self._remove()
            self.found = self._written = 0
            return True
        return is_known and differing is None

    def look_again(self) -> None:
        """Does nothing: this run's own samples are in memory already."""

    def fetch(self, missing: Sequence[int], part_s: float) -> Samples:
        """Returns those of the samples that are on disk and intact, in the form that a store accepts."""
        store, out = self._store, Samples()
        is_other = self.threads_matter and self.threads not in (0, torch.get_num_threads())
        if store is None or not missing or not store.usable or is_other:
            return out
        where = store.where(np.array(missing, np.int64)).tolist()
        for i, location in zip(missing, where, strict=True):
            if location:
                with contextlib.suppress(Gone, CacheError, OSError):
                    out[i] = store.stored(location)
        return out

    def save(self, store: Store) -> None:
        """Starts to write the samples of the cache in memory. The caller has just found the inputs unchanged."""
        if self._ended or os.getpid() != self._process or not store.usable:
            return
        filled = np.flatnonzero(store.locations)
        damaged = self._store.damaged if self._store is not None else np.zeros(0, np.int64)
        written = self._written - (len(damaged) - self._mended)
        if len(filled) < FEWEST or len(filled) <= written * (1 + GROWN):
            return
        self._written, self._mended = len(filled), len(damaged)
        with contextlib.suppress(OSError, subprocess.SubprocessError, Gone):
            cls = pickled(store.stored(int(store.locations[filled[0]]))[0])
            if cls:
                self.why_not = f"a sample has a {cls}, which would have to be unpickled"
                self.end()
            else:
                self._start_writer(store, filled, damaged)

    def _start_writer(self, store: Store, filled: NDArray[np.int64], damaged: NDArray[np.int64]) -> None:
        """Starts a new process instead of a fork, which would duplicate each page that the script writes to meanwhile.
        The shell exits at once, so the writer is not a child of the script, which may call ``os.wait()``."""
        if not isinstance(store.medium, MemoryTables):
            return  # on disk already
        indices = os.memfd_create("stoker-indices")
        try:
            os.write(indices, np.concatenate([damaged, filled]).astype(np.int64).tobytes())
            fds = [store.medium.fd, indices]
            task = {
                "path": sys.path,
                "fds": fds,
                "samples": self._samples,
                "damaged": len(damaged),
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
        """Removes the folder of stale samples. The store in memory must be shut, because a writer copies from it."""
        self.end()
        self._remove()

    def _remove(self) -> None:
        for path in reversed(paths_for(self._base, self._name, self._key)):  # a writer renames the second to the first
            if path.is_dir():
                discard(path)
        self._store = None

    def end(self) -> None:
        """Stops writing, because the dataset has changed."""
        self._ended = True


def _make_space(base: Path, own: Collection[Path], size: int, most: int) -> int:
    """Removes the least recently used caches until one of ``size`` bytes fits. Returns how many bytes it may take; 0 if
    it does not fit. ``own``: its folders, which stay."""
    others = [cache for cache in listed(base) if cache.path not in own]
    taken = sum(cache.nbytes for cache in others)
    while others and taken + size > most >= size:
        taken -= others[-1].nbytes
        discard(others.pop().path)
    return most - taken if taken + size <= most else 0


@contextlib.contextmanager
def _alone(base: Path) -> Iterator[None]:
    """Excludes other writers of a folder. Raises OSError if one does not end."""
    make_folder(base)
    fd = os.open(base / WRITING, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with Lock(fd)(WRITERS_S):
            yield
    finally:
        os.close(fd)


def write(fds: Sequence[int], samples: int, damaged: int, nbytes: int, to: tuple[str, str, JsonObject, int]) -> None:
    """Copies samples from a cache in memory to disk, in the writer. ``fds``: descriptors of the cache, and of a file
    with the samples' indices as int64, after those of ``damaged`` samples on disk."""
    base, name, key, most = Path(to[0]), *to[1:]
    memory = MemoryTables.of(fds[0], pickles=True)
    store = Store(memory, samples, nbytes)
    store.never_look()
    indices = np.frombuffer(os.pread(fds[1], os.fstat(fds[1]).st_size, 0), np.int64)
    with contextlib.suppress(OSError, CacheError), _alone(base):
        check_base(base)
        remove_remnants(base)
        own = paths_for(base, name, key)
        there = sum(cache.nbytes for cache in listed(base) if cache.path in own)
        whole = nbytes * samples // max(1, store.account.filled) * 9 // 8 + BLOCK  # others may fill it later
        beside = _bytes_beside(store, key, whole)
        most_here = _make_space(base, own, max(there, beside + nbytes + nbytes // SPARE), most)
        if most_here:
            budget = min(whole, (most_here - beside) * SPARE // (SPARE + 1))
            _write_to(open_for(base, name, key)[0], store, indices[:damaged], indices[damaged:], budget)
            if sum(cache.nbytes for cache in listed(base)) > most:  # an earlier run had a larger quota
                for path in own:
                    discard(path)


def _bytes_beside(store: Store, key: JsonObject, whole: int) -> int:
    """Bytes of a cache on disk beside the ``whole`` of its samples, at most: see ``store.folder``."""
    columns = len(store.layout.sizes) if store.layout is not None else 0
    tables = 8 * store.samples + 4 * store.samples + 2 * SPEC_BYTES + whole // BLOCK + columns
    files = 2 * columns + 8  # and the folder
    return tables + len(json.dumps(key, indent=1)) + 2 * PAGE * files


def _write_to(
    folder: Folder, store: Store, damaged: NDArray[np.int64], indices: NDArray[np.int64], budget: int
) -> None:
    folder.wait_at_most(LOCK_S)
    kept = Store(folder, store.samples, budget)
    try:
        kept.where(damaged)  # removes them
        _copy(store, indices, folder, kept)
    except Gone:  # the script gave the memory back, or a sample was stale
        return
    except CacheError:  # damaged files; a value is pickled, or of one of the script's own classes
        discard(folder.path)


def _copy(store: Store, indices: NDArray[np.int64], folder: Folder, kept: Store) -> None:
    batch: Samples = {}
    size = 0
    for i in indices[kept.locations[indices] == 0].tolist():
        location = store.location(i)
        if not location:
            continue
        batch[i] = type_spec, leaves = store.stored(location)
        if pickled(type_spec):
            raise CacheError("pickled samples are not kept between runs")
        size += sum(x.nbytes for x in leaves)
        if size > SYNC_BYTES or len(batch) >= SYNC_SAMPLES:
            kept.admit(batch)
            folder.sync()
            batch, size = {}, 0
    kept.admit(batch)
    folder.sync()
