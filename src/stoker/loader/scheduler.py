"""Tasks in flight, credits and order: which worker gets which task, and which result is delivered next.

Where a batch is, from its indices to the training loop; only step 3 runs outside of the training process::

    1. _fill, _submit   the training thread draws the task's indices, if there is a credit and room in the budget
    2. pool.submit      the task waits in a worker's queue, or in one that all workers share     WITH_WORKER
    3.                  a worker loads and collates the batch into a slot of shared memory       WITH_WORKER
    4. pool.receive     the training thread, or the thread that pins, reads that it is there
    5. Tasks.keep       the result waits, in its slot, until the tasks before it are delivered   ARRIVED
    6. _deliver         the training loop gets a view on the slot, and a credit is returned

A task reserved for this process skips 2 to 5 (HERE): ``_run_here`` makes its batch when it is due.

With torch's seeds the rules are torch's, because users can observe them. With ``in_order``, task *i* goes to worker *i*
mod N, which fixes the random state of every sample. The sampler is advanced whenever a result is delivered, before an
error in it is raised. A worker whose iterable dataset is exhausted is skipped from then on.

With task seeds no batch depends on who made it: any free worker takes the next task, and workers come and go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch._utils import ExceptionWrapper

from ..core.errors import BudgetError, UsageError, WorkerDiedError, WorkerTimeoutError, one_line
from ..core.metrics import LoaderMetrics
from ..core.options import Budget, Knobs
from ..core.types import Batch, Index
from ..sampling.order import Task
from ..workers import can_start
from ..workers.protocol import LocalBatch, Lost, Pool, Result, WorkersUselessError
from .in_flight import InFlight, TasksInFlight, TaskState

if TYPE_CHECKING:
    from ..sampling.cursor import Cursor
    from ..workers.restart import Restarts

MOST_REDONE = 3  # batches of an epoch that fail in workers only: fewer may be chance, as with a file server
AHEAD_SHARE = 16  # divisor of the bytes in flight: the part for batches prefetched only because some samples are slow
NextIndices: TypeAlias = Callable[[], Index]
MakeBatch: TypeAlias = Callable[[int, Index], Batch]  # from a task's number and indices
Tuner: TypeAlias = Callable[[int], "int | None"]


class Retreat(NamedTuple):
    """Fallback for workers that stoker itself chose and that cannot work: ``make_batch`` makes the rest of the epoch,
    the same batches, in the script's own process."""

    said: Callable[[str], None]  # called with the reason
    # the script itself has no workers: a task that fails in one is retried here, and raises the script's own error
    redo: bool
    # describes what the script changed since the workers started, so that they would make other batches; "" for nothing
    changed: Callable[[], str] | None = None


