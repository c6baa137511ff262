"""Counters of a watched process in shared memory: each loader's progress, which ``stoker run`` can read even after a
SIGKILL, and the times of torch's own forked workers."""

from __future__ import annotations

import mmap
import os

from ...core.metrics import LoaderMetrics
from ...core.types import JsonObject
from . import worker_record
from .worker_record import WorkerRecord

LIVE = ("wait_s", "first_wait_s", "step_s", "batches", "samples", "epochs", "ended")
ROWS = 256  # most loaders of one process
LOOKED_AT = 64  # tasks in this process that are checked for drawing random numbers (0.1 ms each), until one did
MAX_WORKERS = 256  # rows of the table to which forked workers write their times
COLUMNS = 4  # fetch, collate, CPU (nanoseconds), tasks


class Live:
    """A table with one row of doubles (``LIVE``) per loader. ``fd`` is -1 if the table could not be shared, for
    instance because the process is out of file descriptors."""

    def __init__(self, fd: int | None = None) -> None:
        size = ROWS * len(LIVE) * 8
        self.fd = -1
        if fd is None:
            try:
                self.fd = os.memfd_create("stoker-live", os.MFD_CLOEXEC)
                os.ftruncate(self.fd, size)
                memory = mmap.mmap(self.fd, size)
            except OSError:
                self.close()
                memory = mmap.mmap(-1, size)
        else:
            self.fd = fd  # another process's table, mapped read-only
            memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self._view = memoryview(memory).cast("d")
        self._beyond = memoryview(bytearray(len(LIVE) * 8)).cast("d")

    def close(self) -> None:
        """Closes the descriptor; the rows stay usable."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def row(self, index: int) -> memoryview[float]:
        """Returns the row of loader number ``index``. Loaders beyond the table share a row that is never read."""
        if index >= ROWS:
            return self._beyond
        return self._view[index * len(LIVE) : (index + 1) * len(LIVE)]


class WorkerTimes:
    """The table to which one loader's fetching processes write their times: a row each, in memory shared by fork."""

    current: WorkerTimes | None = None  # of the loader whose iterator, and so workers, are being created

    def __init__(self, metrics: LoaderMetrics) -> None:
        self._rows = memoryview(mmap.mmap(-1, MAX_WORKERS * COLUMNS * 8)).cast("q")
        self._texts = memoryview(mmap.mmap(-1, MAX_WORKERS * worker_record.ROW_BYTES))
        self._has_record = memoryview(mmap.mmap(-1, MAX_WORKERS))  # per row of ``_texts``: 1 if a process writes to it
        self._records: dict[int, JsonObject] = {}  # by process ID
        self._before: dict[int, JsonObject] = {}  # ``_records`` as of ``restart``
        self._own_record: tuple[int, WorkerRecord] | None = None  # with the ID of the process that made it
        self._seen = [0] * COLUMNS
        self.metrics = metrics  # the loader's counters, to which ``collect`` adds
        self.looks = LOOKED_AT

    # In a fetching process.

    def record_of(self, worker: int | None, dataset: object, collate: object) -> WorkerRecord:
        """Returns this process's record of its tasks."""
        if self._own_record is None or self._own_record[0] != os.getpid():
            number = min(worker or 0, MAX_WORKERS - 1)
            self._has_record[number] = 1
            self._own_record = os.getpid(), WorkerRecord(self._text(number), dataset, collate)
        return self._own_record[1]

    def end(self) -> None:
        """Stops sampling this process's tasks."""
        if self._own_record is not None and self._own_record[0] == os.getpid():
            self._own_record[1].sampler.end()

    def add(self, worker: int | None, fetch: int, collate: int, cpu: int) -> None:
        """Adds the nanoseconds of a task. ``worker`` is the worker's ID, None in the main process."""
        number = worker or 0
        if number < MAX_WORKERS:
            for at, more in enumerate((fetch, collate, cpu, 1), number * COLUMNS):
                self._rows[at] += more

    def _text(self, number: int) -> memoryview:
        return self._texts[number * worker_record.ROW_BYTES : (number + 1) * worker_record.ROW_BYTES]

    # In the watching process.

    def collect(self) -> None:
        """Adds the counts since the last call to the loader's counters."""
        total = [sum(self._rows[i::COLUMNS]) for i in range(COLUMNS)]
        fetch, collate, cpu, tasks = (a - b for a, b in zip(total, self._seen, strict=True))
        self._seen = total
        m = self.metrics
        m.fetch_ns += fetch
        m.collate_ns += collate
        m.cpu_ns += cpu
        m.tasks += tasks
        for number in range(MAX_WORKERS):
            record = worker_record.read(self._text(number)) if self._has_record[number] else None
            if record is not None:
                self._records[record["pid"]] = record
                m.worker_pss |= {number: record["pss"]} if record["pss"] else {}
        new = [worker_record.minus(r, self._before[p]) if p in self._before else r for p, r in self._records.items()]
        if new:
            m.inside = worker_record.merge(r for r in new if r is not None)

    def restart(self) -> None:
        """Discards what was recorded so far, because tasks differ from now on."""
        self.collect()
        self._before = dict(self._records)
        m = self.metrics
        m.tasks = m.fetch_ns = m.collate_ns = m.transport_ns = m.cpu_ns = 0
        m.inside = {}
        m.step_bins.clear()
        m.wait_bins.clear()
