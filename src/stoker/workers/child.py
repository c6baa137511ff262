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
import select
import signal
import time
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _DatasetKind

from .. import seeding
from ..collate import SlotCollate
from ..stage import Stages
from ..transport.codec import Encoded
from ..transport.record import INLINE, Kind, Reader, Record, send
from ..transport.ring import ALIGN, Arena, SlotWriter
from .protocol import WorkerSpec

POLL_MS = 500  # how late a worker may notice that its parent has gone without a signal
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
