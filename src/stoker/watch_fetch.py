"""The part of the watch that is inside workers, and inside a loop without them: times and looks at each task."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import _utils as torch_utils

from . import stage
from .live import Stages

SHORT_NS = 1_000_000
ONE_IN = 16

_ns = time.perf_counter_ns
_cpu_ns = time.thread_time_ns
_pid = os.getpid


def attach() -> None:
    """Times torch's own fetchers, in its workers and inline. stoker's workers report for themselves."""
    fetch_module = torch_utils.fetch
    for cls in (fetch_module._MapDatasetFetcher, fetch_module._IterableDatasetFetcher):
        _watch_fetcher(cls)
    _watch_stages()


def _watch_stages() -> None:
    """stoker's own workers send their times themselves; this is for what is behind the sums."""
    run = stage.Stages.run

    @functools.wraps(run)
    def watched(self: Any, indices: Any) -> Any:
        stages = Stages.current
        info = torch.utils.data.get_worker_info()
        if stages is None or info is None or threading.current_thread() is not threading.main_thread():
            return run(self, indices)
        account = stages.inside(info.id, info.dataset, self._collate.fn)
        account.begin()
        try:
            return run(self, indices)
        finally:
            account.end()

    stage.Stages.run = watched  # type: ignore[method-assign]


class _Fetching:
    """A fetcher's place in its loader's numbers. Short tasks are added up here, and to memory that others read by the
    dozen."""

    __slots__ = ("account", "began", "collate", "collate_ns", "cpu", "pid", "stages", "sums", "tasks", "worker")

    def __init__(self, fetcher: Any, stages: Stages) -> None:
        own = getattr(fetcher.collate_fn, "__self__", None)  # another process' one, before a fork
        self.collate: Callable[[Any], Any] = own.collate if isinstance(own, _Fetching) else fetcher.collate_fn
        info = torch.utils.data.get_worker_info()
        self.worker = info.id if info is not None else None
        self.stages, self.pid = stages, os.getpid()
        self.account = stages.inside(self.worker, fetcher.dataset, self.collate)
        self.collate_ns = self.tasks = self.cpu = 0
        self.began = 0.0
        self.sums = [0, 0, 0, 0]
        fetcher.collate_fn = self.collated
        if self.worker is None:
            if stages.held is not None:
                stages.held()
            stages.held = self.hand_over

    def collated(self, data: Any) -> Any:
        began = _ns()
        try:
            return self.collate(data)
        finally:
            self.collate_ns = _ns() - began

    def begin(self) -> None:
        self.collate_ns = 0
        self.tasks += 1
        self.cpu = _cpu_ns()
        self.began = self.account.begin()

    def end(self) -> None:
        took = int((self.account.end() - self.began) * 1e9)
        sums = self.sums
        sums[0] += took - self.collate_ns
        sums[1] += self.collate_ns
        sums[3] += 1
        # The clock of a thread's CPU is a system call: of short tasks one in so many stands for the others.
        if took > SHORT_NS:
            sums[2] += _cpu_ns() - self.cpu
        elif not self.tasks % ONE_IN:
            sums[2] += (_cpu_ns() - self.cpu) * ONE_IN
        elif self.tasks & (self.tasks - 1):
            return
        self.hand_over()

    def hand_over(self) -> None:
        """Adds the sums to the loader's."""
        taken, self.sums = self.sums, [0, 0, 0, 0]
        if taken[3] and self.pid == os.getpid():
            self.stages.add(self.worker, *taken)


def _watch_fetcher(cls: Any) -> None:
    original = cls.fetch

    @functools.wraps(original)
    def fetch(self: Any, index: Any) -> Any:
        fetching = self.__dict__.get("_stoker_fetching")
        if fetching is None or fetching.pid != _pid():
            stages = self.__dict__.get("_stoker_stages") or Stages.current
            if stages is None:
                return original(self, index)
            fetching = self._stoker_fetching = _Fetching(self, stages)
        fetching.begin()
        try:
            return original(self, index)
        finally:
            fetching.end()

    cls.fetch = fetch


def gathered(gather: Any, stages: Stages) -> Callable[[Any], Any]:
    """Times stoker's ``Gather`` inline. What it leaves to torch's fetcher is timed there."""

    def fetch(index: Any) -> Any:
        before, began, cpu = gather.gathered, _ns(), _cpu_ns()
        batch = gather(index)
        if gather.gathered > before:
            stages.add(None, _ns() - began, 0, _cpu_ns() - cpu, 1)
        return batch

    return fetch
