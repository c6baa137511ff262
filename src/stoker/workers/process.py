"""Worker processes: tasks in and results out by pipes of their own, batches through their arena.

The parent never blocks on a worker (``Outbox``), a worker may block on the parent (backpressure), so they cannot wait
for each other. A worker leaves when it is told to, when its task pipe ends, when its parent has gone (prctl(2),
``PR_SET_PDEATHSIG``, and a look at getppid(2) twice a second), and when nobody reads its results.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _DatasetKind

from .. import lifecycle, seeding
from ..collate import SlotCollate
from ..errors import WorkerDiedError
from ..options import Budget
from ..source import Task
from ..stage import Stages
from ..transport.codec import Encoded, decode
from ..transport.record import INLINE, Kind, Outbox, Reader, Record, send
from ..transport.ring import ALIGN, Arena, SlotReader, SlotWriter, own_fork
from .protocol import WorkerSpec

POLL_MS = 500  # how late a worker may notice that its parent has gone without a signal
PARENT_POLL_S = 5.0  # how late the parent may notice a death that no descriptor told; torch's own interval
FLUSH_S = 0.01  # between two looks at a task pipe that was full
PR_SET_PDEATHSIG = 1


class Fd:
    """A file descriptor that follows its process object to the child, under fork, spawn and forkserver."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(dup: Any) -> Fd:
    return Fd(dup.detach())


