"""A worker process from the inside: tasks in, batches out, until it is told to leave.

It leaves, too, when its task pipe ends, when its parent has gone (prctl(2), ``PR_SET_PDEATHSIG``, and a look at
getppid(2) twice a second), and when nobody reads its results.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import time
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

from ..core import resources
from ..core.random_state import RandomState
from ..sampling import seeding
from ..transport.arena import ALIGN, Arena
from ..transport.codec import Encoded
from ..transport.messages import INLINE, Kind, Reader, Record, pack, send
from ..transport.slots import SlotWriter
from ..transport.task_queue import take
from . import hangs, native_threads, signals
from .collate import SlotCollate
from .exceptions import Caught
from .idle import Idle
from .protocol import PROBED, PROBING, RetryTask, WorkerReply, WorkerSpec
from .task_runner import TaskRunner

if TYPE_CHECKING:
    from .shards import Shards

PR_SET_PDEATHSIG = 1
FIRST_LOOK_NS = 50_000_000  # a worker weighs itself when its first batch is out
LOOK_SHARE = 500  # and then so seldom that it costs 0.2 % of its time; a look walks the page tables
KEEP_NS = (
    20_000_000  # between two notes of the random state, 32 us each: what is done again by a replacement takes half
)


class Fd:
    """A file descriptor that follows its process object to the child, under fork, spawn and forkserver."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(dup: Any) -> Fd:
    return Fd(dup.detach())


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:  # it went in between
        os._exit(1)


Ends: TypeAlias = tuple[Fd, Fd, Fd, tuple[Fd, Fd] | None]
"""A worker's descriptors: read end of its own task pipe, write end of its own result pipe, its arena, and where tasks
are shared the board's pipe and memory."""


def main(
    spec: Any,
    place: int,
    worker: int,
    ends: Ends,
    others: list[int],
    parent: int,
    interruptible: bool,
    alive: Fd | None = None,
) -> None:
    """The life of a worker process.

    Args:
        spec: what to do: a ``WorkerSpec``, or one that is ``zygote.Pickled``.
        place: what its records say of whom they come from.
        worker: this worker's id.
        ends: its descriptors.
        others: descriptors inherited by fork that would keep other pipes open.
        parent: pid to die with, or 0 when that is not known (forkserver; a thread that may end).
        interruptible: whether SIGINT is to get through; it is blocked while a worker starts.
        alive: stays open as long as this process lives, which somebody watches.
    """
    # What was garbage in the parent is not collected here: another loader's iterator would try to end its workers.
    # And pages that the collector does not touch stay shared.
    gc.freeze()
    try:
        signals.begin()
        if interruptible:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for fd in others:
            with contextlib.suppress(OSError):
                os.close(fd)
        if parent:
            die_with_parent(parent)
        signal_handling._set_worker_signal_handlers()
        if hasattr(torch.multiprocessing, "_set_thread_name"):
            torch.multiprocessing._set_thread_name("stoker_worker")
        native_threads.cap_process()
        _Worker(spec if isinstance(spec, WorkerSpec) else spec.load(), place, worker, ends).run()
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the parent says it; and whoever does not read any more does not want to hear it
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # on the way out it would be a traceback


def introduce(worker: int, workers: int, seed: int, dataset: Any) -> None:
    """What ``get_worker_info()`` says from now on."""
    dataset = getattr(dataset, "stands_for", None) or dataset
    torch_worker._worker_info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)


