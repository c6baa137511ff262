"""Times tasks where they run: in torch's workers, in stoker's worker processes, and in a loop without workers.

A task of torch's fetcher (``fetcher.fetch(indices)``) is timed by the ``TaskTimer`` of that fetcher:

1. A task of a millisecond or more: its times, its CPU time and its collating are noted, and the stack sampler may look
   into it (``sampler.began`` is set while it runs).
2. Shorter tasks: only the time is noted, except for one in 16, which is treated as in 1 and stands for the others.
3. In a loop without workers, while ``Clock`` takes brief batches, the timer is ``paused``: the wait of ``next()`` is
   the task's time, and ``Clock.settle`` adds it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

import torch
from torch.utils.data import _utils as torch_utils

from ...core.patches import Patches
from ...core.types import Batch, Index, Sample
from ...workers.fetcher import BatchFetcher
from .shared_counters import WorkerTimes

SHORT_S = 1e-3
ONE_IN = 16  # short tasks is looked into

_ns = time.perf_counter_ns
_cpu_ns = time.thread_time_ns
_now = time.monotonic
_cpu = time.thread_time
_pid = os.getpid

Fetcher = torch_utils.fetch._BaseDatasetFetcher
Fetch = Callable[[Fetcher, Index], Batch]


def attach(patches: Patches) -> None:
    """Times torch's own fetchers, in its workers and inline, and stoker's, whose times its workers send themselves."""
    fetch_module = torch_utils.fetch
    for cls in (fetch_module._MapDatasetFetcher, fetch_module._IterableDatasetFetcher):
        patches.put(cls, "fetch", _timed_fetch)
    patches.put(BatchFetcher, "run", _sampled_run)


def _sampled_run(run: Callable[[BatchFetcher, Index], Batch]) -> Callable[[BatchFetcher, Index], Batch]:
    """stoker's workers send the sums themselves; this is for the times of single tasks and for their stacks."""

    @functools.wraps(run)
    def sampled(self: BatchFetcher, indices: Index) -> Batch:
        times = WorkerTimes.current
        info = torch.utils.data.get_worker_info()
        if times is None or info is None or threading.current_thread() is not threading.main_thread():
            return run(self, indices)
        record = times.record_of(info.id, info.dataset, self._collate.fn)
        began = record.sampler.began = _now()
        try:
            return run(self, indices)
        finally:
            record.sampler.began = 0.0
            record.done([_now() - began])

    return sampled


class TaskTimer:
    """Times the tasks of one of torch's fetchers.

    Attributes:
        short: tasks are shorter than ``SHORT_S``.
        paused: another one adds the tasks' times to ``took``.
        took: seconds of tasks that are not handed over yet.
    """

    __slots__ = (
        "_collate",
        "_collate_s",
        "_inside",
        "paused",
        "pid",
        "record",
        "sampler",
        "short",
        "tasks",
        "times",
        "took",
        "worker",
    )

    def __init__(self, fetcher: Fetcher, times: WorkerTimes) -> None:
        wrapped = getattr(fetcher.collate_fn, "__self__", None)  # by the timer of the parent, before a fork
        collate = wrapped._collate if isinstance(wrapped, TaskTimer) else fetcher.collate_fn
        self._collate: Callable[[list[Sample]], Batch] = collate
        self._collate_s = 0.0
        self._inside = False  # a task that is looked into runs
        info = torch.utils.data.get_worker_info()
        self.worker = info.id if info is not None else None
        self.times = times
        self.pid = os.getpid()
        self.record = times.record_of(self.worker, fetcher.dataset, collate)
        self.sampler = self.record.sampler
        self.tasks = 0
        self.short = False
        self.paused = False
        self.took: list[float] = []
        fetcher.collate_fn = self._timed_collate
        if self.worker is None:
            if times.flush is not None:
                times.flush()
            times.flush = self.hand_over

    def _timed_collate(self, samples: list[Sample]) -> Batch:
        if not self._inside:
            return self._collate(samples)
        began = _now()
        try:
            return self._collate(samples)
        finally:
            self._collate_s = _now() - began

    def resume(self) -> None:
        """The next task is looked into."""
        self.paused = False
        self.tasks = -1

    def look_into(self, fetch: Fetch, fetcher: Fetcher, index: Index) -> Batch:
        """Runs a task, and notes what it spends where."""
        self._inside, self._collate_s = True, 0.0
        cpu = _cpu()
        began = self.sampler.began = _now()
        try:
            return fetch(fetcher, index)
        finally:
            took = _now() - began
            self.sampler.began = 0.0
            self._inside = False
            self.took.append(took)
            self.short = took < SHORT_S and (self.short or self.tasks >= ONE_IN)
            self.hand_over(_cpu() - cpu, took)

    def time(self, fetch: Fetch, fetcher: Fetcher, index: Index) -> Batch:
        """Runs a task, and notes its time."""
        began = self.sampler.began = _now()
        try:
            return fetch(fetcher, index)
        finally:
            self.sampler.began = 0.0
            took = _now() - began
            self.took.append(took)
            if took > SHORT_S:
                self.short = False

    def hand_over(self, cpu: float = 0.0, took: float = 0.0) -> None:
        """Adds what is noted to the loader's numbers.

        Args:
            cpu: seconds of CPU of the task that was looked into; the others are taken to be like it.
            took: seconds of that task.
        """
        if not self.took or self.pid != os.getpid():
            return
        all_s, tasks = sum(self.took), len(self.took)
        like_it = all_s / took if took else 0.0
        collate = min(all_s, self._collate_s * like_it)
        fetch_ns, collate_ns, cpu_ns = (int(s * 1e9) for s in (all_s - collate, collate, cpu * like_it))
        self.times.add(self.worker, fetch_ns, collate_ns, cpu_ns, tasks)
        self.record.done(self.took)


def _timed_fetch(original: Fetch) -> Fetch:
    @functools.wraps(original)
    def fetch(self: Fetcher, index: Index) -> Batch:
        timer: TaskTimer | None = self.__dict__.get("_stoker_task_timer")
        if timer is not None and timer.paused:
            return original(self, index)
        if timer is None or timer.pid != _pid():
            times = self.__dict__.get("_stoker_times") or WorkerTimes.current
            if times is None:
                return original(self, index)
            timer = self.__dict__["_stoker_task_timer"] = TaskTimer(self, times)
        timer.tasks += 1
        if timer.short and timer.tasks % ONE_IN:
            return timer.time(original, self, index)
        return timer.look_into(original, self, index)

    return fetch


def timed_gather(gather: Callable[[Index], Batch], times: WorkerTimes) -> Callable[[Index], Batch]:
    """Times stoker's ``RowGather`` inline. What it leaves to torch's fetcher is timed there."""

    def fetch(index: Index) -> Batch:
        before, began, cpu = gather.gathered, _ns(), _cpu_ns()  # type: ignore[attr-defined]
        batch = gather(index)
        if gather.gathered > before:  # type: ignore[attr-defined]
            times.add(None, _ns() - began, 0, _cpu_ns() - cpu, 1)
        return batch

    return fetch
