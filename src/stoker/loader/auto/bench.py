"""Measures how fast workers make batches: the empty loop, without a model, that ``stoker tune`` runs.

A bench keeps its workers warm between measurements. A measurement runs stoker's own scheduler over the first *n* of
them, so a slow sample causes the same delay as in training. Workers that a setting does not use stay idle. The loader's
own sampler, its generator and this process' random state are not touched.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _DatasetKind

from ...core.errors import UsageError, WorkerDiedError, WorkerTimeoutError
from ...core.metrics import LoaderMetrics
from ...core.options import Budget, Knobs
from ...core.types import Index, LoaderLike
from ...workers.faults import validate
from ...workers.process_pool import ProcessPool
from ...workers.protocol import WorkerSpec
from ..scheduler import Scheduler
from .tasks import SEED, MeasuringTasks

REPEATS = 6  # maximum number of measurements until one in which no worker allocated memory for batches
DIED = "it killed a worker: {}; stoker verify names the sample"
LATE = 3  # a window this many times as long as planned ends without its minimum of batches


class TooSlow(UsageError):
    """No batch arrived in the remaining time."""


class BadSample(UsageError):
    """A sample cannot be loaded."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where  # the sample and the transform, as far as known


class BenchWindow(NamedTuple):
    """One measurement."""

    rate: float  # batches per second
    batches: int  # how many were delivered
    work_s: float  # wall seconds of a worker per batch
    make_s: float  # of these, seconds to fetch and collate, which a process without workers would spend too
    cpu_s: float  # CPU seconds per batch
    nbytes: int = 0  # size of the largest batch; 0 if batches do not cross between processes
    read: int = 0  # bytes that workers read from files