class _Worker:
    def __init__(self, spec: WorkerSpec, place: int, worker: int, ends: Ends) -> None:
        tasks, results, memory, shared = ends
        self.spec, self.place, self.id, self.results = spec, place, worker, results.fd
        self.arena = Arena(os.dup(memory.fd))
        self.writer = SlotWriter(self.arena)
        self.reader = Reader(tasks.fd)
        self.shared = shared[0].fd if shared else -1
        self.board = Arena(os.dup(shared[1].fd)) if shared else None
        self.workers, self.epoch = spec.num_workers, 0
        self.seed = seeding.seed_worker(spec.base_seed, worker)
        self.collate = SlotCollate(spec.collate_fn, self.writer, spec.auto_collation)
        self.collate.install()
        self.phase, self.marked, self.restart = 0, False, spec.restart
        self.limit_ns = int(spec.sample_timeout * 1e9)
        if spec.timed:
            self.arena.stack = hangs.offer()
        self.keep_ns = 0 if spec.keeps else 1 << 62
        self.body: TaskRunner | Shards
        if spec.shards:
            from .shards import Shards

            self.body = Shards(spec, worker, spec.dataset, self._shard, introduce, seeding.seed_worker)
        else:
            self.body = self._shard(worker, spec.dataset)
        self.idle = Idle(self.reader.fd, self.shared)
        self.parent = os.getppid()
        self.cpu = 0
        self.look_ns = time.perf_counter_ns() + FIRST_LOOK_NS

    def _shard(self, worker: int, dataset: Any) -> TaskRunner:
        return TaskRunner(
            self.spec, worker, dataset, self.collate, "process", seeding.seed_task, self.mark, RandomState
        )

    def run(self) -> None:
        self._introduce()
        self.body.start()
        if self.keep_ns == 0 and self.arena.state:
            RandomState.from_bytes(self.arena.state).restore()
        os.set_blocking(self.reader.fd, False)
        self._warm()
        self.cpu = time.thread_time_ns()
        self.arena.serving = True
        if self.board is None:
            self._serve_own()
        else:
            self._serve_any(self.board)

    def _warm(self) -> None:
        """Touches what the first batch will need, while the parent starts the next worker. In a child that was forked
        the first touch of a page copies it, 3 us each, and a first batch is some 400 of them. What fails here, in a
        function of torch that somebody has exchanged, fails again with the first batch, where it can be told."""
        with contextlib.suppress(Exception):
            indices = pickle.loads(pickle.dumps(list(range(64)), protocol=5))
            rows = torch.empty(len(indices), 1, device="cpu").unbind()
            blob = Encoded(torch.stack(rows)).lay().blob()
            pack(Kind.BATCH, self.place, 0, 0, -1, 0, 0, self.body.times(0, 0), blob)
            if not self.keep_ns:
                RandomState().to_bytes()

    def _introduce(self) -> None:
        if isinstance(self.body, TaskRunner):
            introduce(self.id, self.workers, self.seed, self.body.dataset)

    def _serve_own(self) -> None:
        """Tasks that are meant for this worker."""
        while (r := self._own()) is not None:
            if r.kind == Kind.RESUME:
                self.body.resume(pickle.loads(r.payload))
            elif not self.arena.stop:
                if not self.restart:
                    self._task(r)
                    continue
                self.arena.hand = r.epoch, r.task
                self._task(r)
                self.arena.hand = None

    def _own(self) -> Record | None:
        """The next record for this worker; None: leave."""
        while not self.reader.ready:
            try:
                if not self.reader.feed():
                    return None
            except BlockingIOError:
                if not self.idle.wait(self.workers) and os.getppid() != self.parent:
                    return None
        self._awake()
        r = self.reader.ready.popleft()
        return None if r.kind == Kind.STOP else r

    def _serve_any(self, board: Arena) -> None:
        """Tasks that are meant for whoever is free."""
        arena = self.arena
        for _ in range(arena.owed):
            own = self._own()
            if own is None:
                return
            self._one(own)
        while not arena.stop:
            try:
                r = take(self.shared, board)
            except BlockingIOError:
                ready = self.idle.wait(arena.workers)
                if not ready and os.getppid() != self.parent:
                    return
                if any(fd == self.reader.fd for fd, _ in ready):
                    return  # told to leave, or nobody is there to tell
                continue
            if r is None:
                return
            self._awake()
            self._one(r)

    def _awake(self) -> None:
        if self.idle.over():
            self.cpu = time.thread_time_ns()  # what was spent on waiting is not the next task's

    def _one(self, r: Record) -> None:
        arena = self.arena
        if r.epoch != arena.epoch:
            return  # of an epoch that was left early
        arena.hand = r.epoch, r.task
        if self.workers != arena.workers:
            self.workers = arena.workers
            self._introduce()
        if r.epoch != self.epoch:
            self.epoch = r.epoch
            self.body.resume(None)
        self._task(r)
        arena.hand = None

    def mark(self, position: int, samples: int) -> None:
        """Where in its task the worker is; see ``protocol``. And when it is late."""
        self.marked = True
        until = time.monotonic_ns() + samples * self.limit_ns if samples else 0
        self.arena.at = self.phase | position + 2, until

    def _task(self, r: Record) -> None:
        indices = pickle.loads(r.payload)
        if not self.body.wants(indices):
            return
        if type(indices) is RetryTask:
            assert isinstance(self.body, TaskRunner)  # of a map-style dataset
            self.arena.at = 0, 0
            if indices.probe:
                self.phase = PROBING
                self.body.probe(indices)
                self.phase = PROBED
                self.mark(-1, 0)
            if indices.replay:
                self.body.run(r.epoch, r.task, indices)
                self.writer.cancel()
                return
        now = time.perf_counter_ns()
        if now > self.keep_ns:
            self.arena.keep(r.epoch, r.task, RandomState().to_bytes())
            self.keep_ns = now + KEEP_NS
        data = self.body.run(r.epoch, r.task, indices)
        if self.marked:  # no sample is being loaded any more
            self.arena.at = self.phase | 1, 0
            self.phase, self.marked = 0, False
        if self.body.exhausted:
            self.writer.cancel()
            send(self.results, Kind.END, self.place, r.epoch, r.task)
            return
        if type(data) is Caught or (type(data) is WorkerReply and type(data.data) is Caught):
            self.writer.cancel()
        began = time.perf_counter_ns()
        try:
            reply = self._encode(data)
        except Exception:  # a batch that cannot be pickled; torch's loader would hang here
            self.writer.cancel()
            reply = self._encode(self.body.error())
        encoded = time.perf_counter_ns() - began
        cpu = time.thread_time_ns()  # a system call, so only one a task
        times = self.body.times(encoded, cpu - self.cpu)
        self.cpu = cpu
        slot, used, meta, payload = reply
        del data
        self.writer.sent()
        send(self.results, Kind.BATCH, self.place, r.epoch, r.task, slot, used, meta, times, payload)
        if began > self.look_ns:
            self._weigh()

    def _weigh(self) -> None:
        began = time.perf_counter_ns()
        self.arena.pss = resources.pss()
        now = time.perf_counter_ns()
        self.look_ns = now + LOOK_SHARE * (now - began)
        self.cpu = time.thread_time_ns()

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
