"""The part of the watch that is inside workers, and inside a loop without them: times and looks at each task."""

from __future__ import annotations

import functools
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


def _watch_fetcher(cls: Any) -> None:
    original = cls.fetch

    @functools.wraps(original)
    def fetch(self: Any, index: Any) -> Any:
        stages = self.__dict__.get("_stoker_stages") or Stages.current
        info = torch.utils.data.get_worker_info()
        if stages is None:
            return original(self, index)
        if "_stoker_collate_ns" not in self.__dict__:
            self._stoker_stages = stages
            self._stoker_collate_fn = self.collate_fn
            self.collate_fn = _timed(self, self.collate_fn)
            self._stoker_tasks = 0
        self._stoker_collate_ns = 0
        self._stoker_tasks += 1
        worker = info.id if info is not None else None
        account = stages.inside(worker, self.dataset, self._stoker_collate_fn)
        cpu = time.thread_time_ns()
        began = account.begin()
        try:
            return original(self, index)
        finally:
            all_ns = int((account.end() - began) * 1e9)
            # The clock of a thread's CPU is a system call: of short tasks one in so many stands for the others.
            weight = 1 if all_ns > SHORT_NS else 0 if self._stoker_tasks % ONE_IN else ONE_IN
            spent = (time.thread_time_ns() - cpu) * weight if weight else 0
            collate = self._stoker_collate_ns
            stages.add(worker, all_ns - collate, collate, spent)

    cls.fetch = fetch


def gathered(gather: Any, stages: Stages) -> Callable[[Any], Any]:
    """Times stoker's ``Gather`` inline. What it leaves to torch's fetcher is timed there."""

    def fetch(index: Any) -> Any:
        before, began, cpu = gather.gathered, time.perf_counter_ns(), time.thread_time_ns()
        batch = gather(index)
        if gather.gathered > before:
            stages.add(None, time.perf_counter_ns() - began, 0, time.thread_time_ns() - cpu)
        return batch

    return fetch


def _timed(fetcher: Any, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def timed(data: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return collate(data)
        finally:
            fetcher._stoker_collate_ns = time.perf_counter_ns() - began

    return timed
