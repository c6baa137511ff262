"""Threads, and no workers at all, measured in a child process.

A dataset may open a file when it is first used. In the script's own process that would be shared by all workers that
are forked later.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch.utils.data.dataloader import _DatasetKind

from ...core.options import Budget
from ...core.processes import starts_processes
from ...core.types import Batch, Index, LoaderLike
from ...transport.slots import own_fork
from ...workers.gather import RowGather
from ...workers.process_main import die_with_parent
from .bench import BadSample, Bench, PoolBench, TooSlow, Window
from .tasks import Tasks

GRACE_S = 2.0  # for the child to answer when its time is over


class InlineBench(Bench):
    """No workers: fetch and collate, one batch after the other, in this process."""

    _fetch: Callable[[Index], Batch] | None = None

    def prepare(self, n: int, prefetch: int) -> None:
        self.next()

    def next(self) -> None:
        self._fetch = self._fetch or self._make_fetch()
        try:
            self._fetch(self.tasks())
        except StopIteration:
            self._fetch = None

    def _make_fetch(self) -> Callable[[Index], Batch]:
        of = self.loader
        fetch: Callable[[Index], Batch] = _DatasetKind.create_fetcher(
            of._dataset_kind, of.dataset, of._auto_collation, of.collate_fn, of.drop_last
        ).fetch
        if RowGather.fits(of.dataset, of.collate_fn, of._auto_collation):
            return RowGather(of.dataset, fetch)
        return fetch


class Remote(Bench):
    """A bench in a child process, which ends with it.

    Args:
        method: "thread" or "inline".
        budget: memory of the transport.
    """

    def __init__(self, loader: LoaderLike, tasks: Tasks, method: str, budget: Budget, deadline: float) -> None:
        super().__init__(loader, tasks, deadline)
        context = loader.multiprocessing_context
        if context is None or not starts_processes(context):
            context = torch.multiprocessing
        self._connection, other_end = context.Pipe()
        left = deadline - time.monotonic()
        self._child = context.Process(
            target=_serve, args=(_Settings(loader), tasks, method, budget, left, other_end), daemon=True
        )
        with own_fork():
            self._child.start()
        other_end.close()
        self._is_busy = False

    def window(self, n: int, prefetch: int, seconds: float, least: int) -> Window:
        left = max(0.0, self.deadline - time.monotonic())
        self._is_busy = True
        try:
            self._connection.send((n, prefetch, seconds, least, left))
            if not self._connection.poll(left + GRACE_S):
                raise TooSlow(f"no measurement came in {left:.0f} s")
            found: Window | str = self._connection.recv()
        except (EOFError, OSError):
            raise BadSample("the process that measured it died") from None
        if isinstance(found, str):
            raise BadSample(found)
        return found

    def rest(self) -> None:
        if self._is_busy:
            self._is_busy = False
            with contextlib.suppress(EOFError, OSError):  # if the child died, the next window raises
                self._connection.send(None)
                if self._connection.poll(max(0.0, self.deadline - time.monotonic()) + GRACE_S):
                    self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._child.kill()
        self._child.join()


def _serve(loader: LoaderLike, tasks: Tasks, method: str, budget: Budget, left: float, connection: Connection) -> None:
    """What the child runs: answers each request with a ``Window``, or with the words of an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends this process
    die_with_parent(0)
    torch.set_num_threads(1)
    deadline = time.monotonic() + left
    bench: Bench
    if method == "thread":
        bench = PoolBench(loader, tasks, "thread", budget, deadline)
    else:
        bench = InlineBench(loader, tasks, deadline)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            bench.rest()
            connection.send(None)
            continue
        n, prefetch, seconds, least, left = request
        bench.deadline = time.monotonic() + left
        try:
            connection.send(bench.window(n, prefetch, seconds, least)._replace(nbytes=0))
        except Exception as e:
            connection.send(str(e).strip().splitlines()[-1] if str(e).strip() else type(e).__name__)


class _Settings:
    """What a bench reads of a loader, without the attributes that cannot be pickled."""

    def __init__(self, loader: LoaderLike) -> None:
        for name in ("dataset", "collate_fn", "drop_last", "worker_init_fn", "batch_size"):
            setattr(self, name, getattr(loader, name))
        self._dataset_kind, self._auto_collation = loader._dataset_kind, loader._auto_collation
        self.multiprocessing_context = None
