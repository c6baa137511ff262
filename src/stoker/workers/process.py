"""Worker processes: tasks in and results out by pipes of their own, batches through their arena.

The parent never blocks on a worker (``Outbox``), a worker may block on the parent (backpressure), so they cannot wait
for each other. ``child.py`` is what runs in them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _DatasetKind

from .. import lifecycle
from ..errors import WorkerDiedError
from ..options import Budget
from ..source import Task
from ..transport.codec import decode
from ..transport.record import Kind, Outbox, Reader, Record
from ..transport.ring import Arena, SlotReader, own_fork
from .child import Fd, main
from .protocol import WorkerSpec

PARENT_POLL_S = 5.0  # how late the parent may notice a death that no descriptor told; torch's own interval
FLUSH_S = 0.01  # between two looks at a task pipe that was full


@contextlib.contextmanager
def _uninterrupted(method: str) -> Iterator[None]:
    """Around a fork: Ctrl-C waits until the child is in ``main``, which takes it without a traceback."""
    if method != "fork":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Received:
    """A record that arrived, decoded only when it is delivered."""

    __slots__ = ("_pool", "_record", "ended", "epoch", "task", "times", "worker")

    def __init__(self, pool: ProcessPool, r: Record) -> None:
        self._pool, self._record = pool, r
        self.worker, self.epoch, self.task, self.times = r.worker, r.epoch, r.task, r.times
        self.ended = r.kind == Kind.END

    def take(self) -> Any:
        r = self._record
        if r.slot < 0:
            return decode(r.payload[: r.meta], bytearray(r.payload[r.meta :]))
        whole = self._pool.hold(r.worker, r.slot, r.used)
        return decode(whole[r.used - r.meta :].tobytes() if r.meta else r.payload, whole)

    def drop(self) -> None:
        if self._record.slot >= 0:
            self._pool.readers[self.worker].release(self._record.slot)


class ProcessPool:
    """Worker processes of one iterator. See ``workers.protocol.Pool``.

    Args:
        spec: what each worker gets.
        context: a multiprocessing context, or torch.multiprocessing itself.
        budget: how much the consumer may keep in slots.
        arenas: memory of an earlier epoch's workers, used again warm; taken out of this list.
    """

    def __init__(self, spec: WorkerSpec, context: Any, budget: Budget, arenas: list[SlotReader]) -> None:
        self.budget = budget
        self.readers: list[SlotReader] = []
        self.processes: list[Any] = []
        self._spec, self._context, self._arenas = spec, context, arenas
        self._outboxes: list[Outbox] = []
        self._retired: set[int] = set()
        self._owner = os.getpid()
        self._inboxes: dict[int, Reader] = {}
        self._ready: deque[Record] = deque()
        self._poll = select.poll()  # results, and the death of a worker
        self._polls: list[Any] = []  # the results of each alone
        self._given: list[int] = []  # tasks of each worker; counted by the thread that submits
        self._answered: list[int] = []  # counted by the thread that receives
        self._finishing = False
        self._closed = False
        self._watched = False
        try:
            for worker in range(spec.num_workers):
                self._add(worker)
        except BaseException:
            self.close()
            raise
        self._watch()

    def _watch(self) -> None:
        # torch's own table of worker pids: a SIGCHLD then raises in the main thread, with the signal's name.
        self._unwatch()
        signal_handling._set_worker_pids(id(self), tuple(p.pid for p in self.processes))
        signal_handling._set_SIGCHLD_handler()
        self._watched = True

    def _unwatch(self) -> None:
        if self._watched:
            signal_handling._remove_worker_pids(id(self))
            self._watched = False

    def grow(self) -> None:
        """One worker more."""
        self._add(len(self.processes))
        self._watch()

    def _add(self, worker: int) -> None:
        reader = self._arenas.pop() if self._arenas else SlotReader(Arena())
        reader.arena.stop = False
        tasks, outbox = os.pipe()
        inbox, results = os.pipe()
        os.set_blocking(inbox, False)
        self._outboxes.append(Outbox(outbox))
        self._given.append(0)
        self._answered.append(0)
        self._inboxes[inbox] = Reader(inbox, self._ready)
        self.readers.append(reader)
        try:
            # A thread may end before the workers do, and PR_SET_PDEATHSIG speaks of the thread that forked.
            method = getattr(self._context, "get_start_method", lambda: "")()
            known = method != "forkserver" and threading.current_thread() is threading.main_thread()
            ours = [*self._inboxes, *(box.fd for box in self._outboxes)] if method == "fork" else []
            parent = self._owner if known else 0
            interruptible = signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            process = self._context.Process(
                target=main,
                args=(self._spec, worker, Fd(tasks), Fd(results), Fd(reader.arena.fd), ours, parent, interruptible),
            )
            process.daemon = True
            with own_fork(), _uninterrupted(method):
                process.start()
        finally:
            os.close(tasks)
            os.close(results)
        self.processes.append(process)
        self._polls.append(select.poll())
        for poll in (self._poll, self._polls[worker]):
            poll.register(inbox, select.POLLIN)
        self._poll.register(process.sentinel, select.POLLIN)

    def submit(self, worker: int, epoch: int, task: Task) -> None:
        payload = pickle.dumps(task.indices, protocol=5)
        self._given[worker] += 1
        self._outboxes[worker].put(Record(Kind.TASK, worker, epoch, task.number, payload=payload))

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        payload = pickle.dumps(shared_seed)
        for worker, outbox in enumerate(self._outboxes):
            outbox.put(Record(Kind.RESUME, worker, epoch, 0, payload=payload))

    def retire(self, worker: int) -> None:
        if worker not in self._retired:
            self._retired.add(worker)
            self._outboxes[worker].put(Record(Kind.STOP, worker, 0, 0))

    def finish(self) -> None:
        if not self._finishing:
            self._finishing = True
            for worker, outbox in enumerate(self._outboxes):
                outbox.put(Record(Kind.STOP, worker, 0, 0))

    def receive(self, timeout: float | None, worker: int | None = None) -> Received | None:
        # To be woken by the others' results would be for nothing, and costs both sides a switch. But an iterable
        # dataset's end is to be known early, as in torch.
        poll = self._poll if worker is None or self._spec.kind == _DatasetKind.Iterable else self._polls[worker]
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = PARENT_POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            if [box for box in self._outboxes if not box.flush()]:
                left = min(left, FLUSH_S)
            events = poll.poll(min(left, PARENT_POLL_S) * 1000)
            self._feed(events)
            if self._ready:
                break
            self._check_alive(events)
            if not events and deadline is not None and time.monotonic() >= deadline:
                return None
        r = self._ready.popleft()
        self._answered[r.worker] += 1
        return Received(self, r)

    def _feed(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            reader = self._inboxes.get(fd)
            if reader is not None and not reader.feed():  # it has gone, or is about to
                self._ignore(fd)
                worker = list(self._inboxes).index(fd)
                self._polls[worker].register(self.processes[worker].sentinel, select.POLLIN)

    def _ignore(self, fd: int) -> None:
        for poll in (self._poll, *self._polls):
            with contextlib.suppress(KeyError):
                poll.unregister(fd)

    def _check_alive(self, events: list[tuple[int, int]]) -> None:
        """Raises when a worker that was not told to leave is gone, and all that it sent has been read."""
        woken = {fd for fd, _ in events}
        dead = []
        for w, p in enumerate(self.processes):
            if w in self._retired or (self._finishing and self._given[w] == self._answered[w]):
                if p.sentinel in woken:
                    self._ignore(p.sentinel)  # it was told to leave, and did
            elif not p.is_alive():
                dead.append(w)
        if not dead or any(fd in woken for fd in self._inboxes):
            return  # look again when the pipe is silent
        self._feed(self._poll.poll(0))
        if self._ready:
            return  # what it sent before it died
        for w in dead:
            self.retire(w)
        pids = ", ".join(str(self.processes[w].pid) for w in dead)
        raise WorkerDiedError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly", dead)

    def hold(self, worker: int, slot: int, used: int) -> Any:
        """The slot's bytes for the consumer: in place within the budget, copied out beyond it."""
        reader, budget = self.readers[worker], self.budget
        count = sum(len(r.leases) for r in self.readers)
        if count < budget.lease_slots and used + sum(r.leased_bytes() for r in self.readers) <= budget.lease_bytes:
            return reader.lease(slot, used)
        return reader.copy(slot, used)

    def close(self, leave_s: float = lifecycle.LEAVE_S) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._unwatch()
        for reader in self.readers:
            reader.arena.stop = True
        for worker in range(len(self.processes)):
            if worker not in self._retired:
                self.retire(worker)
        for fd in (*self._inboxes, *(box.fd for box in self._outboxes)):
            os.close(fd)
        lifecycle.join(self.processes, leave_s)
        for reader in self.readers:
            reader.reclaim()
        self._arenas.extend(self.readers)