class Scheduler:
    """Runs one epoch after another on one pool. Prefetch is a window of credits: drawing a task spends one, delivering
    a batch returns one, and ``resize`` may change the window at any time. No credit is spent while the batches in
    flight fill their share of the budget.

    ``restarts`` replaces workers that die; None: a death is an error, as in torch. ``make_batch`` makes a task's batch
    in this process; None: workers make all. ``retreat``: see ``Retreat``; requires ``make_batch``, and tasks that any
    worker may take."""

    def __init__(
        self,
        pool: Pool,
        knobs: Knobs,
        metrics: LoaderMetrics,
        budget: Budget,
        restarts: Restarts | None = None,
        make_batch: MakeBatch | None = None,
        retreat: Retreat | None = None,
    ) -> None:
        self._pool = pool
        self._knobs = knobs
        self._metrics = metrics
        self._budget = budget
        self._restarts = restarts
        self._make_batch = make_batch
        self._retreat = retreat
        self._redone = 0  # tasks that failed in a worker but not here
        self._alone = False  # there are no workers any more
        self.epoch = -1
        self._next_indices: NextIndices = iter(()).__next__
        self._spent = 0  # credits: tasks drawn minus batches delivered
        self._tasks = TasksInFlight()
        self._active: list[bool] = []  # by worker: alive, and its dataset not exhausted
        self._load: list[int] = []  # by worker: tasks in flight, unless workers share tasks
        self._turn = 0  # worker that gets the next task
        self._exhausted = False
        self._stopped = False
        self._waited_ns = 0
        # raised by the following ``next``: it came while no batch was requested
        self._pending_error: Exception | None = None
        self._cursor: Cursor | None = None
        self._counted = False  # whether the cursor counts what each worker delivered
        self._delivered_before: set[int] = set()  # tasks delivered before the run was resumed
        self._lock = threading.Lock()  # a resize may come from any thread, or from a signal handler within ``next``
        self._wanted: int | None = None  # a count requested while the lock was held
        self._resizing_thread = 0
        # called at each delivery with the nanoseconds waited so far; returns a new number of workers, or None
        self.tuner: Tuner | None = None
        self.here = False  # tasks are reserved for this process until workers are wanted
        self.worker = 0  # worker whose batch was delivered last

    @property
    def is_done(self) -> bool:
        """Whether all batches of the epoch were delivered, and workers wait for tasks."""
        return self._exhausted and not self._stopped and not self._alone and not len(self._tasks)

    @property
    def ending(self) -> bool:
        """Whether all tasks of the epoch are handed out."""
        return self._exhausted and not self._stopped

    def stop(self) -> None:
        """Call before closing the pool."""
        self._stopped = True
        if self._resizing_thread not in (0, threading.get_ident()):
            with self._lock:  # otherwise nothing would close a worker that is just starting
                pass

    def begin(self, next_indices: NextIndices, shared_seed: int | None = None, cursor: Cursor | None = None) -> None:
        """Starts an epoch and fills the window. With torch's seeds, tasks of an epoch that was left early still run,
        but are not delivered: they advance the workers' random state, as in torch. ``cursor``: where to begin; records
        what is delivered."""
        with self._lock:
            self.epoch += 1
            if self.epoch:
                self._tasks.drop_results()
                self._pool.resume(self.epoch, shared_seed)
            n = self._knobs.num_workers
            self._next_indices = next_indices
            self._turn = 0
            self._tasks = TasksInFlight(0 if cursor is None else cursor.next)
            self._cursor = cursor
            if cursor is not None:
                self._delivered_before = set(cursor.delivered_early)
                self._counted = bool(cursor.delivered_by)
                self._turn = (cursor.turn if self._counted else cursor.next) % n
            self._pending_error = None
            self._active = [True] * n
            self._load = [0] * n
            self._exhausted = False
            self._spent = 0
            self._fill()

    def resize(self, n: int) -> None:
        """Changes the number of workers from the next task on. Batches and their order do not change. May be called
        from any thread or a signal handler. During ``next``, takes effect when that delivers."""
        if not self._knobs.shared:
            raise UsageError(
                "the number of workers cannot change within an epoch, because each has its own random state or part "
                'of the dataset. It can with num_workers="auto" and a map-style dataset'
            )
        self._wanted = n
        if not self._lock.acquire(blocking=False):
            return
        self._resizing_thread = threading.get_ident()
        try:
            self._resize()
        finally:
            self._resizing_thread = 0
            self._lock.release()

    def _resize(self) -> None:
        n, self._wanted = self._wanted, None
        if n is None or self._stopped or self._alone:
            return
        self._knobs = replace(self._knobs, num_workers=n)
        self.here = False
        self._pool.resize(n)
        self._fill()

    def make_one_ahead(self) -> None:
        """Limits each worker to one task in flight, from the next task on."""
        with self._lock:
            self._knobs = replace(self._knobs, prefetch_factor=1, ahead=0)

    def next(self) -> Batch:
        """Returns the next batch, or an ``ExceptionWrapper`` in its place. Raises ``StopIteration`` at the end of the
        epoch. After ``WorkerDiedError`` the tasks of that worker are lost; the others continue."""
        with self._lock:
            return self._next()

    def _next(self) -> Batch:
        while True:
            if self._pending_error is not None:
                error, self._pending_error = self._pending_error, None
                raise error
            due = self._tasks.find_due(self._active.__getitem__)
            if due is None:
                if self._cursor is not None:
                    self._cursor.next = self._tasks.due
                    self._cursor.finished = True
                raise StopIteration
            result = self._tasks.take_result(self._knobs.in_order)
            if result is not None and self._is_outdated(result):
                continue
            if result is not None:
                return self._deliver(result)
            if self._stopped:
                raise AssertionError("the workers of this iterator have been shut down")
            result = self._run_here(due) if due.state is TaskState.HERE else self._receive(due)
            if result is None:
                continue
            if result.task != self._tasks.due and self._knobs.in_order:
                self._tasks.keep(result)
            elif not self._is_outdated(result):
                return self._deliver(result)

    def _is_outdated(self, result: Result) -> bool:
        """Whether the script has changed what a worker's batch was made from. This process then makes the batch, and
        all later ones."""
        if self._alone or type(result) is LocalBatch or self._retreat is None or self._retreat.changed is None:
            return False
        changes = self._retreat.changed()
        if changes:
            result.drop()
            self._go_home(f"workers would make other batches: {changes}")
        return bool(changes)

    def _run_here(self, task: InFlight) -> Result | None:
        """Runs the due task in this process. If it fails, a worker runs it, whose error tells where it failed."""
        assert self._make_batch is not None
        number = self._tasks.due
        began, cpu = time.perf_counter_ns(), time.thread_time_ns()
        try:
            data = self._make_batch(number, task.indices)
        except Exception as e:
            if self._alone:
                return Lost(-1, self.epoch, number, e)
            task.state = TaskState.WITH_WORKER
            # before the resize: after the last task there is no worker
            self._pool.submit(None, Task(self.epoch, number, task.indices))
            self._wanted = self._wanted or self._knobs.num_workers
            self._resize()
            return None
        took = time.perf_counter_ns() - began, 0, 0, time.thread_time_ns() - cpu
        self._metrics.task(took)
        return LocalBatch(-1, self.epoch, number, False, took, 0, data)

    def ready(self) -> bool:
        """Whether ``next`` would return without waiting, as far as known. Collects results that have arrived."""
        with self._lock:
            while self._pending_error is None and not self._stopped:
                due = self._tasks.find_due(self._active.__getitem__)
                if due is None or self._tasks.has_result(self._knobs.in_order):
                    break
                if due.state is TaskState.HERE:
                    return False
                try:
                    result = self._ask(due, 0.0)
                    if result is None:
                        return False
                    result = self._accept(result)
                except Exception as e:  # ``next`` raises it
                    self._pending_error = e
                    break
                if result is not None:
                    self._tasks.keep(result)
            return True

    def _receive(self, task: InFlight) -> Result | None:
        """Waits for a result of this epoch; None if what arrived is not a batch."""
        timeout = self._knobs.timeout
        began = time.perf_counter_ns()
        result = self._ask(task, timeout if timeout > 0 else None)
        self._waited_ns += time.perf_counter_ns() - began
        return None if result is None else self._accept(result)

    def _ask(self, task: InFlight, timeout: float | None) -> Result | None:
        """Receives a result from the pool. None: a worker was replaced, or nothing arrived and ``timeout`` is 0.0."""
        try:
            result = self._pool.receive(timeout, task.worker if self._knobs.in_order else None)
        except WorkersUselessError as e:
            can_start.failed(str(e))
            self._go_home(str(e))
            return None
        except WorkerDiedError as e:
            if self._retreat is not None and self._retreat.redo:
                can_start.failed(str(e))
                self._go_home(str(e))
            elif self._restarts is None:
                self._handle_lost_tasks(e)
                raise
            else:
                self._restart_workers(self._restarts, e)
            return None
        if result is None and timeout:
            raise WorkerTimeoutError(f"DataLoader timed out after {self._knobs.timeout} seconds")
        return result

    def _accept(self, result: Result) -> Result | None:
        """Records what a worker did. Returns the result if it is a wanted batch."""
        if self._restarts is not None and self._restarts.own is not None:
            self._restarts.own.answered(result.worker)
        self._metrics.task(result.times)
        if result.nbytes > self._metrics.batch_bytes:
            self._metrics.batch_bytes = result.nbytes
        if result.epoch != self.epoch or (self._knobs.shared and not self._tasks.is_awaited(result.task)):
            result.drop()
            return None
        if result.ended:
            self._active[result.worker] = False
            if not self._knobs.persistent:
                self._pool.retire(result.worker)
            self._tasks.remove(result.task)
            self._spent -= 1
            self._fill()
            return None
        return result

    def _restart_workers(self, restarts: Restarts, e: WorkerDiedError) -> None:
        try:
            lost = restarts.replace_dead(e, self.epoch, self._tasks.with_workers() if self._knobs.shared else {})
        except WorkerDiedError as worse:
            self._handle_lost_tasks(worse)
            raise
        for number, error in lost.items():  # raised when its turn comes
            self._tasks.keep(Lost(self._tasks.worker_of(number) or 0, self.epoch, number, error))
        restarts.emit_warnings()

    def _go_home(self, reason: str) -> None:
        """From now on, this process makes all undelivered batches, without workers."""
        assert self._retreat is not None
        self._alone = self.here = True
        self._wanted = None
        self._tasks.take_home()
        self._pool.close()
        self._retreat.said(reason)

    def _made_here(self, error: ExceptionWrapper, number: int, indices: Index) -> Batch:
        """Retries a task that failed in a worker. Raises the script's own error if it fails here too."""
        if self._retreat is None or not self._retreat.redo or self._make_batch is None:
            return error
        batch = self._make_batch(number, indices)
        self._redone += 1
        if not self._alone and self._redone == MOST_REDONE:
            self._go_home(f"a worker failed on what the script's own process can load: {error.exc_type.__name__}")
        return batch

    def _handle_lost_tasks(self, e: WorkerDiedError) -> None:
        """Skips the tasks that died with workers; the others continue."""
        if not self._knobs.shared:
            for worker in e.workers:
                self._active[worker] = False
        elif not self._pool.alive() or (e.tasks is None and self._exhausted):
            # No worker is left that could repeat a task: the epoch ends with what has arrived.
            for number in self._tasks.with_workers():
                self._tasks.remove(number)
            self._exhausted = True
        elif e.tasks is not None:
            for number in e.tasks:
                self._tasks.remove(number)
        else:  # the worker died between two tasks, or while taking one
            for number, indices in self._tasks.with_workers().items():
                self._pool.submit(None, Task(self.epoch, number, indices))

    def _deliver(self, result: Result) -> Batch:
        if self._budget.strict and result.nbytes > self._budget.flight_bytes:
            result.drop()
            self._stopped = True
            raise BudgetError(
                f"one batch takes {result.nbytes:,} bytes, but the budget is {self._budget.flight_bytes:,}. Raise "
                "budget= or reduce batch_size"
            )
        indices = self._tasks.remove(result.task)
        self.worker = result.worker
        self._move_cursor(result)
        if not self._knobs.shared:
            self._load[result.worker] -= 1
        self._spent -= 1
        change = None if self.tuner is None or self._alone else self.tuner(self._waited_ns)
        if change is not None:
            self._wanted = self._wanted or change
        if self._wanted is not None:
            self._resize()
        self._fill()
        batch = result.take()
        return self._made_here(batch, result.task, indices) if isinstance(batch, ExceptionWrapper) else batch

    def _move_cursor(self, result: Result) -> None:
        cursor = self._cursor
        if result.task == self._tasks.due:
            self._tasks.due += 1
        elif cursor is not None:
            cursor.deliver_early(result.task)
        if cursor is None:
            return
        cursor.next = self._tasks.due
        if self._counted:
            cursor.delivered_by[result.worker] += 1
            cursor.turn = result.worker + 1

    def _fill(self) -> None:
        """Spends credits while there are any, and the budget has room for another batch."""
        window = 1 if self.here else self._knobs.window + self._pool.ahead
        while self._spent < window and self._room():
            self._spent += 1
            self._submit()

    def _room(self) -> bool:
        """Whether one more batch may be in flight. The first always may. With a budget set by the user, only one is
        made until it has shown how large a batch is."""
        in_flight, usual = len(self._tasks), self._knobs.usual + self._pool.ahead
        largest = self._metrics.batch_bytes
        if not largest:
            return in_flight < (1 if self._budget.strict else usual)
        limit = self._budget.flight_bytes
        if in_flight >= usual:
            limit //= AHEAD_SHARE
        return not in_flight or (in_flight + 1) * largest <= limit

    def _submit(self) -> None:
        """Draws one task and gives it to the worker whose turn it is; if no worker is left, the task is lost, as in
        torch."""
        if self._exhausted and self._knobs.shared:
            return
        try:
            indices = self._next_indices()
            while self._tasks.drawn in self._delivered_before:
                self._tasks.drawn += 1
                indices = self._next_indices()
        except StopIteration:
            self._exhausted = True
            if not (self._knobs.persistent or self.here):
                self._pool.finish()  # the workers' end, a few milliseconds, falls into the last batches
            return
        if self._restarts is not None and self._restarts.known:
            indices = self._restarts.mark_known(indices)
        task = Task(self.epoch, self._tasks.drawn, indices)
        worker = None
        if not self._knobs.shared:
            worker = self._take_turn()
            if worker is None:
                return
            self._load[worker] += 1
            if self._restarts is not None and self._restarts.own is not None:
                self._restarts.own.given(worker, task)
        state = TaskState.HERE if self.here else self._give(worker, task)
        self._tasks.add(InFlight(state, worker, indices if self._knobs.shared else None))

    def _give(self, worker: int | None, task: Task) -> TaskState:
        try:
            self._pool.submit(worker, task)
        except Exception as e:  # indices that cannot be pickled, or a worker that cannot be started any more
            if self._retreat is None:
                raise
            self._go_home(one_line(e))
            return TaskState.HERE
        return TaskState.WITH_WORKER

    def _take_turn(self) -> int | None:
        n = self._knobs.num_workers
        in_order = self._knobs.in_order
        share = 0 if in_order else self._knobs.window // max(1, sum(self._active))
        for _ in range(n):
            worker, self._turn = self._turn, (self._turn + 1) % n
            if self._active[worker] and (in_order or self._load[worker] < share):
                return worker
        return None
