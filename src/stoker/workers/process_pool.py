"""Worker processes: tasks in and results out by pipes, batches through each worker's arena.

The parent never blocks on a worker (``Outbox``), a worker may block on the parent (backpressure), so they cannot wait
for each other. ``child.py`` is what runs in them. One file, longer than most: starting, burying and replacing workers
move the same few tables under one lock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import multiprocessing.popen_fork  # here, else the first worker's start does it, on the way to the first batch
import os
import pickle
import select
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _DatasetKind

from ..core import processes
from ..core.errors import BudgetError, StokerWarning, UsageError, WorkerDiedError
from ..core.options import Budget
from ..core.warn import warn_user
from ..sampling.order import Task
from ..transport.arena import Arena
from ..transport.messages import Kind, Outbox, Reader, Record
from ..transport.slots import Locker, SlotReader, own_fork
from ..transport.task_queue import TaskQueue
from . import hangs, native_threads, signals
from .faults import exit_reason
from .fork_lock_detector import Watchdog, may_start_anew
from .process_main import Fd, main
from .protocol import Life, RetryTask, WorkerSpec, look_s
from .worker_handle import Received, WorkerHandle

if TYPE_CHECKING:
    from .fork_server import ForkServer

logger = logging.getLogger(__name__)
SHORT = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # processes, descriptors, memory
PARENT_POLL_S = 5.0  # how late the parent may notice a death that no descriptor told; torch's own interval
KILLED_S = 1.0  # how long one is waited for that was killed
PIPES_OF_A_FORK = 4  # descriptors; where some are short multiprocessing leaves those open that it had got
FLUSH_S = 0.01  # between two looks at a task pipe that was full


def start(
    spec: WorkerSpec,
    context: Any,
    budget: Budget,
    arenas: list[SlotReader],
    locker: Locker | None,
    parts: int = 0,
    later: bool = False,
) -> tuple[ProcessPool, WorkerSpec]:
    """A pool, with fewer workers where the system has no processes, descriptors or memory for all of them.

    Args:
        spec, context, budget, arenas, locker: see ``ProcessPool``.
        parts: of an iterable dataset, which a run keeps: then some workers have several.
        later: see ``ProcessPool``.

    Raises:
        BudgetError: not one can be started.
    """
    wanted = spec.num_workers
    while True:
        try:
            pool = ProcessPool(spec, context, budget, arenas, locker, later)
            break
        except OSError as e:
            if e.errno not in SHORT:
                raise
            if spec.num_workers == 1:
                raise BudgetError(
                    f"not one worker can be started: {e.strerror}. num_workers=0 loads in this process; ulimit -n and "
                    "ulimit -u say how many open files and processes are allowed"
                ) from e
            spec, why = replace(spec, num_workers=spec.num_workers // 2, shards=parts), e.strerror
            while len(arenas) > spec.num_workers:
                arenas.pop().arena.close()  # it may be its descriptors that are short
    if spec.num_workers != wanted:
        same = (
            ""
            if spec.task_seeds or parts
            else " Random augmentation depends on the number, and is another than with all."
        )
        warn_user(f"{spec.num_workers} workers instead of {wanted}, for there can be no more: {why}.{same}")
    return pool, spec


def _have(n: int, fd: int) -> None:
    """Raises OSError unless ``n`` descriptors more can be had. ``fd`` is any that is open."""
    spare: list[int] = []
    try:
        while len(spare) < n:
            spare.append(os.dup(fd))
    finally:
        for copy in spare:
            os.close(copy)


class ProcessPool:
    """Worker processes of one iterator. See ``workers.protocol.Pool``.

    Args:
        spec: what each worker gets.
        context: a multiprocessing context, or torch.multiprocessing itself.
        budget: how much the consumer may keep in slots.
        arenas: memory of an earlier epoch's workers, used again warm; taken out of this list.
        locker: page-locks their slots.
        later: nobody is started before ``resize``.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        context: Any,
        budget: Budget,
        arenas: list[SlotReader],
        locker: Locker | None = None,
        later: bool = False,
    ) -> None:
        if not processes.starts_processes(context):  # a worker's code ends its process, and sets its signals
            raise UsageError(f"{type(context).__name__} does not start processes by fork, spawn or forkserver")
        self.budget, self.locker = budget, locker
        self.processes: list[Any] = []
        self._spec, self._context, self._arenas = spec, context, arenas
        self._members: list[WorkerHandle] = []  # by place, which records carry; a place is used again
        self._readers: list[SlotReader] = []
        self._spare: list[SlotReader] = []
        self._by_inbox: dict[int, WorkerHandle] = {}
        self._owner = os.getpid()
        self._ready: deque[Record] = deque()
        self._poll = select.poll()  # results, and the death of a worker
        self._lock = threading.Lock()  # a pinning thread receives while the consumer resizes
        self._count = 0 if later else spec.num_workers
        self._missing: list[int] = []  # ids of workers that are to come
        self._next_add = 0.0
        self._finishing = False
        self._closed = False
        self._watched = False
        self._private = False  # some worker has tasks in its own pipe, beside the board
        self._epoch = 0
        self._zygote: ForkServer | None = None
        native_threads.look()  # once here, not in each fork
        self._watchdog = Watchdog() if processes.method_of(context) == "fork" else None
        self._board = TaskQueue() if spec.shared else None
        try:
            # Both before the first fork: what is touched after it is copied, page by page.
            if spec.restart:
                exit_reason.begin()
            self._spare = [self._take_reader() for _ in range(self._count)][::-1]
            for worker in range(self._count):
                self._add(worker)
        except BaseException:
            self.close()
            raise
        self._watch()

    def _watch(self) -> None:
        # torch's own table of worker pids: a SIGCHLD then raises in the main thread, with the signal's name.
        self._unwatch()
        if self._zygote is not None or self._board is not None or self._spec.restart:
            # Not this process' children; or tasks that are asked for again, of which a signal in between would lose
            # count. Their sentinels tell as soon.
            return
        pids = tuple(m.process.pid for m in self._members if not (m.leaving or m.gone))
        self._watched = True  # first: Ctrl-C may come at any moment
        signal_handling._set_worker_pids(id(self), pids)
        signal_handling._set_SIGCHLD_handler()

    def _unwatch(self) -> None:
        if self._watched:
            with contextlib.suppress(ValueError):  # interrupted before they were entered, or when they were taken out
                signal_handling._remove_worker_pids(id(self))
            self._watched = False

    def alive(self) -> int:
        return sum(not (m.leaving or m.gone or m.dead) for m in self._members)

    def grow(self) -> None:
        """One worker more, who gets tasks of its own."""
        self._add(len(self._members))
        self._watch()

    def resize(self, n: int) -> None:
        if self._finishing or self._closed:
            return
        with self._lock:
            self._sweep()
            stay = [m for m in self._members if not (m.leaving or m.gone or m.dead)]
            for member in stay:
                if member.id >= n:
                    member.reader.arena.stop = True  # before it takes another task
                    self.retire(member.place)
            self._count = n
            self._missing = sorted(set(range(n)) - {m.id for m in stay})
            self._add_one()
            for reader in self._readers:
                reader.arena.workers = n
            self._watch()

    def _add_one(self) -> None:
        """Starts one of those that are to come. A fork takes 5 ms of the consumer's time, and several in a row would be
        a pause, so they take no more than a fifth of it. The first one is not to be waited for."""
        began = time.monotonic()
        if self._missing and (began >= self._next_add or not self.alive()):
            try:
                self._add(self._missing.pop(0))
            except OSError as e:
                if e.errno not in SHORT:
                    raise
                self._missing.clear()
                self._count = self.alive()
                logger.warning("no worker more than %s can be started: %s", self._count, e.strerror)
            self._watch()
            now = time.monotonic()
            self._next_add = now + 4 * (now - began)

    def _add(self, id_: int) -> None:
        reader = self._take_reader()
        reader.arena.forget()
        held = {r.worker for r in self._ready}
        places = [m.place for m in self._members if m.gone and m.place not in held]
        self._enter(id_, places[0] if places else len(self._members), reader)

    def _enter(self, id_: int, place: int, reader: SlotReader) -> WorkerHandle:
        reader.arena.workers, reader.arena.epoch = self._count, self._epoch
        tasks, outbox = os.pipe()
        try:
            inbox, results = os.pipe()
        except OSError:
            os.close(tasks)
            os.close(outbox)
            raise
        os.set_blocking(inbox, False)
        member = WorkerHandle(place, id_, reader, Outbox(outbox), Reader(inbox, self._ready))
        self._members[place : place + 1] = [member]
        self._by_inbox[inbox] = member
        try:
            member.process = self._start(member, tasks, results)
        except BaseException:
            member.leaving = member.gone = True
            del self._by_inbox[inbox]
            os.close(outbox)
            os.close(inbox)
            raise
        finally:
            os.close(tasks)
            os.close(results)
        self.processes.append(member.process)
        for poll in (self._poll, member.poll):
            poll.register(inbox, select.POLLIN)
        self._poll.register(member.process.sentinel, select.POLLIN)
        return member

    @property
    def finishing(self) -> bool:
        """The board takes no task any more."""
        return self._finishing

    def kept(self, place: int) -> tuple[int, int] | None:
        """The task before which a worker noted its random state."""
        return self._members[place].reader.arena.kept

    def life(self, place: int) -> Life:
        """What is known of a worker."""
        m = self._members[place]
        a, p = m.reader.arena, m.process
        return Life(m.id, p.pid, p.exitcode, m.hand, a.at, a.kept, a.pss, a.serving, m.hung, m.leaving)

    def replace(self, place: int, tasks: Sequence[tuple[int, Task]]) -> None:
        """Another process for a worker that is gone: same id, place and memory, and its random state as it was noted.
        Of one that was to leave, others do what it had in hand.

        Args:
            place: of the worker.
            tasks: what it is to do first, with the epoch of each.
        """
        with self._lock:
            old = self._members[place]
            arena = old.reader.arena
            self._forget(old)
            if arena.filling >= 0:
                old.reader.release(arena.filling)
            if old.leaving and self._board is not None and not self._finishing:
                self._spare.append(old.reader)
                for epoch, task in tasks:
                    self._board.put(epoch, task.number, pickle.dumps(task.indices, protocol=5))
                return
            arena.stop, arena.hand, arena.filling, arena.at, arena.serving = False, None, -1, (0, 0), False
            arena.owed = len(tasks) if self._board is not None else 0
            member = self._enter(old.id, place, old.reader)
            self._private = self._private or self._board is not None
            for epoch, task in tasks:
                again = task.indices if type(task.indices) is RetryTask else None
                member.given += again is None or not again.replay
                payload = pickle.dumps(task.indices, protocol=5)
                member.outbox.put(Kind.TASK, place, epoch, task.number, payload=payload)
            if self._finishing and self._board is None:
                member.outbox.put(Kind.STOP, place, 0, 0)

    def _forget(self, m: WorkerHandle) -> None:
        """Lets go of a process that is gone."""
        m.gone = True
        m.process.join(KILLED_S if m.hung else None)
        self.processes.remove(m.process)
        if self._by_inbox.pop(m.inbox.fd, None) is not None:
            self._ignore(m.inbox.fd)
            os.close(m.inbox.fd)
            os.close(m.outbox.fd)
        self._ignore(m.process.sentinel)

    def _take_reader(self) -> SlotReader:
        if self._spare:
            return self._spare.pop()
        reader = self._arenas.pop() if self._arenas else SlotReader(Arena())
        reader.lock_with(self.locker)
        self._readers.append(reader)
        return reader

    def _start(self, member: WorkerHandle, tasks: int, results: int) -> Any:
        # A thread may end before the workers do, and PR_SET_PDEATHSIG speaks of the thread that forked.
        method = processes.method_of(self._context)
        known = method != "forkserver" and threading.current_thread() is threading.main_thread()
        parent = self._owner if known else 0
        interruptible = signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        board = self._board
        shared = None if board is None else (Fd(board.fd), Fd(board.memory.fd))
        others: list[int] = []
        if method == "fork":
            others = [fd for m in self._by_inbox.values() for fd in (m.inbox.fd, m.outbox.fd)]
            others += [board.outbox.fd] if board is not None and not board.ended else []
        if method in ("spawn", "forkserver"):
            why = "" if self._zygote is None else self._zygote.why()
            if why:
                raise WorkerDiedError(f"No worker can be started: {why}.", [], [])
            if self._zygote is None or self._zygote.killed:
                from .fork_server import ForkServer

                if self._zygote is not None:
                    self._zygote.close(0.0)
                self._zygote = ForkServer(self._context, self._spec, parent)
            fds = [tasks, results, member.reader.arena.fd]
            fds += [board.fd, board.memory.fd] if board is not None else []
            return self._zygote.start(member.place, member.id, fds, board is not None, interruptible)
        ends = Fd(tasks), Fd(results), Fd(member.reader.arena.fd), shared
        process = self._context.Process(
            target=main, args=(self._spec, member.place, member.id, ends, others, parent, interruptible)
        )
        process.daemon = True
        _have(PIPES_OF_A_FORK, tasks)
        with own_fork(), signals.waits() if method == "fork" else contextlib.nullcontext():
            process.start()
        return process

    def submit(self, worker: int | None, epoch: int, task: Task) -> None:
        payload = pickle.dumps(task.indices, protocol=5)
        if worker is None:
            assert self._board is not None
            self._board.put(epoch, task.number, payload)
            if self._missing:
                with self._lock:
                    self._add_one()
            return
        member = self._members[worker]
        member.given += 1
        member.outbox.put(Kind.TASK, worker, epoch, task.number, payload=payload)

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        self._epoch = epoch
        payload = pickle.dumps(shared_seed)
        for member in self._members:
            if self._board is not None:
                member.reader.arena.epoch = epoch
            elif not member.leaving:
                member.outbox.put(Kind.RESUME, member.place, epoch, 0, payload=payload)

    def retire(self, worker: int) -> None:
        member = self._members[worker]
        if not member.leaving:
            member.leaving = True
            member.outbox.put(Kind.STOP, worker, 0, 0)

    def finish(self) -> None:
        if self._finishing:
            return
        self._finishing = True
        if self._board is not None:
            self._board.end()
            return
        for member in self._members:
            member.outbox.put(Kind.STOP, member.place, 0, 0)

    def receive(self, timeout: float | None, worker: int | None = None) -> Received | None:
        # To be woken by the others' results would be for nothing, and costs both sides a switch. But an iterable
        # dataset's end is to be known early, as in torch.
        alone = worker is not None and self._spec.kind != _DatasetKind.Iterable
        poll = self._members[worker].poll if alone and worker is not None else self._poll
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = PARENT_POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            if self._spec.timed:
                left = min(left, look_s(self._spec.sample_timeout))
            if not self._flush():
                left = min(left, FLUSH_S)
            events = poll.poll(min(left, PARENT_POLL_S) * 1000)
            with self._lock:
                self._feed(events)
                if self._ready:
                    break
                if self._spec.timed and not events:
                    self._check_late()
                self._check_alive(events)
            if not events:
                self._look_for_stuck()
            if not events and deadline is not None and time.monotonic() >= deadline:
                return None
        r = self._ready.popleft()
        member = self._members[r.worker]
        member.answered += 1
        return Received(self.hold, r, member.reader)

    def _flush(self) -> bool:
        if self._board is not None and not self._private:
            return self._board.flush()
        if self._board is not None and not self._board.flush():
            return False
        done = True
        for m in self._members:
            if m.outbox.waiting and not (m.gone or m.dead or m.outbox.flush()):
                done = False
        return done

    def _feed(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            member = self._by_inbox.get(fd)
            if member is not None and not member.inbox.feed():  # it has gone, or is about to
                self._ignore(fd)
                member.poll.register(member.process.sentinel, select.POLLIN)
            elif member is None:
                self._sweep()

    def _ignore(self, fd: int) -> None:
        for poll in (self._poll, *(m.poll for m in self._members)):
            with contextlib.suppress(KeyError):
                poll.unregister(fd)

    def _check_alive(self, events: list[tuple[int, int]]) -> None:
        """Raises when a worker that was not told to leave is gone, and all that it sent has been read."""
        woken = {fd for fd, _ in events}
        dead = []
        for m in self._members:
            if m.gone or m.dead or (not m.hung and processes.alive(m.process)):
                continue
            if not self._may_leave(m):
                dead.append(m)
            elif m.process.sentinel in woken:
                self._ignore(m.process.sentinel)  # it was told to leave, and did
                self._bury(m)
        if not dead or any(fd in woken for fd in self._by_inbox):
            return  # look again when the pipe is silent
        self._feed(self._poll.poll(0))
        if self._ready:
            return  # what it sent before it died
        for m in dead:
            m.hand, m.reader.arena.hand = m.reader.arena.hand, None
            if self._spec.restart:
                m.dead = True  # until another takes its place
            else:
                self.retire(m.place)
            self._ignore(m.process.sentinel)
        pids = ", ".join(str(m.process.pid) for m in dead if m.process.pid) or "none"
        why = "" if self._zygote is None else self._zygote.why()
        tasks = [m.hand[1] for m in dead if m.hand is not None and m.hand[0] == self._epoch]
        raise WorkerDiedError(
            f"DataLoader worker (pid(s) {pids}) exited unexpectedly{why and f': {why}'}",
            [m.id for m in dead],
            tasks if len(tasks) == len(dead) and self._board is not None else None,
            [m.place for m in dead],
        )

    def _check_late(self) -> None:
        """Kills workers that take too long over a sample, once they have said where they are. Asking takes a while, and
        one that is only a little late has gone on then: it lives."""
        for m in self._members:
            arena = m.reader.arena
            hand, at = arena.hand, arena.at
            late = 0 < at[1] < time.monotonic_ns()
            if late and not (m.gone or m.dead) and hand is not None and processes.alive(m.process):
                stack = hangs.stack(m.process.pid, arena.stack)
                if (arena.hand, arena.at) != (hand, at):
                    continue
                m.hung = stack
                m.process.kill()
                m.process.join(KILLED_S)  # what waits for a device or a file server may not even die
                if (arena.hand, arena.at) != (hand, at):
                    arena.at = 0, 0  # it went on before the signal came: the sample it is at now is not to blame

    def _look_for_stuck(self) -> None:
        """Says of a worker that hangs since it was forked why it does, and replaces it where that can be done."""
        if self._watchdog is None:
            return
        for m in self._members:
            pid = m.process.pid
            if m.gone or m.leaving or m.answered or not self._watchdog.stuck(pid):
                continue
            words = self._watchdog.words(pid)
            if self._spec.timed:
                words += f". It is here:\n{hangs.stack(pid, m.reader.arena.stack)}\n"
            anew = self._spec.restart and (self._watchdog.closed or may_start_anew(self._spec.dataset))
            if anew and not self._watchdog.closed:
                self._watchdog.closed, self._context = True, multiprocessing.get_context("forkserver")
            warnings.warn(f"{words}{': that is done now' if anew else ''}.", StokerWarning, stacklevel=6)
            if anew:
                os.kill(pid, signal.SIGKILL)  # and another takes its place

    def _may_leave(self, m: WorkerHandle) -> bool:
        """Whether one that has ended was to end, and owes nothing."""
        if self._board is not None:  # one that was killed may have taken a task in that very instant
            return (m.leaving or self._finishing) and m.reader.arena.hand is None and not m.process.exitcode
        return m.leaving or (self._finishing and m.given == m.answered)

    def _sweep(self) -> None:
        """Buries those that were told to leave, and did."""
        for m in self._members:
            if m.leaving and not (m.gone or m.dead or processes.alive(m.process)) and self._may_leave(m):
                self._ignore(m.process.sentinel)
                self._bury(m)

    def _bury(self, m: WorkerHandle) -> None:
        """Frees what a worker that was told to leave, and did, no longer needs. Its memory stays, warm."""
        if self._board is None or not m.leaving:
            return  # until the pool is closed
        while True:
            with contextlib.suppress(BlockingIOError):
                if m.inbox.feed():
                    continue
            break
        self._spare.append(m.reader)
        self._forget(m)

    def hold(self, reader: SlotReader, slot: int, used: int) -> Any:
        """The slot's bytes for the consumer: in place within the budget, copied out beyond it."""
        budget = self.budget
        count = sum(len(r.leases) for r in self._readers)
        if count < budget.lease_slots and used + sum(r.leased_bytes() for r in self._readers) <= budget.lease_bytes:
            return reader.lease(slot, used)
        return reader.copy(slot, used)

    def pss(self) -> dict[int, int]:
        """Bytes of memory by worker, as each measured itself last; those that have not yet are left out."""
        found = {m.id: m.reader.arena.pss for m in self._members if not m.gone}
        return {id_: nbytes for id_, nbytes in found.items() if nbytes}

    def shrink(self) -> None:
        """Gives back the memory of slots that are free."""
        for reader in self._readers:
            reader.shrink()

    def slots(self) -> int:
        """How many there are now, of all workers."""
        return sum(r.arena.slots for r in self._readers)

    def close(self, leave_s: float = processes.LEAVE_S) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._unwatch()
        for reader in self._readers:
            reader.arena.stop = True
        for member in self._members:
            if not member.gone:
                self.retire(member.place)
        for member in self._by_inbox.values():
            os.close(member.inbox.fd)
            os.close(member.outbox.fd)
        if self._board is not None:
            self._board.close()
        processes.join(self.processes, leave_s)
        if self._zygote is not None:
            self._zygote.close(leave_s)
        for reader in self._readers:
            reader.reclaim()
        self._arenas.extend(r for r in self._readers if not r.worn)