class WorkerBench:
    """Runs the measuring loop over worker processes. ``deadline``: ``time.monotonic()`` by which measuring must end."""

    def __init__(self, loader: LoaderLike, tasks: MeasuringTasks, budget: Budget, deadline: float) -> None:
        self.loader, self.tasks, self.deadline = loader, tasks, deadline
        self._budget = budget
        self._is_stream = loader._dataset_kind == _DatasetKind.Iterable
        self._pool: ProcessPool | None = None
        self._scheduler: Scheduler | None = None
        self._metrics = LoaderMetrics()
        self._workers = 0
        self._setting = (0, 0)
        self._draining = False
        self._delivered = 0  # in the current epoch of a stream

    def use(self, tasks: MeasuringTasks) -> None:
        """Draws from other tasks from now on; none of the earlier ones is left in a worker."""
        if tasks is not self.tasks:
            self.rest()
            self.tasks = tasks
            self._metrics.batch_bytes = 0

    def prepare(self, n: int, prefetch: int) -> None:
        """Prepares a measurement with ``n`` workers: waits until each has made a batch."""
        if self._setting != (n, prefetch):
            self.rest()
            self._begin(n, prefetch)
            for _ in range(n):
                self.next()
            self._setting = (n, prefetch)

    def _begin(self, n: int, prefetch: int) -> None:
        pool = self._pool
        if pool is None or (self._is_stream and n != self._workers):  # a stream's workers know their number
            self.close()
            context = self.loader.multiprocessing_context or torch.multiprocessing
            pool = self._pool = ProcessPool(_spec_of(self.loader, n), context, self._budget, [])
            self._workers = n
        while self._workers < n:
            pool.grow()
            self._workers += 1
        timeout = max(0.0, self.deadline - time.monotonic()) + 1.0
        epoch = -1 if self._scheduler is None else self._scheduler.epoch
        knobs = Knobs(n, prefetch, persistent=True, timeout=timeout)
        self._scheduler = Scheduler(pool, knobs, self._metrics, self._budget)
        self._scheduler.epoch = epoch
        self._delivered = 0
        self._scheduler.begin(self._draw)

    def _draw(self) -> Index:
        if self._draining:
            raise StopIteration
        return self.tasks()

    def next(self) -> None:
        """Takes one batch. Raises BadSample if it cannot be made, TooSlow if it did not arrive before the deadline."""
        assert self._scheduler is not None
        try:
            data = self._scheduler.next()
        except StopIteration:
            if not self._delivered:
                raise UsageError(
                    f"{type(self.loader.dataset).__name__} is empty: it ended before the first batch"
                ) from None
            self._delivered = 0
            self._scheduler.begin(self._draw)  # every worker restarts its part of the stream
            self.next()
            return
        except WorkerDiedError as e:
            raise BadSample(DIED.format(e)) from e
        except WorkerTimeoutError as e:
            raise TooSlow(str(e)) from e
        if isinstance(data, ExceptionWrapper):
            raise BadSample(data.exc_msg, getattr(data, "explanation", "").removeprefix("stoker: "))
        self._delivered += 1

    def window(self, n: int, prefetch: int, seconds: float, least: int) -> BenchWindow:
        """Measures for ``seconds``, and for at least ``least`` batches per worker."""
        self.prepare(n, prefetch)
        assert self._pool is not None
        for _ in range(REPEATS):
            slots = self._pool.slots()
            window = self._measure(n, seconds, least)
            if self._pool.slots() == slots or time.monotonic() > self.deadline:
                break  # otherwise the window measured one-time memory allocation by the kernel
        return window

    def _measure(self, n: int, seconds: float, least: int) -> BenchWindow:
        m, before, read = self._metrics, replace(self._metrics), self._bytes_read()
        began, count, took = time.monotonic(), 0, 0.0
        # Whole turns: workers in step deliver in bursts, and part of a burst could add up to n - 1 extra batches.
        while count % n or took < seconds or count < least * n:
            self.next()
            count += 1
            took = time.monotonic() - began
            late = took >= LATE * seconds or time.monotonic() >= self.deadline
            if late and count >= n and count % n == 0:
                break
        tasks = max(1, m.tasks - before.tasks)
        make_ns = m.fetch_ns + m.collate_ns - before.fetch_ns - before.collate_ns
        return BenchWindow(
            rate=count / took,
            batches=count,
            work_s=(make_ns + m.transport_ns - before.transport_ns) / tasks / 1e9,
            make_s=make_ns / tasks / 1e9,
            cpu_s=(m.cpu_ns - before.cpu_ns) / tasks / 1e9,
            nbytes=m.batch_bytes,
            read=self._bytes_read() - read,
        )

    def _bytes_read(self) -> int:
        total = 0
        if self._pool is not None:
            for worker in self._pool.processes:
                with contextlib.suppress(OSError):  # the kernel may refuse
                    total += int(Path(f"/proc/{worker.pid}/io").read_text().split()[1])  # "rchar: ..." comes first
        return total

    def rest(self) -> None:
        """Finishes pending work; the bench then costs nothing until the next measurement."""
        if self._scheduler is None:
            return
        self._setting, self._draining = (0, 0), True
        with contextlib.suppress(StopIteration, WorkerDiedError, WorkerTimeoutError):
            while True:
                self._scheduler.next()
        self._draining = False

    def pss(self) -> int:
        """Memory of the largest worker in bytes; 0 if unknown."""
        return 0 if self._pool is None else max(self._pool.pss().values(), default=0)

    def close(self) -> None:
        """Ends the workers."""
        pool, self._pool, self._scheduler = self._pool, None, None
        self._setting, self._workers = (0, 0), 0
        if pool is not None:
            pool.close(leave_s=0.0)


def _spec_of(loader: LoaderLike, num_workers: int) -> WorkerSpec:
    return WorkerSpec(
        kind=loader._dataset_kind,
        dataset=loader.dataset,
        auto_collation=loader._auto_collation,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        base_seed=SEED,
        init_fn=loader.worker_init_fn,
        num_workers=num_workers,
        shared_seed=None,
        task_seeds=True,
        on_error=validate.on_error(loader),
        restart=True,  # detects deaths by process sentinel: torch's signal handler may raise anywhere
    )
