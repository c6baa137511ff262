"""Tasks in flight, credits and order: which worker gets which task, and which result is delivered next.

With torch's seeds the rules are torch's, because they can be seen: with ``in_order`` task *i* goes to worker *i* mod N
(which fixes the random state of every sample), a new index is drawn from the sampler each time a result is delivered
and before an error in it is raised, and a worker whose iterable dataset is exhausted is passed over from then on.

With task seeds nobody can tell who ran a task: any free worker takes the next one, and workers come and go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.errors import BudgetError, UsageError, WorkerDiedError, WorkerTimeoutError
from ..core.metrics import LoaderMetrics
from ..core.options import Budget, Knobs
from ..sampling.order import Task
from ..workers.protocol import Lost, Made, Pool, Result

if TYPE_CHECKING:
    from ..sampling.cursor import Cursor
    from ..workers.restart import Restarts

AHEAD_SHARE = 16  # part of the bytes in flight that is for what is made ahead only because some samples are slow
NextIndices = Callable[[], Any]


class _NotYet(Exception):
    """Nothing has come."""


class Scheduler:
    """One epoch after another over one pool.

    Prefetch is a count of credits: drawing a task spends one, delivering a batch gives one back, and ``resize`` adds or
    takes some at any moment. Credits are not spent while the batches in flight fill their share of the budget.

    Args:
        pool: the workers.
        knobs: count, window, order, timeout.
        metrics: where the cost of each task is added up.
        budget: bytes that may be in flight.
        restarts: who replaces workers that die; None: a death is an error, as in torch.
        make: makes the batch of a task, by number and indices, in this process; None: workers make all.

    Attributes:
        worker: whose batch was delivered last.
        tuner: called at each delivery with the nanoseconds waited so far; returns a knob and its new value, or None.
    """

    def __init__(
        self,
        pool: Pool,
        knobs: Knobs,
        metrics: LoaderMetrics,
        budget: Budget,
        restarts: Restarts | None = None,
        make: Callable[[int, Any], Any] | None = None,
    ) -> None:
        self._restarts, self._make = restarts, make
        self._here = False  # tasks are kept for this process
        self._own: set[int] = set()  # tasks that were
        self._pool, self._knobs, self._metrics, self._budget = pool, knobs, metrics, budget
        self.epoch = -1
        self._next_indices: NextIndices = iter(()).__next__
        self._sent = 0
        self._due = 0
        self._credits = 0
        self._owner: dict[int, int] = {}
        self._asked: dict[int, Any] = {}  # indices of the tasks that are out, where workers share them
        self._waiting: dict[int, Result] = {}
        self._active: list[bool] = []
        self._load: list[int] = []
        self._turn = 0
        self._flying = 0
        self._exhausted = False
        self._stopped = False
        self._waited_ns = 0
        self._trouble: Exception | None = None  # what came while nobody asked for a batch
        self._cursor: Cursor | None = None
        self._counted = False  # what each worker delivered
        self._skip: set[int] = set()
        self._lock = threading.Lock()  # a resize may come from any thread, or in the middle of ``next`` from a signal
        self._wish: int | None = None  # a count that was asked for while the lock was held
        self._resizing = 0  # the thread that changes the count
        self.tuner: Callable[[int], tuple[str, int] | None] | None = None
        self.worker = 0

    @property
    def num_workers(self) -> int:
        """Workers there are to be."""
        return 0 if self._here else self._knobs.num_workers

    @property
    def shared(self) -> bool:
        """Whether any free worker takes the next task, so that their number may change."""
        return self._knobs.shared

    @property
    def ending(self) -> bool:
        """All tasks of the epoch are given out."""
        return self._exhausted and not self._stopped

    @property
    def stopped(self) -> bool:
        """There will be no more epoch."""
        return self._stopped

    def stop(self) -> None:
        """The pool is about to be closed; nothing can be asked for any more."""
        self._stopped = True
        if self._resizing not in (0, threading.get_ident()):
            with self._lock:  # a worker that is being started would be closed by nobody
                pass

    def begin(self, next_indices: NextIndices, shared_seed: int | None = None, cursor: Cursor | None = None) -> None:
        """Starts an epoch and fills the window. Tasks of an epoch that was left early are run but not delivered where
        workers are seeded as torch's, for they move the workers' random state, as they do in torch.

        Args:
            next_indices: draws the indices of the next task.
            shared_seed: torch's, for datapipes.
            cursor: where to begin, and where to write down what was delivered.
        """
        with self._lock:
            self._begin(next_indices, shared_seed, cursor)

    def _begin(self, next_indices: NextIndices, shared_seed: int | None, cursor: Cursor | None) -> None:
        self.epoch += 1
        if self.epoch:
            for result in self._waiting.values():
                result.drop()
            self._pool.resume(self.epoch, shared_seed)
        n = self._knobs.num_workers
        self._next_indices = next_indices
        self._sent = self._due = self._turn = self._flying = 0
        self._cursor = cursor
        if cursor is not None:
            self._sent = self._due = cursor.next
            self._skip = set(cursor.ahead)
            self._counted = bool(cursor.counts)
            self._turn = (cursor.turn if self._counted else cursor.next) % n
        self._owner, self._asked, self._waiting, self._own = {}, {}, {}, set()
        self._trouble = None
        self._active, self._load = [True] * n, [0] * n
        self._exhausted = False
        self._credits = self._window
        self._fill()

    @property
    def _window(self) -> int:
        return 1 if self._here else self._knobs.window

    def here(self, leave: bool) -> None:
        """The next tasks are kept for this process; those that workers have still come from there.

        Args:
            leave: workers are not needed any more. There is nothing in flight then.
        """
        before, self._here = self._window, True
        self._credits += self._window - before
        if leave:
            self._pool.resize(0)

    def resize(self, n: int) -> None:
        """Another number of workers, from the next task on. Which batches come, and in which order, stays.

        Any thread may ask, and a signal's handler. While the consumer is in ``next`` it holds once that delivers.

        Raises:
            UsageError: workers are seeded as torch's, or share an iterable dataset: they depend on the count.
        """
        if not self._knobs.shared:
            raise UsageError(
                "the number of workers cannot change within an epoch: each has random state, or a part of the dataset, "
                'of its own; num_workers="auto" with a map-style dataset has neither'
            )
        self._wish = n
        if not self._lock.acquire(blocking=False):
            return
        self._resizing = threading.get_ident()
        try:
            self._grant()
        finally:
            self._resizing = 0
            self._lock.release()

    def _grant(self) -> None:
        """Carries out the last wish."""
        n, self._wish = self._wish, None
        if n is not None:
            self._resize(n)

    def _resize(self, n: int) -> None:
        before, self._knobs, self._here = self._window, replace(self._knobs, num_workers=n), False
        if self._stopped:
            return
        self._pool.resize(n)
        self._credits += self._window - before
        self._fill()

    def prefetch(self, factor: int, ahead: int | None = None) -> None:
        """Another number of tasks in flight for each worker, from the next task on. See ``Knobs``."""
        with self._lock:
            far = self._knobs.ahead if ahead is None else ahead
            before, self._knobs = self._window, replace(self._knobs, prefetch_factor=factor, ahead=far)
            self._credits += self._window - before
            self._fill()

    def next(self) -> Any:
        """The next batch, or the ``ExceptionWrapper`` that came in its place.

        Raises:
            StopIteration: the epoch is over.
            WorkerDiedError: a worker is gone; its tasks are lost, the others go on.
            WorkerTimeoutError: nothing came within ``timeout``.
            BudgetError: a batch is larger than a budget that was asked for.
        """
        with self._lock:
            return self._next()

    def _next(self) -> Any:
        while True:
            if self._trouble is not None:
                trouble, self._trouble = self._trouble, None
                raise trouble
            if not self._find_due():
                if self._cursor is not None:
                    self._cursor.end(self._due)
                raise StopIteration
            task = self._arrived()
            result = None if task is None else self._waiting.pop(task)
            if result is None:
                if self._stopped:
                    raise AssertionError("the workers of this iterator have been shut down")
                result = self._made() if self._due in self._own else self._receive()
                if result is None:
                    continue
                if result.task != self._due and self._knobs.in_order:
                    self._waiting[result.task] = result
                    continue
            return self._deliver(result)

    def _made(self) -> Result | None:
        """The task that is due, done in this process. What it raises is left to a worker, whose error says where."""
        assert self._make is not None
        number = self._due
        indices, began, cpu = self._asked[number], time.perf_counter_ns(), time.thread_time_ns()
        try:
            data = self._make(number, indices)
        except Exception:
            self._own.discard(number)
            self._make = None
            self._resize(self._knobs.num_workers)
            self._pool.submit(None, self.epoch, Task(number, indices))
            return None
        self._own.discard(number)
        took = time.perf_counter_ns() - began, 0, 0, time.thread_time_ns() - cpu
        self._metrics.task(took)
        return Made(-1, self.epoch, number, False, took, 0, data)

    def ready(self) -> bool:
        """Whether ``next`` would not wait, as far as can be said without waiting. Takes in what has arrived."""
        with self._lock:
            return self._ready()

    def _arrived(self) -> int | None:
        """The task that is delivered next, if its result is there."""
        if self._due in self._waiting:
            return self._due
        return None if self._knobs.in_order else next(iter(self._waiting), None)

    def _ready(self) -> bool:
        while self._trouble is None and not self._stopped and self._find_due() and self._arrived() is None:
            try:
                if self._due in self._own:
                    return False
                result = self._receive(wait=False)
            except _NotYet:
                return False
            except Exception as e:  # next says it
                self._trouble = e
                break
            if result is not None:
                self._waiting[result.task] = result
        return True

    def _find_due(self) -> bool:
        """Moves ``_due`` to the next task that can still come. Returns False when there is none."""
        while self._due < self._sent:
            if self._knobs.shared:
                if self._due in self._asked:
                    return True
            else:
                worker = self._owner.get(self._due)
                if worker is not None:
                    if self._due in self._waiting or self._active[worker]:
                        return True
                    del self._owner[self._due]  # lost with its worker
                    self._flying -= 1
            self._due += 1
        return False

    def _receive(self, wait: bool = True) -> Result | None:
        """A result of this epoch; None when it brought no batch.

        Raises:
            _NotYet: there is none, and nobody wants to wait.
        """
        timeout = self._knobs.timeout
        try:
            due = None if self._knobs.shared or not self._knobs.in_order else self._owner[self._due]
            if not wait:
                result = self._pool.receive(0.0, due)
                if result is None:
                    raise _NotYet
            elif self.tuner is None:
                result = self._pool.receive(timeout if timeout > 0 else None, due)
            else:
                began = time.perf_counter_ns()
                result = self._pool.receive(timeout if timeout > 0 else None, due)
                self._waited_ns += time.perf_counter_ns() - began
        except WorkerDiedError as e:
            if self._restarts is None:
                self._bury(e)
                raise
            self._heal(self._restarts, e)
            return None
        if result is None:
            raise WorkerTimeoutError(f"DataLoader timed out after {timeout} seconds")
        if self._restarts is not None and not self._knobs.shared:
            self._restarts.task_answered(result.worker)
        self._metrics.task(result.times)
        if result.nbytes > self._metrics.batch_bytes:
            self._metrics.batch_bytes = result.nbytes
        if result.epoch != self.epoch or (self._knobs.shared and self._is_known(result.task)):
            result.drop()
            return None
        if result.ended:
            self._active[result.worker] = False
            if not self._knobs.persistent:
                self._pool.retire(result.worker)
            self._flying -= 1
            self._credits += 1
            self._fill()
            return None
        return result

    def _is_known(self, task: int) -> bool:
        """Whether a task was answered already: after a death some are asked for twice, and are the same to the bit."""
        return task not in self._asked or task in self._waiting

    def _heal(self, restarts: Restarts, e: WorkerDiedError) -> None:
        """Others take the place of the dead."""
        asked = {k: v for k, v in self._asked.items() if k not in self._waiting and k not in self._own}
        try:
            lost = restarts.replace_dead(e, self.epoch, asked)
        except WorkerDiedError as worse:
            self._bury(worse)
            raise
        for task, error in lost.items():  # told when its turn comes
            self._waiting[task] = Lost(self._owner.get(task, 0), self.epoch, task, error)
        restarts.emit_warnings()

    def _bury(self, e: WorkerDiedError) -> None:
        """What died with workers is lost, and so is skipped; the others go on."""
        if not self._knobs.shared:
            for worker in e.workers:
                self._active[worker] = False
        elif not self._pool.alive() or (e.tasks is None and self._exhausted):
            # Nobody is left to ask again: the epoch ends with what has come.
            there = self._waiting.keys() | self._own
            self._asked, self._exhausted = {k: v for k, v in self._asked.items() if k in there}, True
        elif e.tasks is not None:
            for task in e.tasks:
                if self._asked.pop(task, None) is not None:
                    self._flying -= 1
        else:  # it died between two tasks, or in the instant in which it took one
            for task, indices in self._asked.items():
                if task not in self._waiting and task not in self._own:
                    self._pool.submit(None, self.epoch, Task(task, indices))

    def _deliver(self, result: Result) -> Any:
        if self._budget.strict and result.nbytes > self._budget.flight_bytes:
            result.drop()
            self._stopped = True
            raise BudgetError(
                f"one batch takes {result.nbytes:,} bytes and the budget is {self._budget.flight_bytes:,}: "
                "a larger budget=, or a smaller batch_size"
            )
        self._owner.pop(result.task, None)
        self._asked.pop(result.task, None)
        cursor, self.worker = self._cursor, result.worker
        if result.task == self._due:
            self._due += 1
        elif cursor is not None:
            cursor.pass_over(result.task)
        if cursor is not None:
            cursor.next = self._due
            if self._counted:
                cursor.counts[result.worker] += 1
                cursor.turn = result.worker + 1
        if not self._knobs.shared:
            self._load[result.worker] -= 1
        self._flying -= 1
        self._credits += 1
        change = None if self.tuner is None else self.tuner(self._waited_ns)
        if change is not None:
            knob, value = change
            if knob == "here":
                self.here(leave=bool(value))
            else:
                self._resize(value)
        if self._wish is not None:
            self._grant()
        self._fill()
        return result.take()

    def _fill(self) -> None:
        """Spends credits while there are any, and room for one batch more."""
        while self._credits > 0 and self._room():
            self._credits -= 1
            self._submit()

    def _room(self) -> bool:
        """Whether one batch more may be in flight. One always may; a budget that was asked for is not risked before
        the first batch has shown how large it is."""
        largest = self._metrics.batch_bytes
        if not largest:
            return self._flying < (1 if self._budget.strict else self._knobs.usual)
        limit = self._budget.flight_bytes
        if self._flying >= self._knobs.usual:
            limit //= AHEAD_SHARE
        return not self._flying or (self._flying + 1) * largest <= limit

    def _submit(self) -> None:
        """Draws one index and gives it to the worker whose turn it is; with no worker left it is lost, as in torch."""
        if self._exhausted and self._knobs.shared:
            return
        try:
            indices = self._next_indices()
            while self._sent in self._skip:  # delivered before the run was taken up again
                self._sent += 1
                indices = self._next_indices()
        except StopIteration:
            self._exhausted = True
            if not (self._knobs.persistent or self._here):
                self._pool.finish()  # the workers' end, a few milliseconds, falls into the last batches
            return
        if self._restarts is not None and self._restarts.known:
            indices = self._restarts.mark_known(indices)
        worker = None
        if self._knobs.shared:
            self._asked[self._sent] = indices
        else:
            worker = self._take_turn()
            if worker is None:
                return
            self._owner[self._sent] = worker
            self._load[worker] += 1
        task = Task(self._sent, indices)
        if self._restarts is not None and worker is not None:
            self._restarts.task_given(worker, self.epoch, task)
        if self._here:
            self._own.add(self._sent)
        else:
            self._pool.submit(worker, self.epoch, task)
        self._sent += 1
        self._flying += 1

    def _take_turn(self) -> int | None:
        n = self._knobs.num_workers
        in_order = self._knobs.in_order
        share = 0 if in_order else self._knobs.window // max(1, sum(self._active))
        for _ in range(n):
            worker, self._turn = self._turn, (self._turn + 1) % n
            if self._active[worker] and (in_order or self._load[worker] < share):
                return worker
        return None
