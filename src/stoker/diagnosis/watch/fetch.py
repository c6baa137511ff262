"""Times tasks where they run: in torch's workers, in stoker's worker processes, and in a loop without workers."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

import torch
from torch.utils.data import _utils as torch_utils

from ...core.patches import Patches
from ...core.random_state import RandomState
from ...core.types import Batch, Index, Sample
from ...workers.fetcher import BatchFetcher
from .shared_counters import WorkerTimes

_cpu_ns = time.thread_time_ns
_now = time.monotonic

Fetcher = torch_utils.fetch._BaseDatasetFetcher
Fetch = Callable[[Fetcher, Index], Batch]


def attach(patches: Patches) -> None:
    """Times torch's own fetchers, in workers and inline, and stoker's."""
    for cls in (torch_utils.fetch._MapDatasetFetcher, torch_utils.fetch._IterableDatasetFetcher):
        patches.put(cls, "fetch", _timed_fetch)
    patches.put(BatchFetcher, "run", _sampled_run)


def _sampled_run(run: Callable[[BatchFetcher, Index], Batch]) -> Callable[[BatchFetcher, Index], Batch]:
    """Records single tasks' times and stacks; stoker's workers send the sums themselves."""

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
            record.done(_now() - began)

    return sampled


class TaskTimer:
    """Times the tasks of one torch fetcher in process ``pid``."""

    def __init__(self, fetcher: Fetcher, times: WorkerTimes) -> None:
        wrapped = getattr(fetcher.collate_fn, "__self__", None)  # the parent's timer, if it wrapped it before a fork
        collate = wrapped._collate if isinstance(wrapped, TaskTimer) else fetcher.collate_fn
        self._collate: Callable[[list[Sample]], Batch] = collate
        self._collate_s = 0.0
        info = torch.utils.data.get_worker_info()
        self._worker = info.id if info is not None else None
        self._times = times
        self.pid = os.getpid()
        self._record = times.record_of(self._worker, fetcher.dataset, collate)
        fetcher.collate_fn = self._timed_collate

    def _timed_collate(self, samples: list[Sample]) -> Batch:
        began = _now()
        try:
            return self._collate(samples)
        finally:
            self._collate_s = _now() - began

    def run(self, fetch: Fetch, fetcher: Fetcher, index: Index) -> Batch:
        """Runs a task and adds its time to the loader's counters. The stack sampler may sample the task meanwhile."""
        self._collate_s = 0.0
        settings = self._times.metrics.settings
        is_looked_at = self._worker is None and self._times.looks > 0 and not settings.get("draws")
        before = RandomState() if is_looked_at else None
        cpu = _cpu_ns()
        began = self._record.sampler.began = _now()
        try:
            return fetch(fetcher, index)
        finally:
            took, cpu_ns, collate_ns = _now() - began, _cpu_ns() - cpu, int(self._collate_s * 1e9)
            self._times.add(self._worker, int(took * 1e9) - collate_ns, collate_ns, cpu_ns)
            self._record.done(took)
            if before is not None:
                self._times.looks -= 1
                settings["draws"] = bool(before.moved())


def _timed_fetch(original: Fetch) -> Fetch:
    @functools.wraps(original)
    def fetch(self: Fetcher, index: Index) -> Batch:
        timer: TaskTimer | None = self.__dict__.get("_stoker_task_timer")
        if timer is None or timer.pid != os.getpid():
            times = self.__dict__.get("_stoker_times") or WorkerTimes.current
            if times is None:
                return original(self, index)
            timer = self.__dict__["_stoker_task_timer"] = TaskTimer(self, times)
        return timer.run(original, self, index)

    return fetch


def timed_gather(gather: Callable[[Index], Batch], times: WorkerTimes) -> Callable[[Index], Batch]:
    """Times stoker's ``RowGather`` inline. Batches that it leaves to torch's fetcher are timed there."""

    def fetch(index: Index) -> Batch:
        before, began, cpu = gather.gathered, _now(), _cpu_ns()  # type: ignore[attr-defined]
        batch = gather(index)
        if gather.gathered > before:  # type: ignore[attr-defined]
            times.add(None, int((_now() - began) * 1e9), 0, _cpu_ns() - cpu)
        return batch

    return fetch
