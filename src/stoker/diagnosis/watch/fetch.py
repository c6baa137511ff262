"""The part of the watch that is inside workers, and inside a loop without them: times and looks at each task."""

from __future__ import annotations

import functools
import os
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import _utils as torch_utils

from ...core.patches import Patches
from ...workers.fetcher import BatchFetcher
from .shared_counters import Stages

SHORT_S = 1e-3
ONE_IN = 16

_ns = time.perf_counter_ns
_cpu_ns = time.thread_time_ns
_now = time.monotonic
_cpu = time.thread_time
_pid = os.getpid


def attach(patches: Patches) -> None:
    """Times torch's own fetchers, in its workers and inline. stoker's workers report for themselves."""
    fetch_module = torch_utils.fetch
    for cls in (fetch_module._MapDatasetFetcher, fetch_module._IterableDatasetFetcher):
        patches.put(cls, "fetch", _watched)
    patches.put(BatchFetcher, "run", _watched_stages)


def _watched_stages(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """stoker's own workers send their times themselves; this is for what is behind the sums."""

    @functools.wraps(run)
    def watched(self: Any, indices: Any) -> Any:
        stages = Stages.current
        info = torch.utils.data.get_worker_info()
        if stages is None or info is None or threading.current_thread() is not threading.main_thread():
            return run(self, indices)
        account = stages.inside(info.id, info.dataset, self._collate.fn)
        began = account.looks.began = _now()
        try:
            return run(self, indices)
        finally:
            account.looks.began = 0.0
            account.done([_now() - began])

    return watched


class _Fetching:
    """A fetcher's place in its loader's numbers. Of short tasks only the time is noted, and one in ``ONE_IN`` looked
    into, which stands for the others.

    Attributes:
        short: tasks are.
        took: seconds of tasks that are not accounted for yet.
    """

    __slots__ = (
        "account",
        "collate",
        "collate_s",
        "looks",
        "original",
        "pid",
        "short",
        "stages",
        "tasks",
        "took",
        "within",
        "worker",
    )

    def __init__(self, fetcher: Any, stages: Stages, original: Callable[..., Any]) -> None:
        self.original = original
        own = getattr(fetcher.collate_fn, "__self__", None)  # another process' one, before a fork
        self.collate: Callable[[Any], Any] = own.collate if isinstance(own, _Fetching) else fetcher.collate_fn
        info = torch.utils.data.get_worker_info()
        self.worker = info.id if info is not None else None
        self.stages, self.pid = stages, os.getpid()
        self.account = stages.inside(self.worker, fetcher.dataset, self.collate)
        self.looks = self.account.looks
        self.tasks, self.collate_s, self.short, self.within = 0, 0.0, False, False
        self.took: list[float] = []
        fetcher.collate_fn = self.collated
        if self.worker is None:
            if stages.held is not None:
                stages.held()
            stages.held = self.hand_over

    def collated(self, data: Any) -> Any:
        if not self.within:
            return self.collate(data)
        began = _now()
        try:
            return self.collate(data)
        finally:
            self.collate_s = _now() - began

    def rest(self, fetcher: Any) -> None:
        """Until ``wake`` the fetcher is torch's own again. What it takes meanwhile somebody else adds to ``took``."""
        fetcher.fetch = types.MethodType(self.original, fetcher)
        fetcher.collate_fn = self.collate

    def wake(self, fetcher: Any) -> None:
        """The next task is looked into."""
        fetcher.__dict__.pop("fetch", None)
        fetcher.collate_fn = self.collated
        self.tasks = -1

    def into(self, fetch: Callable[[], Any]) -> Any:
        """One task, and what it spends where."""
        self.within, self.collate_s = True, 0.0
        cpu = _cpu()
        began = self.looks.began = _now()
        try:
            return fetch()
        finally:
            took = _now() - began
            self.looks.began = 0.0
            self.within = False
            self.took.append(took)
            self.short = took < SHORT_S and (self.short or self.tasks >= ONE_IN)
            self.hand_over(_cpu() - cpu, took)

    def hand_over(self, cpu: float = 0.0, took: float = 0.0) -> None:
        """Adds what is noted to the loader's numbers.

        Args:
            cpu, took: seconds of CPU and of time of the task that was looked into; others are taken to be like it.
        """
        if not self.took or self.pid != os.getpid():
            return
        all_s, tasks = sum(self.took), len(self.took)
        like = all_s / took if took else 0.0
        collate = min(all_s, self.collate_s * like)
        fetch_ns, collate_ns, cpu_ns = (int(s * 1e9) for s in (all_s - collate, collate, cpu * like))
        self.stages.add(self.worker, fetch_ns, collate_ns, cpu_ns, tasks)
        self.account.done(self.took)


def _watched(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    def fetch(self: Any, index: Any) -> Any:
        fetching = self.__dict__.get("_stoker_fetching")
        if fetching is None or fetching.pid != _pid():
            stages = self.__dict__.get("_stoker_stages") or Stages.current
            if stages is None:
                return original(self, index)
            fetching = self._stoker_fetching = _Fetching(self, stages, original)
        fetching.tasks += 1
        if not fetching.short or not fetching.tasks % ONE_IN:
            return fetching.into(lambda: original(self, index))
        began = fetching.looks.began = _now()
        try:
            return original(self, index)
        finally:
            fetching.looks.began = 0.0
            took = _now() - began
            fetching.took.append(took)
            if took > SHORT_S:
                fetching.short = False

    return fetch


def gathered(gather: Any, stages: Stages) -> Callable[[Any], Any]:
    """Times stoker's ``RowGather`` inline. What it leaves to torch's fetcher is timed there."""

    def fetch(index: Any) -> Any:
        before, began, cpu = gather.gathered, _ns(), _cpu_ns()
        batch = gather(index)
        if gather.gathered > before:
            stages.add(None, _ns() - began, 0, _cpu_ns() - cpu, 1)
        return batch

    return fetch
