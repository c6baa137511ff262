"""Threads, and no workers at all, measured in a throw-away process."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from ...core.options import Budget
from ...core.processes import starts_processes
from ...transport.slots import own_fork
from ...workers.gather import RowGather
from ...workers.process_main import die_with_parent
from .bench import BadSample, PoolBench, TooSlow, Window
from .tasks import Tasks


class InlineBench:
    """No workers: fetch and collate, one batch after the other, in this process."""

    def __init__(self, loader: Any, tasks: Tasks, deadline: float) -> None:
        self._loader, self._tasks, self.deadline = loader, tasks, deadline
        self._fetch: Callable[[Any], Any] | None = None

    def _begin(self) -> Callable[[Any], Any]:
        loader = self._loader
        fetch = _DatasetKind.create_fetcher(
            loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
        ).fetch
        if RowGather.fits(loader.dataset, loader.collate_fn, loader._auto_collation):
            return RowGather(loader.dataset, fetch)
        return fetch  # type: ignore[no-any-return]

    def window(self, n: int, prefetch: int, seconds: float, least: int) -> Window:
        self._one()
        began, own, count = time.monotonic(), time.thread_time(), 0
        while True:
            self._one()
            count += 1
            took = time.monotonic() - began
            if (took >= seconds and count >= least) or time.monotonic() >= self.deadline:
                break
        cpu = (time.thread_time() - own) / count
        return Window(count / took, count, took / count, cpu, cpu, took / count)

    def _one(self) -> None:
        self._fetch = self._fetch or self._begin()
        try:
            self._fetch(self._tasks())
        except StopIteration:
            self._fetch = None

    def rest(self) -> None: ...

    def pss(self) -> int:
        return 0

    def close(self) -> None: ...


class Remote:
    """A bench in a throw-away process: threads, and no workers at all, would open here what a dataset opens when it is
    first used, and forked workers would then share it.

    Args:
        loader, tasks, budget, deadline: as for ``PoolBench``.
        method: "thread" or "inline".
    """

    def __init__(self, loader: Any, tasks: Tasks, method: str, budget: Budget, deadline: float) -> None:
        context = loader.multiprocessing_context
        if context is None or not starts_processes(context):  # what runs here is not for a thread of the script's
            context = torch.multiprocessing
        self.deadline = deadline
        self._here, there = context.Pipe()
        self._child = context.Process(
            target=_serve, args=(_bare(loader), tasks, method, budget, deadline - time.monotonic(), there), daemon=True
        )
        with own_fork():
            self._child.start()
        there.close()
        self._busy = False

    def window(self, n: int, prefetch: int, seconds: float, least: int) -> Window:
        left = max(0.0, self.deadline - time.monotonic())
        self._busy = True
        try:
            self._here.send((n, prefetch, seconds, least, left))
            if not self._here.poll(left + 2.0):
                raise TooSlow(f"no measurement came in {left:.0f} s")
            answer = self._here.recv()
        except (EOFError, OSError):
            raise BadSample("the process that measured it died") from None
        if isinstance(answer, str):
            raise BadSample(answer)
        return answer  # type: ignore[no-any-return]

    def rest(self) -> None:
        if self._busy:
            self._busy = False
            with contextlib.suppress(EOFError, OSError):  # the next window says that it died
                self._here.send(None)
                if self._here.poll(max(0.0, self.deadline - time.monotonic()) + 2.0):
                    self._here.recv()

    def pss(self) -> int:
        return 0

    def close(self) -> None:
        self._here.close()
        self._child.kill()
        self._child.join()


def _serve(loader: Any, tasks: Tasks, method: str, budget: Budget, left: float, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and ends this
    die_with_parent(0)
    torch.set_num_threads(1)
    deadline = time.monotonic() + left
    bench: PoolBench | InlineBench
    if method == "thread":
        bench = PoolBench(loader, tasks, "thread", budget, deadline)
    else:
        bench = InlineBench(loader, tasks, deadline)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if asked is None:
            bench.rest()
            pipe.send(None)
            continue
        n, prefetch, seconds, least, left = asked
        bench.deadline = time.monotonic() + left
        try:
            pipe.send(replace(bench.window(n, prefetch, seconds, least), nbytes=0))
        except Exception as e:
            pipe.send(str(e).strip().splitlines()[-1] if str(e).strip() else type(e).__name__)


class _bare:
    """What a bench needs of a loader, without what cannot be pickled for a process that is spawned."""

    def __init__(self, loader: Any) -> None:
        for name in ("dataset", "collate_fn", "drop_last", "worker_init_fn", "batch_size"):
            setattr(self, name, getattr(loader, name))
        self._dataset_kind, self._auto_collation = loader._dataset_kind, loader._auto_collation
        self.multiprocessing_context = None
