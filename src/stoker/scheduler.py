"""Tasks in flight, credits and order: which worker gets which task, and which result is delivered next.

The rules are torch's, because they can be seen: with ``in_order`` task *i* goes to worker *i* mod N (which fixes the
random state of every sample), a new index is drawn from the sampler each time a result is delivered and before an
error in it is raised, and a worker whose iterable dataset is exhausted is passed over from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import WorkerDiedError, WorkerTimeoutError
from .metrics import LoaderMetrics
from .options import Knobs
from .source import Task
from .workers.protocol import Pool, Result

NextIndices = Callable[[], Any]


class Scheduler:
    """One epoch after another over one pool.

    Args:
        pool: the workers.
        knobs: count, window, order, timeout.
        metrics: where the cost of each task is added up.
    """

    def __init__(self, pool: Pool, knobs: Knobs, metrics: LoaderMetrics) -> None:
        self._pool, self._knobs, self._metrics = pool, knobs, metrics
        self.epoch = -1
        self._next_indices: NextIndices = iter(()).__next__
        self._sent = 0
        self._due = 0
        self._owner: dict[int, int] = {}
        self._waiting: dict[int, Result] = {}
        self._active: list[bool] = []
        self._load: list[int] = []
        self._turn = 0
        self._stopped = False

    def stop(self) -> None:
        """The pool is about to be closed; nothing can be asked for any more."""
        self._stopped = True

    def begin(self, next_indices: NextIndices, shared_seed: int | None = None) -> None:
        """Starts an epoch and fills the window. Tasks of an epoch that was left early are run but not delivered,
        for they move the workers' random state, as they do in torch."""
        self.epoch += 1
        if self.epoch:
            for result in self._waiting.values():
                result.drop()
            self._pool.resume(self.epoch, shared_seed)
        n = self._knobs.num_workers
        self._next_indices = next_indices
        self._sent = self._due = self._turn = 0
        self._owner, self._waiting = {}, {}
        self._active, self._load = [True] * n, [0] * n
        for _ in range(self._knobs.window):
            self._submit()

    def next(self) -> Any:
        """The next batch, or the ``ExceptionWrapper`` that came in its place.

        Raises:
            StopIteration: the epoch is over.
            WorkerDiedError: a worker is gone; its tasks are lost, the others go on.
            WorkerTimeoutError: nothing came within ``timeout``.
        """
        while True:
            if not self._find_due():
                raise StopIteration
            result = self._waiting.pop(self._due, None)
            if result is None:
                if self._stopped:
                    raise AssertionError("the workers of this iterator have been shut down")
                result = self._receive()
                if result is None:
                    continue
                if result.task != self._due and self._knobs.in_order:
                    self._waiting[result.task] = result
                    continue
            return self._deliver(result)

    def _find_due(self) -> bool:
        """Moves ``_due`` to the next task that can still come. Returns False when there is none."""
        while self._due < self._sent:
            worker = self._owner.get(self._due)
            if worker is not None:
                if self._due in self._waiting or self._active[worker]:
                    return True
                del self._owner[self._due]  # lost with its worker
            self._due += 1
        return False

    def _receive(self) -> Result | None:
        """A result of this epoch; None when it brought no batch."""
        timeout = self._knobs.timeout
        try:
            due = self._owner[self._due] if self._knobs.in_order else None
            result = self._pool.receive(timeout if timeout > 0 else None, due)
        except WorkerDiedError as e:
            for worker in e.workers:
                self._active[worker] = False
            raise
        if result is None:
            raise WorkerTimeoutError(f"DataLoader timed out after {timeout} seconds")
        self._metrics.task(result.times)
        if result.epoch != self.epoch:
            result.drop()
            return None
        if result.ended:
            self._active[result.worker] = False
            if not self._knobs.persistent:
                self._pool.retire(result.worker)
            self._submit()
            return None
        return result

    def _deliver(self, result: Result) -> Any:
        self._owner.pop(result.task, None)
        if result.task == self._due:
            self._due += 1
        self._load[result.worker] -= 1
        self._submit()
        return result.take()

    def _submit(self) -> None:
        """Draws one index and gives it to the worker whose turn it is; with no worker left it is lost, as in torch."""
        try:
            indices = self._next_indices()
        except StopIteration:
            if not self._knobs.persistent:
                self._pool.finish()  # the workers' end, a few milliseconds, falls into the last batches
            return
        n = self._knobs.num_workers
        in_order = self._knobs.in_order
        share = 0 if in_order else self._knobs.window // max(1, sum(self._active))
        for _ in range(n):
            worker, self._turn = self._turn, (self._turn + 1) % n
            if self._active[worker] and (in_order or self._load[worker] < share):
                break
        else:
            return
        self._pool.submit(worker, self.epoch, Task(self._sent, indices))
        self._owner[self._sent] = worker
        self._load[worker] += 1
        self._sent += 1
