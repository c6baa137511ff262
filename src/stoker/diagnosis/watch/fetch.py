"""Times tasks where they run: in torch's workers, in stoker's worker processes, and in a loop without workers.

A task of torch's fetcher (``fetcher.fetch(indices)``) is timed by the ``TaskTimer`` of that fetcher:

1. A task of a millisecond or more: its times, its CPU time and its collating are noted, and the stack sampler may look
   into it (``sampler.began`` is set while it runs).
2. Shorter tasks: only the time is noted, except for one in 16, which is treated as in 1 and stands for the others.
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
    """Times the tasks of one of torch's fetchers, in the process ``pid``."""

    def __init__(self, fetcher: Fetcher, times: WorkerTimes) -> None:
        wrapped = getattr(fetcher.collate_fn, "__self__", None)  # by the timer of the parent, before a fork
        collate = wrapped._collate if isinstance(wrapped, TaskTimer) else fetcher.collate_fn
        self._collate: Callable[[list[Sample]], Batch] = collate
        self._collate_s = 0.0
        self._looked_into = False  # is the task that runs
        info = torch.utils.data.get_worker_info()
        self._worker = info.id if info is not None else None
        self._times = times
        self.pid = os.getpid()
        self._record = times.record_of(self._worker, fetcher.dataset, collate)
        self._tasks = 0
        self._short = False  # the last one that was looked into, and others after it
        self._took: list[float] = []  # seconds of tasks that are not handed over yet
        fetcher.collate_fn = self._timed_collate
        if self._worker is None:
            if times.flush is not None:
                times.flush()
            times.flush = self.hand_over

    def _timed_collate(self, samples: list[Sample]) -> Batch:
        if not self._looked_into:
            return self._collate(samples)
        began = _now()
        try:
            return self._collate(samples)
        finally:
            self._collate_s = _now() - began

    def run(self, fetch: Fetch, fetcher: Fetcher, index: Index) -> Batch:
        """Runs a task, and notes its time; of one that is looked into, also what it spends where."""
        self._tasks += 1
        looked_into = self._looked_into = not self._short or self._tasks % ONE_IN == 0
        cpu = _cpu() if looked_into else 0.0
        self._collate_s = 0.0
        sampler = self._record.sampler
        began = sampler.began = _now()
        try:
            return fetch(fetcher, index)
        finally:
            took = _now() - began
            sampler.began = 0.0
            self._took.append(took)
            if looked_into:
                self._looked_into = False
                self._short = took < SHORT_S and (self._short or self._tasks >= ONE_IN)
                self.hand_over(_cpu() - cpu, took)
            elif took > SHORT_S:
                self._short = False

    def hand_over(self, cpu: float = 0.0, took: float = 0.0) -> None:
        """Adds what is noted to the loader's numbers.

        Args:
            cpu: seconds of CPU of the task that was looked into; the others are taken to be like it.
            took: seconds of that task.
        """
        if not self._took or self.pid != os.getpid():
            return
        all_s, tasks = sum(self._took), len(self._took)
        like_it = all_s / took if took else 0.0
        collate = min(all_s, self._collate_s * like_it)
        fetch_ns, collate_ns, cpu_ns = (int(s * 1e9) for s in (all_s - collate, collate, cpu * like_it))
        self._times.add(self._worker, fetch_ns, collate_ns, cpu_ns, tasks)
        self._record.done(self._took)


def _timed_fetch(original: Fetch) -> Fetch:
    @functools.wraps(original)
    def fetch(self: Fetcher, index: Index) -> Batch:
        timer: TaskTimer | None = self.__dict__.get("_stoker_task_timer")
        if timer is None or timer.pid != _pid():
            times = self.__dict__.get("_stoker_times") or WorkerTimes.current
            if times is None:
                return original(self, index)
            timer = self.__dict__["_stoker_task_timer"] = TaskTimer(self, times)
        return timer.run(original, self, index)

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
