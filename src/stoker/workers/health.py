"""Finds worker processes that have died, take too long over a sample, or are deadlocked since they were forked.

The pool calls these checks while it waits for a result.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from ..core import processes
from ..core.errors import WorkerDiedError
from ..core.warn import warn_user
from ..transport.arena import TaskId
from . import fork_lock_detector, hangs
from .can_start import can_start_elsewhere
from .launch import Launcher
from .protocol import WorkerSpec, WorkersUselessError
from .worker_handle import ProcessState, WorkerHandle

KILLED_S = 1.0  # how long to wait for a killed worker to end


def has_ended(worker: WorkerHandle) -> bool:
    """Whether a worker's process has ended and the pool has not dealt with that yet."""
    if worker.state is not ProcessState.RUNNING:
        return False
    return bool(worker.timeout_stack) or not processes.alive(worker.process)


def died_error(dead: list[WorkerHandle], reason: str, epoch: int, shared: bool) -> WorkerDiedError:
    pids = ", ".join(str(w.process.pid) for w in dead if w.process.pid) or "none"
    tasks = [w.current_task.number for w in dead if w.current_task is not None and w.current_task.epoch == epoch]
    return WorkerDiedError(
        f"DataLoader worker (pid(s) {pids}) exited unexpectedly{reason and f': {reason}'}",
        [w.id for w in dead],
        tasks if len(tasks) == len(dead) and shared else None,
        [w.place for w in dead],
    )


def kill_late(workers: Iterable[WorkerHandle]) -> None:
    """Kills workers that take too long over a sample, after they have written their stack. That takes a while, so a
    worker that has meanwhile gone on to another sample is spared."""
    for worker in workers:
        arena = worker.reader.arena
        if not 0 < arena.position()[1] < time.monotonic_ns() or worker.state is not ProcessState.RUNNING:
            continue
        before = _where(worker)
        if before[0] is None or not processes.alive(worker.process):
            continue
        pid = worker.process.pid
        assert pid is not None
        stack = hangs.stack(pid, arena.stack_fd)
        if _where(worker) != before:
            continue
        worker.timeout_stack = stack
        worker.process.kill()
        worker.process.join(KILLED_S)  # a process in uninterruptible sleep (disk, file server) may not even die
        if _where(worker) != before:
            arena.set_position(0, 0)  # it went on before the signal arrived: its present sample is not to blame


def _where(worker: WorkerHandle) -> tuple[TaskId | None, tuple[int, int]]:
    arena = worker.reader.arena
    return arena.current_task, arena.position()


def replace_deadlocked(workers: Iterable[WorkerHandle], launcher: Launcher, spec: WorkerSpec) -> None:
    """Warns about workers that are deadlocked since they were forked. If others can be started without forking this
    process, kills them, and the pool replaces them."""
    detector = launcher.fork_locks
    if detector is None:
        return
    for worker in workers:
        pid = worker.process.pid
        if worker.is_gone or worker.leaving or worker.answered or pid is None or not detector.is_deadlocked(pid):
            continue
        text = detector.message(pid)
        if spec.timed:
            text += f"\nIts stack:\n{hangs.stack(pid, worker.reader.arena.stack_fd)}\n"
        replace = spec.restart and (detector.closed or can_start_elsewhere(spec.dataset))
        if replace and not detector.closed:
            launcher.stop_forking()
        remedy = "Restarting it with forkserver." if replace else 'Use multiprocessing_context="forkserver".'
        warn_user(f"{text} {remedy}")
        if replace:
            os.kill(pid, signal.SIGKILL)


def check_locks(workers: Iterable[WorkerHandle], launcher: Launcher) -> None:
    """Raises WorkersUselessError if a worker is deadlocked, even after its first batches. For dispensable workers."""
    detector = launcher.fork_locks
    running = [w for w in workers if w.state is ProcessState.RUNNING] if detector is not None else []
    for worker in running:
        pid, arena = worker.process.pid, worker.reader.arena
        if pid is None or (arena.ready and arena.current_task is None):
            continue  # it waits for a task
        assert detector is not None
        if detector.is_deadlocked(pid, fork_lock_detector.RETREAT_S):
            for other in running:
                other.process.kill()
            raise WorkersUselessError(detector.message(pid))
