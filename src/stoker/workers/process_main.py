"""The main loop of a worker process: tasks in, batches out, until the worker is told to leave.

1. ``main`` sets up the process: signals, inherited descriptors, native threads.
2. ``_ProcessWorker.run`` calls ``worker_init_fn``, restores the random state of the worker that it replaces, if any,
   and reports that it is ready.
3. ``_serve_own`` or ``_serve_shared`` waits for a task from the worker's own pipe, or from the queue that all read.
4. ``_answer`` makes the batch (``TaskRunner``), puts it into a slot (``_encode``), and sends a record to the parent.

It leaves when it is told to, when its task pipe is closed, and when its results are no longer read. It also leaves when
its parent has gone (prctl(2), ``PR_SET_PDEATHSIG``, and getppid(2) twice a second).
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

from ..core import resources
from ..core.processes import die_with_parent
from ..core.random_state import RandomState
from ..core.types import Batch
from ..sampling import seeding
from ..sampling.generators import find_generators
from ..sampling.shard import ShardStart, set_ranks
from ..transport.arena import ALIGN, Arena
from ..transport.codec import Encoded
from ..transport.messages import INLINE, Kind, Message, Reader, pack, send
from ..transport.slots import SlotWriter
from ..transport.task_queue import take
from . import hangs, native_threads, signals
from .collate import SlotCollate
from .exceptions import is_error
from .handover import Fd, Pickled
from .idle import Idle, Tokens
from .protocol import RetryTask, SeededTask, TaskPhase, WorkerSpec, encode_position
from .task_runner import TaskRunner

if TYPE_CHECKING:
    from .shards import Shards

FIRST_PSS_NS = 50_000_000  # a worker first measures its memory once it is this old,
PSS_SHARE = 500  # then at intervals of this many times the cost: walking the page tables takes 0.2 % of its time
CHECKPOINT_NS = 20_000_000  # between saves of the random state, 32 us each: a replacement repeats half of it on average
NEVER_NS = 1 << 62
# Since torch 2.14 a worker destroys its dataset if nothing else in the process refers to it. Under fork something does:
# the dataset is a copy of the parent's. Before 2.14, a dataset's ``__del__`` never ran in a worker.
_DESTROYS_DATASETS = torch.__version__ >= "2.14"  # torch compares these as versions
_kept: list[WorkerSpec] = []


Ends: TypeAlias = tuple[Fd, Fd, Fd, tuple[Fd, Fd] | None]
"""A worker's descriptors: read end of its task pipe, write end of its result pipe, its arena, and, if tasks are shared,
the queue's pipe and memory."""


def main(
    spec: WorkerSpec | Pickled[WorkerSpec],
    place: int,  # the worker's place in the pool's table, which its records carry
    worker: int,
    ends: Ends,
    others: list[int],  # descriptors inherited by fork that would keep other pipes open
    parent: int,  # pid to die with; 0 if it is not known (forkserver, or a thread that may end first)
    interruptible: bool,  # whether to unblock SIGINT, which is blocked while a worker starts
    alive: Fd | None = None,  # stays open as long as this process lives; the parent polls its other end
) -> None:
    """Runs a worker process from start to end."""
    # The parent's garbage must not be collected here: another loader's iterator would try to end its workers. Also,
    # pages that the collector does not touch stay shared.
    gc.freeze()
    serving: _ProcessWorker | None = None
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
        serving = _ProcessWorker(spec if isinstance(spec, WorkerSpec) else spec.load(), place, worker, ends)
        serving.run()
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the parent reports Ctrl-C itself; a broken pipe means that it no longer reads
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # during exit it would print a traceback
        if serving is not None:
            serving.release()


def set_worker_info(worker: int, workers: int, seed: int, dataset: Any) -> None:
    """Sets what ``get_worker_info()`` returns from now on."""
    dataset = getattr(dataset, "stands_for", None) or dataset
    torch_worker._worker_info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)


def _set_part_info(part: int, place: ShardStart, dataset: object) -> None:
    set_worker_info(place.worker, place.workers, place.base_seed + place.worker, dataset)