def _die_with_parent(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:  # it went in between
        os._exit(1)


def main(
    spec: WorkerSpec,
    worker: int,
    tasks: Fd,
    results: Fd,
    memory: Fd,
    others: list[int],
    parent: int,
    interruptible: bool,
) -> None:
    """The life of a worker process.

    Args:
        spec: what to do.
        worker: this worker's id.
        tasks: read end of its own task pipe.
        results: write end of its own result pipe.
        memory: its arena.
        others: descriptors inherited by fork that would keep other pipes open.
        parent: pid to die with, or 0 when that is not known (forkserver; a thread that may end).
        interruptible: whether SIGINT is to get through; it is blocked while a worker starts.
    """
    # What was garbage in the parent is not collected here: another loader's iterator would try to end its workers.
    # And pages that the collector does not touch stay shared.
    gc.freeze()
    try:
        if interruptible:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for fd in others:
            with contextlib.suppress(OSError):
                os.close(fd)
        if parent:
            _die_with_parent(parent)
        signal_handling._set_worker_signal_handlers()
        if hasattr(torch.multiprocessing, "_set_thread_name"):
            torch.multiprocessing._set_thread_name("stoker_worker")
        torch.set_num_threads(1)
        _Worker(spec, worker, tasks.fd, results.fd, Arena(os.dup(memory.fd))).run()
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the parent says it; and whoever does not read any more does not want to hear it
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # on the way out it would be a traceback


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


class _Worker:
    def __init__(self, spec: WorkerSpec, worker: int, tasks: int, results: int, arena: Arena) -> None:
        self.spec, self.id, self.results, self.arena = spec, worker, results, arena
        self.writer = SlotWriter(arena)
        self.reader = Reader(tasks)
        self.collate = SlotCollate(spec.collate_fn, self.writer, spec.auto_collation)
        self.collate.install()
        self.dataset = spec.dataset
        self.stages: Stages | None = None
        self.failed: ExceptionWrapper | None = None
        self.exhausted = False
        self.shared_rng = torch.Generator()
        self.cpu = 0

    def run(self) -> None:
        spec = self.spec
        seed = seeding.seed_worker(spec.base_seed, self.id)
        self._share_seed(spec.shared_seed)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self.id, num_workers=spec.num_workers, seed=seed, dataset=self.dataset
        )
        try:
            if spec.init_fn is not None:
                spec.init_fn(self.id)
            self._begin()
        except Exception:
            self.failed = ExceptionWrapper(where=f"in DataLoader worker process {self.id}")
        poll = select.poll()
        poll.register(self.reader.fd, select.POLLIN)
        parent = os.getppid()
        os.set_blocking(self.reader.fd, False)
        self.cpu = time.thread_time_ns()
        while True:
            while not self.reader.ready:
                try:
                    if not self.reader.feed():
                        return
                except BlockingIOError:
                    if not poll.poll(POLL_MS) and os.getppid() != parent:
                        return
            r = self.reader.ready.popleft()
            if r.kind == Kind.STOP:
                return
            if r.kind == Kind.RESUME:
                self._resume(r)
            elif not self.arena.stop and not self.exhausted:
                self._task(r)

    def _begin(self) -> None:
        spec = self.spec
        self.stages = Stages(spec.kind, self.dataset, spec.auto_collation, self.collate, spec.drop_last)

    def _share_seed(self, shared_seed: int | None) -> None:
        if isinstance(self.dataset, IterDataPipe) and shared_seed is not None:
            self.shared_rng.manual_seed(shared_seed)
            self.dataset = torch.utils.data.graph_settings.apply_random_seed(self.dataset, self.shared_rng)

    def _resume(self, r: Record) -> None:
        self.exhausted = False
        self._share_seed(pickle.loads(r.payload))
        try:
            self._begin()
        except Exception:
            self.failed = ExceptionWrapper(where=f"in DataLoader worker process {self.id}")

    def _task(self, r: Record) -> None:
        data: Any
        if self.failed is not None:
            data, self.failed = self.failed, None
        else:
            try:
                if self.spec.task_seeds:
                    seeding.seed_task(self.spec.base_seed, r.epoch, r.task)
                if self.stages is None:
                    # The reason was told with the first task. torch stumbles over a local it never set, and scripts
                    # see that type.
                    raise UnboundLocalError("no 'fetcher': this worker failed while it was starting")
                data = self.stages.run(pickle.loads(r.payload))
            except Exception as e:
                self.writer.cancel()
                if isinstance(e, StopIteration) and self.spec.kind == _DatasetKind.Iterable:
                    self.exhausted = True
                    send(self.results, Record(Kind.END, self.id, r.epoch, r.task))
                    return
                data = ExceptionWrapper(where=f"in DataLoader worker process {self.id}")
        began = time.perf_counter_ns()
        try:
            reply = self._encode(data)
        except Exception:  # a batch that cannot be pickled; torch's loader would hang here
            self.writer.cancel()
            reply = self._encode(ExceptionWrapper(where=f"in DataLoader worker process {self.id}"))
        stages = self.stages
        encoded = time.perf_counter_ns() - began
        cpu = time.thread_time_ns()  # a system call, so only one a task
        fetch, collate = (stages.fetch_ns, stages.collate_ns) if stages else (0, 0)
        times = fetch, collate, encoded, cpu - self.cpu
        self.cpu = cpu
        slot, used, meta, payload = reply
        del data
        self.writer.sent()
        send(self.results, Record(Kind.BATCH, self.id, r.epoch, r.task, slot, used, meta, times, payload))

    def _encode(self, data: Any) -> tuple[int, int, int, bytes]:
        """Puts a batch where it fits: slot, bytes used, bytes of meta, inline payload (see ``transport.record``)."""
        w = self.writer
        e = Encoded(data).lay(w)
        if w.whole is not None and not e.inside and w.used:
            w.cancel()  # what was collated into the slot did not become part of the batch
            e.lay()
        if not e.inside and e.size + len(e.meta) <= INLINE:
            w.cancel()
            self.collate.expected = 0
            return -1, e.size, len(e.meta), e.blob()
        long = len(e.meta) if len(e.meta) > INLINE else 0
        need = e.size + ALIGN + long
        self.collate.expected = max(need, self.collate.expected - self.collate.expected // 16)
        if need > w.capacity:
            # No slot yet, or one that proved too small: one copy more for what is in it, this once.
            w.cancel()
            e.lay()
            need = e.size + ALIGN + long
            if not w.take(need):
                return -1, e.size, len(e.meta), e.blob()
        assert w.whole is not None
        e.write(w.address)
        w.used = max(e.size, 1)
        if not long:
            return w.slot, w.used, 0, e.meta
        at = w.room(long)
        assert at is not None
        w.whole[at : at + long] = np.frombuffer(e.meta, np.uint8)
        return w.slot, w.used, long, b""


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
