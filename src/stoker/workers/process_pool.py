"""A pool of worker processes: tasks and results go through pipes, batches through each worker's arena.

The path of a task:

1. parent, ``submit``: pickles the indices, and writes them to the worker's pipe (``Outbox``) or to the pipe that all
   workers read (``TaskQueue``). Tasks that do not fit wait; the parent never blocks on a worker.
2. worker, ``process_main``: fetches, collates into a slot of its arena, and writes a record to its result pipe. It may
   block there until the parent reads.
3. parent, ``receive``: waits for records of all workers, and meanwhile checks for deaths and hangs (``health``).
4. parent, ``Received.take``: decodes the batch in place (``lease_or_copy``). ``transport.slots`` explains when its
   memory is free again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType

from torch.utils.data.dataloader import _DatasetKind

from ..core.options import Budget
from ..core.processes import LEAVE_S, alive
from ..sampling.order import Task
from ..transport.messages import Kind
from ..transport.slots import Bytes, PageLocker, SlotReader
from ..transport.task_queue import TaskQueue
from . import health
from .faults import exit_reason
from .launch import SHORTAGES, Launcher
from .process_table import ProcessTable
from .protocol import ProcessContext, RetryTask, SeededTask, WorkerSpec
from .worker_handle import ProcessState, Received, WorkerHandle

logger = logging.getLogger(__name__)
PARENT_POLL_S = 5.0  # how late the parent may notice a death that no descriptor signalled; torch's own interval
LOOK_S = 0.5  # the same for a deadlocked worker, if the script's own process can do without it
READ_S = 1.0  # how long closing waits for a thread that reads results
FLUSH_S = 0.01  # between two attempts to write to a full task pipe


class ProcessPool:
    """The worker processes of one iterator. See ``workers.protocol.Pool``."""

    ahead = 0

    def __init__(
        self,
        spec: WorkerSpec,
        context: ProcessContext | ModuleType,  # a multiprocessing context, or torch.multiprocessing itself
        budget: Budget,
        arenas: list[SlotReader],  # memory of an earlier epoch's workers, reused while warm, and removed from this list
        locker: PageLocker | None = None,
        later: bool = False,  # start no worker before ``resize``
    ) -> None:
        self._tokens = -1
        if spec.kept:
            self._tokens = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            spec = replace(spec, tokens=self._tokens)
        launcher = Launcher(context, spec)
        self.budget = budget
        self.epoch = 0  # number of the epoch that was begun last
        self.finishing = False  # the task queue takes no more tasks
        self.dispensable = False  # the script's own process can also make the batches
        self._next_look = 0.0
        self._wake_fd = -1
        self._spec = spec
        self._arenas = arenas
        self._owner = os.getpid()
        self._lock = threading.Lock()  # a pinning thread receives while the consumer resizes
        self._count = 0 if later else spec.num_workers
        self._missing: list[int] = []  # ids of workers still to be started
        self._next_add = 0.0
        self._closed = False
        self._has_private_tasks = False  # some worker has tasks in its own pipe besides the queue
        self._parked = 0  # number of workers that may leave
        self._seeds: tuple[int, int] | None = None  # of an iterator other than the first; see ``SeededTask``
        self._queue = TaskQueue() if spec.shared else None
        self._table = ProcessTable(launcher, self._queue, arenas, locker)
        self.processes = self._table.processes  # those that have not been joined
        self.workers = self._table.workers  # by place
        self._ready = self._table.ready
        try:
            # Both before the first fork: pages written after it are copied one by one.
            exit_reason.begin()
            self._table.free_readers = [self._table.take_reader() for _ in range(self._count)][::-1]
            for worker in range(self._count):
                self._add(worker)
        except BaseException:
            self.close()
            raise

    # -- starting and replacing workers

    def grow(self) -> None:
        """Adds one worker, with its own tasks."""
        self._add(len(self.workers))

    def resize(self, n: int) -> None:
        if self.finishing or self._closed:
            return
        with self._lock:
            self._reap_leavers()
            active = [w for w in self.workers if w.is_active]
            for worker in active:
                if worker.id >= n:
                    worker.reader.arena.stop = 1  # before it takes another task
                    self.retire(worker.place)
            self._count = n
            self._missing = sorted(set(range(n)) - {w.id for w in active})
            self._add_missing()
            for reader in self._table.readers:
                reader.arena.workers = n

    def replace(self, place: int, tasks: Sequence[Task]) -> None:
        """Replaces a dead worker by a process with the same id, place, memory and saved random state. If the worker had
        been told to leave, its tasks go to the queue instead."""
        with self._lock:
            old = self.workers[place]
            arena = old.reader.arena
            self._table.remove(old)
            if arena.slot_being_filled >= 0:
                old.reader.release(arena.slot_being_filled)
            if old.leaving and self._queue is not None and not self.finishing:
                self._table.free_readers.append(old.reader)
                for task in tasks:
                    self._queue.put(task.epoch, task.number, pickle.dumps(task.indices, protocol=5))
                return
            arena.reset(keep_checkpoint=True)
            arena.private_tasks = len(tasks) if self._queue is not None else 0
            worker = self._start(old.id, place, old.reader)
            self._has_private_tasks = self._has_private_tasks or self._queue is not None
            for task in tasks:
                worker.given += type(task.indices) is not RetryTask or not task.indices.replay
                payload = pickle.dumps(task.indices, protocol=5)
                worker.outbox.put(Kind.TASK, place, task.epoch, task.number, payload=payload)
            if self.finishing and self._queue is None:
                worker.outbox.put(Kind.STOP, place, 0, 0)

    def _add_missing(self) -> None:
        """Starts one of the missing workers. A fork takes 5 ms of the consumer's time, and several in a row would stall
        it, so forks take at most a fifth of its time. The first worker is started at once."""
        began = time.monotonic()
        if self._missing and (began >= self._next_add or not self.alive()):
            try:
                self._add(self._missing.pop(0))
            except OSError as e:
                if e.errno not in SHORTAGES:
                    raise
                self._missing.clear()
                self._count = self.alive()
                logger.warning("only %s workers could be started: %s", self._count, e.strerror)
            now = time.monotonic()
            self._next_add = now + 4 * (now - began)

    def _add(self, id_: int) -> None:
        reader = self._table.take_reader()
        reader.arena.reset()
        self._start(id_, self._table.free_place(), reader)

    def _start(self, id_: int, place: int, reader: SlotReader) -> WorkerHandle:
        reader.arena.workers = self._count
        reader.arena.epoch = self.epoch
        return self._table.start(id_, place, reader)

    # -- tasks

    def submit(self, worker: int | None, task: Task) -> None:
        indices = task.indices if self._seeds is None else SeededTask(*self._seeds, task.indices)
        payload = pickle.dumps(indices, protocol=5)
        with self._until_closed():
            if worker is not None:
                handle = self.workers[worker]
                handle.given += 1
                handle.outbox.put(Kind.TASK, worker, task.epoch, task.number, payload=payload)
                return
            assert self._queue is not None
            self._queue.put(task.epoch, task.number, payload)
            if self._missing:
                with self._lock:
                    self._add_missing()

    def begin_anew(self, spec: WorkerSpec) -> None:
        """From now on, the workers serve another iterator, whose workers would be started with ``spec``."""
        self._spec = spec
        self._seeds = spec.base_seed, spec.part_epochs
        if self._queue is not None and self.alive() != spec.num_workers:
            self.resize(spec.num_workers)

    def park(self) -> None:
        """Lets workers leave if no iterator asks for them. Whoever takes a worker's token decides."""
        self._parked = self.alive()
        os.eventfd_write(self._tokens, self._parked)

    def unpark(self, n: int) -> bool:
        """Takes all tokens back. Returns whether ``n`` workers wait, or may be started because they share tasks."""
        if self._closed or self.finishing or os.getpid() != self._owner:
            return False
        try:
            for _ in range(self._parked):
                os.eventfd_read(self._tokens)
        except BlockingIOError:  # a worker has left, or leaves
            return False
        running = [w for w in self.workers if w.is_active]
        return all(alive(w.process) for w in running) and (self._queue is not None or len(running) == n)

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        self.epoch = epoch
        payload = pickle.dumps(shared_seed)
        for worker in self.workers:
            if self._queue is not None:
                worker.reader.arena.epoch = epoch
            elif not worker.leaving:
                worker.outbox.put(Kind.RESUME, worker.place, epoch, 0, payload=payload)

    def retire(self, worker: int) -> None:
        handle = self.workers[worker]
        if not handle.leaving:
            handle.leaving = True
            handle.outbox.put(Kind.STOP, worker, 0, 0)

    def finish(self) -> None:
        if self.finishing:
            return
        self.finishing = True
        if self._queue is not None:
            self._queue.end()
            return
        for worker in self.workers:
            worker.outbox.put(Kind.STOP, worker.place, 0, 0)

    # -- results

    def wake_by(self, fd: int) -> None:
        """Makes ``receive`` return None early when this eventfd(2) is written."""
        self._wake_fd = fd
        self._table.poll.register(fd, select.POLLIN)

    def receive(self, timeout: float | None, worker: int | None = None) -> Received | None:
        with self._until_closed():
            return self._receive(timeout, worker)

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Wraps calls during which another thread may close the pool."""
        try:
            yield
        except OSError:
            if not self._closed:
                raise
            if threading.current_thread().daemon and not threading.main_thread().is_alive():
                threading.Event().wait()  # for the end of the interpreter
            raise AssertionError("the workers of this iterator have been shut down") from None

    def _receive(self, timeout: float | None, worker: int | None) -> Received | None:
        # Results of other workers would wake this process for nothing. But the end of an iterable dataset must be known
        # early, as in torch.
        alone = worker is not None and self._spec.kind != _DatasetKind.Iterable
        poll = self.workers[worker].poll if alone and worker is not None else self._table.poll
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = PARENT_POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            events = poll.poll(min(left, self._interval_s()) * 1000)
            if self._wake_fd >= 0 and any(fd == self._wake_fd for fd, _ in events):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                return None
            with self._lock:
                if self._closed:
                    raise OSError("closed by another thread")
                if self._table.read(events):
                    self._reap_leavers()
                if self._ready:
                    break
                if self._spec.timed and not events:
                    health.kill_late(self.workers)
                self._check_deaths(events)
            if not events:
                self._check_locks()
            if not events and deadline is not None and time.monotonic() >= deadline:
                return None
        r = self._ready.popleft()
        handle = self.workers[r.worker]
        handle.answered += 1
        return Received(self.lease_or_copy, r, handle.reader)

    def _interval_s(self) -> float:
        """Returns how long to wait for results before the next check. Writes waiting tasks."""
        most = LOOK_S if self.dispensable else PARENT_POLL_S
        if self._spec.timed:
            most = min(most, 0.5, max(0.01, self._spec.sample_timeout / 4))
        return most if self._flush() else min(most, FLUSH_S)

    def _check_locks(self) -> None:
        if not self.dispensable:
            health.replace_deadlocked(self.workers, self._table.launcher, self._spec)
        elif time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            health.check_locks(self.workers, self._table.launcher)

    def lease_or_copy(self, reader: SlotReader, slot: int, used: int) -> Bytes:
        """Returns the slot's bytes for the consumer: in place within the budget, else a copy."""
        budget = self.budget
        readers = self._table.readers
        count = sum(len(r.leases) for r in readers)
        if count < budget.lease_slots and used + sum(r.leased_bytes() for r in readers) <= budget.lease_bytes:
            return reader.lease(slot, used)
        return reader.copy(slot, used)

    def _flush(self) -> bool:
        """Writes tasks that did not fit into the pipes. Returns True when none is left."""
        if self._queue is not None:
            done = self._queue.flush()
            if not done or not self._has_private_tasks:
                return done
        done = True
        for worker in self.workers:
            if worker.outbox.waiting and worker.state is ProcessState.RUNNING:
                done &= worker.outbox.flush()
        return done

    # -- the end of workers

    def _check_deaths(self, events: list[tuple[int, int]]) -> None:
        """Raises WorkerDiedError if a worker that was not told to leave is gone and all that it sent has been read."""
        woken = {fd for fd, _ in events}
        dead = []
        for worker in self.workers:
            if not health.has_ended(worker):
                continue
            if not self._may_leave(worker):
                dead.append(worker)
            elif worker.process.sentinel in woken:
                self._reap(worker)
        if not dead or self._table.is_inbox(woken):
            return  # checked again when all pipes are silent
        if self._table.read(self._table.poll.poll(0)):
            self._reap_leavers()
        if self._ready:
            return  # results sent before the death come first
        for worker in dead:
            worker.current_task = worker.reader.arena.current_task
            worker.reader.arena.current_task = None
            if self._spec.restart:
                worker.state = ProcessState.DEAD
            else:
                self.retire(worker.place)
            self._table.stop_polling(worker.process.sentinel)
        how = "" if self._spec.restart else f"it {dead[0].how_it_ended()}"
        reason = self._table.launcher.failure() or how
        raise health.died_error(dead, reason, self.epoch, self._queue is not None)

    def _may_leave(self, worker: WorkerHandle) -> bool:
        """Whether a worker that has ended had been told to, and has answered all its tasks."""
        if self._queue is not None:
            # Neither the exit code nor the task that it published is enough: torch's handler of SIGTERM exits with 0,
            # and a worker may have taken a task without having published it.
            return (worker.leaving or self.finishing) and bool(worker.reader.arena.left)
        return worker.leaving or (self.finishing and worker.given == worker.answered)

    def _reap_leavers(self) -> None:
        for worker in self.workers:
            running = worker.state is ProcessState.RUNNING
            if worker.leaving and running and not alive(worker.process) and self._may_leave(worker):
                self._reap(worker)

    def _reap(self, worker: WorkerHandle) -> None:
        """Removes a worker that was told to leave and has left. Its memory is reused while it is warm. If each worker
        has its own tasks, the worker stays in the table until the pool is closed."""
        self._table.stop_polling(worker.process.sentinel)
        if self._queue is None or not worker.leaving:
            return
        while True:
            with contextlib.suppress(BlockingIOError):
                if worker.inbox.feed():
                    continue
            break
        self._table.free_readers.append(worker.reader)
        self._table.remove(worker)

    def close(self, leave_s: float = LEAVE_S) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        is_alone = self._lock.acquire(timeout=READ_S)
        self._closed = True
        if is_alone:
            self._lock.release()
        for reader in self._table.readers:
            reader.arena.stop = 1
        for worker in self.workers:
            if not worker.is_gone:
                self.retire(worker.place)
        self._table.close(leave_s)
        self._arenas.extend(r for r in self._table.readers if not r.degraded)
        if self._tokens >= 0:
            os.close(self._tokens)

    # -- the state of workers and their memory

    def alive(self) -> int:
        return sum(w.is_active for w in self.workers)

    def pss(self) -> dict[int, int]:
        """Returns bytes of memory by worker id, from each worker's last measurement; omits workers without one."""
        found = {w.id: w.reader.arena.pss for w in self.workers if not w.is_gone}
        return {id_: nbytes for id_, nbytes in found.items() if nbytes}

    def read_threads(self) -> int:
        """Returns the largest number of sample-loading threads in any worker; 0 if no worker has any."""
        return max((w.reader.arena.read_threads for w in self.workers if not w.is_gone), default=0)

    def shrink(self) -> None:
        """Returns the memory of free slots to the system."""
        for reader in self._table.readers:
            reader.shrink()

    def slots(self) -> int:
        """Returns the present number of slots of all workers."""
        return sum(r.arena.slots for r in self._table.readers)
