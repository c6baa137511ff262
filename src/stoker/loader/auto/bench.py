"""An empty loop over warm workers: what a setting delivers, without a model in the loop and without a restart.

Tasks go to workers and batches leave as the scheduler has it for torch's seeds (task *i* to worker *i* mod n, in
order, n x prefetch in flight), so a slow sample holds up here what it would hold up there. Workers that a setting does
not use stay idle; those it has in addition are started once. Nothing of the loader's own is touched: not its sampler,
not its generator, not the process' random state.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _DatasetKind

from ...core.errors import UsageError, WorkerDiedError
from ...core.options import Budget
from ...sampling.order import Task
from ...workers.faults import validate
from ...workers.process_pool import ProcessPool
from ...workers.protocol import WorkerSpec
from ...workers.rng_watch import GlobalRngUse
from ...workers.thread_pool import ThreadPool
from .tasks import SEED, Tasks

AGAIN = 6  # times that a window is measured, at most, because new memory came in between
LONG = 3  # windows of so many times the length asked for need not have all the batches asked for


class TooSlow(UsageError):
    """No batch came in the time that was left."""


class BadSample(UsageError):
    """A sample cannot be loaded."""


@dataclass(frozen=True)
class Window:
    """One measurement.

    Attributes:
        rate: batches per second.
        batches: how many came.
        work_s: wall seconds that a worker spends on a batch.
        cpu_s: CPU seconds of that.
        make_s: wall seconds of that without the transport.
        own_s: CPU seconds that this process spends on a batch.
        nbytes: the largest batch, as it crosses.
        stored: bytes read from storage, not from the page cache, during the window; 0 where nobody knows.
        read: bytes read in all.
        who: what drew from process-wide random generators, in threads.
    """

    rate: float
    batches: int
    work_s: float
    cpu_s: float
    own_s: float
    make_s: float = 0.0
    nbytes: int = 0
    stored: int = 0
    read: int = 0
    who: str | None = None


class Bench(Protocol):
    """Workers of one kind, or none."""

    def window(self, n: int, prefetch: int, seconds: float, least: int) -> Window:
        """Measures, after a warm-up, for ``seconds`` and at least ``least`` batches a worker."""

    def rest(self) -> None:
        """Lets the workers finish what they have in hand; they cost nothing until the next window."""

    def pss(self) -> int:
        """Bytes of memory of the largest worker; 0 where that is unknown."""

    def close(self) -> None:
        """Ends the workers."""


def spec_of(loader: Any, num_workers: int) -> WorkerSpec:
    """What workers are told."""
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
        restart=True,  # nobody takes its place, but a death is told by its sentinel: torch's handler raises anywhere
    )


class PoolBench:
    """Worker processes or threads of this process.

    Args:
        loader: whose dataset and collate function to run.
        tasks: which indices.
        method: "process" or "thread".
        budget: of the transport.
        deadline: ``time.monotonic()`` at which the measuring has to be over.
    """

    def __init__(self, loader: Any, tasks: Tasks, method: str, budget: Budget, deadline: float) -> None:
        self._loader, self._tasks, self._method, self._budget = loader, tasks, method, budget
        self.deadline = deadline
        self._streams = loader._dataset_kind == _DatasetKind.Iterable
        self._pool: ProcessPool | ThreadPool | None = None
        self._noticed = GlobalRngUse()
        self._noticed.reported = True  # whoever asked for the measurement says it
        self._workers = self._number = self._at = 0
        self._order: deque[tuple[int, int]] = deque()  # task and its worker, oldest first
        self._came: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._paused = 0.0
        self._warm_ones: set[int] = set()  # workers who have made a batch
        self._setting = 0, 0  # of the last window
        self._sums = [0] * 5  # tasks, wall ns, CPU ns, ns without transport, largest batch
        self._asked: dict[int, Any] = {}

    def _start(self, n: int) -> None:
        self.close()
        spec = spec_of(self._loader, n)
        if self._method == "thread":
            self._pool = ThreadPool(spec, self._budget, self._noticed, [])
        else:
            context = self._loader.multiprocessing_context or torch.multiprocessing
            self._pool = ProcessPool(spec, context, self._budget, [])
        self._workers = n

    def _prepare(self, n: int) -> None:
        """At least ``n`` workers; an iterable dataset's know how many they are, so exactly ``n``, and new ones."""
        if self._pool is None or (self._streams and (n != self._workers or len(self._ended) == n)):
            if len(self._ended) == n and not self._warm_ones:
                raise UsageError(f"{type(self._loader.dataset).__name__} is empty: it ended before its first batch")
            began = time.monotonic()
            self._start(n)
            self._paused += time.monotonic() - began
        assert self._pool is not None
        while self._workers < n:
            self._pool.grow()
            self._workers += 1

    def window(self, n: int, prefetch: int, seconds: float, least: int) -> Window:
        self._prepare(n)
        assert self._pool is not None
        self._settle(n, prefetch)
        for _ in range(AGAIN):
            slots = self._pool.slots()
            w = self._window(n, prefetch, seconds, least)
            if self._pool.slots() == slots or time.monotonic() > self.deadline:
                break  # else the kernel was measured, which hands out memory once only
        return w

    def _settle(self, n: int, prefetch: int) -> None:
        """Until what another setting left in flight is delivered, for batches that wait for their turn would come in a
        burst, and each worker has made a batch."""
        old = 0 if self._setting == (n, prefetch) else len(self._order) + n
        self._setting = n, prefetch
        while old > 0 or (len(self._warm_ones) < n and not self._ended):
            self._one(n, prefetch)
            old -= 1

    def _window(self, n: int, prefetch: int, seconds: float, least: int) -> Window:
        waited = self._arrived()
        self._sums, self._paused = [0] * 5, 0.0
        io, own = self._io(), time.thread_time()
        began, count = time.monotonic(), 0
        while True:
            self._one(n, prefetch)
            count += 1
            took = time.monotonic() - began - self._paused
            enough = least * n if took < LONG * seconds and time.monotonic() < self.deadline else n
            # Whole turns: workers that are in step deliver in bursts, and a part of one is up to n - 1 batches amiss.
            if took >= seconds and count >= enough and count % n == 0:
                break
        own = time.thread_time() - own
        made = max(1, count + self._arrived() - waited)
        done, wall, cpu, making, nbytes = self._sums
        now = self._io()
        each = max(1, done) * 1e9
        return Window(
            made / took if took > 0 else 0.0,
            count,
            wall / each,
            cpu / each,
            own / count,
            making / each,
            nbytes,
            now[0] - io[0],
            now[1] - io[1],
            self._noticed.who,
        )

    def _arrived(self) -> int:
        """Batches that are made and wait for their turn: many behind a slow one, which would come in a burst. What
        counts is how many are made."""
        while not self._streams and (result := self._result(0.0, None)) is not None:
            self._note(result)
        return len(self._came)

    def first(self, n: int) -> None:
        """Starts ``n`` workers and waits for the first batch."""
        self._prepare(n)
        self._one(n, 1)

    def _one(self, n: int, prefetch: int) -> None:
        """Keeps the window full, and takes the next batch in order."""
        assert self._pool is not None
        while len(self._order) < n * prefetch:
            self._submit(n)
        task, worker = self._order[0]
        while task not in self._came:
            if not self._receive(worker):
                if not self._order:  # every stream has ended: the next epoch begins
                    self._prepare(n)
                    while len(self._order) < n * prefetch:
                        self._submit(n)
                task, worker = self._order[0]
        self._order.popleft()
        indices = self._asked.pop(task, None)
        data = self._came.pop(task).take()
        if isinstance(data, ExceptionWrapper):
            self._asked = {task: indices}
            raise BadSample(data.exc_msg)
        self._warm_ones.add(worker)

    def _submit(self, n: int) -> None:
        assert self._pool is not None
        if len(self._ended) == n:
            return
        while self._at % n in self._ended:
            self._at += 1
        worker = self._at % n
        self._at += 1
        indices = self._tasks()
        self._pool.submit(worker, 0, Task(self._number, indices))
        self._asked[self._number] = indices
        self._order.append((self._number, worker))
        self._number += 1

    def _receive(self, worker: int) -> bool:
        """One result. False when a stream ended, so that the oldest task may be another."""
        left = max(0.001, self.deadline - time.monotonic()) + 1.0
        result = self._result(left, worker if self._method == "process" else None)
        if result is None:
            raise TooSlow(f"no batch came in {left:.0f} s")
        if result.ended:
            self._ended.add(result.worker)
            self._order = deque(o for o in self._order if o[1] != result.worker or o[0] in self._came)
            return False
        self._note(result)
        return True

    def _result(self, timeout: float, worker: int | None) -> Any:
        assert self._pool is not None
        try:
            return self._pool.receive(timeout, worker)
        except WorkerDiedError as e:
            raise BadSample(f"a worker died of it: {e}") from e

    def _note(self, result: Any) -> None:
        fetch, collate, transport, cpu = result.times
        self._sums[0] += 1
        self._sums[1] += fetch + collate + transport
        self._sums[2] += cpu
        self._sums[3] += fetch + collate
        self._sums[4] = max(self._sums[4], result.nbytes)
        self._came[result.task] = result

    def _io(self) -> tuple[int, int]:
        stored = read = 0
        if isinstance(self._pool, ProcessPool):
            for p in self._pool.processes:
                try:
                    text = Path(f"/proc/{p.pid}/io").read_text()
                except OSError:
                    continue
                fields = dict(line.split(": ") for line in text.splitlines())
                stored += int(fields.get("read_bytes", 0))
                read += int(fields.get("rchar", 0))
        return stored, read

    def culprit(self) -> Any:
        """After ``BadSample``: the index that cannot be loaded, found by asking for the task's one by one."""
        for indices in list(self._asked.values())[:1]:
            for index in indices if isinstance(indices, (list, tuple)) else ():
                try:
                    self._start(1)
                    assert self._pool is not None
                    self._pool.submit(0, 0, Task(0, [index]))
                    result = self._pool.receive(5.0, None)
                    if result is not None and isinstance(result.take(), ExceptionWrapper):
                        return index
                except WorkerDiedError:
                    return index
        return None

    def rest(self) -> None:
        self._setting = 0, 0
        while self._order:
            task, worker = self._order[0]
            if task in self._came:
                self._order.popleft()
                self._came.pop(task).drop()
            else:
                self._receive(worker)

    def pss(self) -> int:
        return max(self._pool.pss().values(), default=0) if self._pool is not None else 0

    def close(self) -> None:
        pool, self._pool = self._pool, None
        self._order.clear()
        self._came.clear()
        self._ended.clear()
        self._warm_ones.clear()
        self._asked.clear()
        self._workers = self._at = 0
        if pool is not None:
            pool.close(leave_s=0.0)