class _ProcessWorker:
    """One worker process."""

    def __init__(self, spec: WorkerSpec, place: int, worker: int, ends: Ends) -> None:
        tasks, results, memory, shared = ends
        self.spec = spec
        set_ranks(spec.ranks)
        self.place = place
        self.id = worker
        self.results = results.fd
        self.arena = Arena(os.dup(memory.fd))
        self.writer = SlotWriter(self.arena)
        self.reader = Reader(tasks.fd)
        self.queue = shared[0].fd if shared else -1
        self.queue_memory = Arena(os.dup(shared[1].fd)) if shared else None
        self.says_task = spec.restart or self.queue_memory is not None
        self.workers = spec.num_workers
        self.epoch = 0
        if spec.kept:  # the generators that begin as the script's
            self.at_start = RandomState(find_generators(spec.dataset, spec.collate_fn), ())
        self.seed = seeding.seed_worker(spec.base_seed, worker)
        self.collate = SlotCollate(spec.collate_fn, self.writer, spec.auto_collation)
        self.collate.install()
        self.phase = TaskPhase.BATCH
        self.has_position = False  # whether the arena holds this worker's position in the task
        self.limit_ns = int(spec.sample_timeout * 1e9)
        self.arena.stack_fd = hangs.dump_on_request(all_threads=spec.timed)
        self.next_checkpoint_ns = 0 if spec.saves_rng else NEVER_NS
        self.runner: TaskRunner | Shards
        if spec.shards:
            from .shards import Shards

            self.runner = Shards(spec, worker, spec.dataset, self._shard, _set_part_info, seeding.seed_worker)
        else:
            self.runner = self._shard(worker, spec.dataset)
        self.idle = Idle(self.reader.fd, self.queue)
        self.tokens = Tokens(spec.tokens)
        if spec.kept:
            signals.ignore()
        self.parent = os.getppid()
        self.cpu = 0
        self.next_pss_ns = time.perf_counter_ns() + FIRST_PSS_NS

    def _shard(self, worker: int, dataset: object) -> TaskRunner:
        return TaskRunner(
            self.spec, worker, dataset, self.collate, "process", seeding.seed_task, RandomState, self.on_sample_start
        )

    def run(self) -> None:
        """Answers tasks until the worker must leave."""
        self._set_worker_info()
        self.runner.start()
        checkpoint = self.arena.rng_checkpoint() if self.spec.saves_rng else None
        if checkpoint is not None:
            RandomState.from_bytes(checkpoint[1]).restore()
        os.set_blocking(self.reader.fd, False)
        self.cpu = time.thread_time_ns()
        self.arena.ready = 1
        if self.queue_memory is None:
            self._serve_own()
        else:
            self._serve_shared(self.queue_memory)
            self.arena.left = 1

    def release(self) -> None:
        """Releases all that this worker has made, as torch's workers do when they end. This closes the iterator of an
        iterable dataset, so a generator's ``finally`` runs, and destroys the dataset if torch would."""
        if _DESTROYS_DATASETS:
            torch_worker._worker_info = None
        else:
            _kept.append(self.spec)
        self.__dict__.clear()  # it is part of a reference cycle

    def _set_worker_info(self) -> None:
        if isinstance(self.runner, TaskRunner):
            set_worker_info(self.id, self.workers, self.seed, self.runner.dataset)

    def _serve_own(self) -> None:
        while (r := self._next_own()) is not None:
            if r.kind == Kind.RESUME:
                self.runner.resume(pickle.loads(r.payload))
            elif not self.arena.stop:
                self._run(r)

    def _next_own(self) -> Message | None:
        """Returns the next record for this worker; None if it must leave."""
        while not self.reader.ready:
            try:
                if not self.reader.feed():
                    return None
            except BlockingIOError:
                if not self.idle.wait(self.workers) and (os.getppid() != self.parent or self.tokens.expired()):
                    return None
        self._wait_ended()
        r = self.reader.ready.popleft()
        return None if r.kind == Kind.STOP else r

    def _serve_shared(self, memory: Arena) -> None:
        """Answers tasks from the queue that all workers read, after those of a dead worker in this worker's pipe."""
        arena = self.arena
        for _ in range(arena.private_tasks):
            own = self._next_own()
            if own is None:
                return
            self._run_if_current(own)
        while not arena.stop:
            try:
                r = take(self.queue, memory)
            except BlockingIOError:
                ready = self.idle.wait(arena.workers)
                if not ready and (os.getppid() != self.parent or self.tokens.expired()):
                    return
                if any(fd == self.reader.fd for fd, _ in ready):
                    return  # told to leave, or the parent has gone
                continue
            if r is None:
                return
            self._wait_ended()
            self._run_if_current(r)

    def _wait_ended(self) -> None:
        if self.idle.over():
            self.cpu = time.thread_time_ns()  # processor time spent waiting must not count for the next task

    def _run_if_current(self, r: Message) -> None:
        if r.epoch == self.arena.epoch:  # else it belongs to an epoch that was left early
            self._run(r)

    def _run(self, r: Message) -> None:
        """Answers a task, and publishes its number meanwhile so that the parent knows it if this process dies."""
        if not self.says_task:
            self._answer(r)
            return
        self.arena.current_task = r.epoch, r.task
        if self.queue_memory is not None:
            self._follow(r.epoch)
        self._answer(r)
        if self.has_position:
            self.arena.set_position(0, 0)
            self.has_position = False
        self.arena.current_task = None

    def _follow(self, epoch: int) -> None:
        """Follows changes of epoch and number of workers; if tasks are shared, only tasks and the arena tell them."""
        if self.workers != self.arena.workers:
            self.workers = self.arena.workers
            self._set_worker_info()
        if epoch != self.epoch:
            self.epoch = epoch
            self.runner.resume(None)

    def _begin_anew(self, runner: TaskRunner, base_seed: int) -> None:
        """Becomes what a worker that is started now would be. See ``loader.kept_workers``."""
        self.at_start.restore()
        self.seed = seeding.seed_worker(base_seed, self.id)
        self._set_worker_info()
        runner.begin_anew()

    def on_sample_start(self, sample: int, samples: int) -> None:
        """Publishes which sample of the task is loaded next (see ``faults.guard``), and its deadline."""
        self.has_position = True
        deadline = time.monotonic_ns() + samples * self.limit_ns if samples else 0
        self.arena.set_position(encode_position(self.phase, sample), deadline)

    def _answer(self, r: Message) -> None:
        indices = pickle.loads(r.payload)
        if type(indices) is SeededTask:
            assert isinstance(self.runner, TaskRunner)  # the dataset is map-style
            is_new = self.runner.reseed(indices)
            if is_new and self.spec.kept:
                self._begin_anew(self.runner, indices.base_seed)
            indices = indices.indices
        if not self.runner.wants(indices):
            return
        if type(indices) is RetryTask and self._retry(r, indices):
            return
        now = time.perf_counter_ns()
        if now > self.next_checkpoint_ns:
            self.arena.save_rng_checkpoint(r.epoch, r.task, RandomState().to_bytes())
            self.next_checkpoint_ns = now + CHECKPOINT_NS
        data = self.runner.run(r.epoch, r.task, indices)
        if self.has_position:
            self.on_sample_start(-1, 0)  # no sample is being loaded now
            self.phase = TaskPhase.BATCH
        if self.runner.exhausted:
            self.writer.cancel()
            send(self.results, pack(Kind.END, self.place, r.epoch, r.task))
            return
        if is_error(data):
            self.writer.cancel()
        began = time.perf_counter_ns()
        try:
            reply = self._encode(data)
        except Exception:  # the batch cannot be pickled; torch's loader would hang here
            self.writer.cancel()
            reply = self._encode(self.runner.error())
        encoded = time.perf_counter_ns() - began
        cpu = time.thread_time_ns()  # a system call, so only one per task
        times = self.runner.times(encoded, cpu - self.cpu)
        self.cpu = cpu
        self.arena.read_threads = self.runner.read_threads
        slot, used, meta, payload = reply
        del data
        self.writer.sent()
        send(self.results, pack(Kind.BATCH, self.place, r.epoch, r.task, slot, used, meta, times, payload))
        if began > self.next_pss_ns:
            self._measure_memory()

    def _retry(self, r: Message, task: RetryTask) -> bool:
        """Finds out whether a sample can be loaded, and runs a task again for its effects. Returns whether it is
        done."""
        assert isinstance(self.runner, TaskRunner)  # the dataset is map-style
        if task.probe:
            self.phase = TaskPhase.PROBING
            self.runner.probe(task)
            self.phase = TaskPhase.PROBED
            self.on_sample_start(-1, 0)
        if task.replay:
            self.runner.run(r.epoch, r.task, task)
            self.writer.cancel()
        return task.replay

    def _measure_memory(self) -> None:
        began = time.perf_counter_ns()
        self.arena.pss = resources.pss()
        now = time.perf_counter_ns()
        self.next_pss_ns = now + PSS_SHARE * (now - began)
        self.cpu = time.thread_time_ns()

    def _encode(self, data: Batch) -> tuple[int, int, int, bytes]:
        """Puts a batch where it fits. Returns the ``slot``, ``used``, ``meta`` and ``payload`` of a ``Message``."""
        w = self.writer
        e = Encoded(data).place(w)
        if w.whole is not None and not e.in_slot and w.used:
            w.cancel()  # the tensors collated into the slot did not become part of the batch
            e.place()
        if not e.in_slot and e.size + len(e.meta) <= INLINE:
            w.cancel()
            self.collate.expected = 0
            return -1, e.size, len(e.meta), e.blob()
        long = len(e.meta) if len(e.meta) > INLINE else 0
        need = e.size + ALIGN + long
        self.collate.expected = max(need, self.collate.expected - self.collate.expected // 16)
        if need > w.capacity:
            # There is no slot yet, or it proved too small: then its contents are copied once more.
            w.cancel()
            e.place()
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
