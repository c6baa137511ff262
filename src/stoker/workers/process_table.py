"""The processes of one pool: their pipes, their memory, and the descriptors that the pool polls."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from multiprocessing.process import BaseProcess

from ..core import processes
from ..transport.arena import Arena
from ..transport.messages import Message, Outbox, Reader
from ..transport.slots import PageLocker, SlotReader
from ..transport.task_queue import TaskQueue
from .health import KILLED_S
from .launch import Launcher
from .worker_handle import ProcessState, WorkerHandle


class ProcessTable:
    """Starts and removes processes; the pool decides when."""

    def __init__(
        self, launcher: Launcher, queue: TaskQueue | None, arenas: list[SlotReader], locker: PageLocker | None
    ) -> None:
        self.launcher = launcher
        self.workers: list[WorkerHandle] = []  # by place
        self.processes: list[BaseProcess] = []  # those not yet joined
        self.readers: list[SlotReader] = []  # memory of all workers, past and present
        self.free_readers: list[SlotReader] = []  # memory of workers that have left, or are still to be started
        self.ready: deque[Message] = deque()  # records read but not yet received
        self.poll = select.poll()  # result pipes and process sentinels
        self._queue = queue
        self._arenas = arenas
        self._locker = locker
        self._by_inbox: dict[int, WorkerHandle] = {}

    def take_reader(self) -> SlotReader:
        """Returns memory for a worker."""
        if self.free_readers:
            return self.free_readers.pop()
        reader = self._arenas.pop() if self._arenas else SlotReader(Arena())
        reader.lock_with(self._locker)
        self.readers.append(reader)
        return reader

    def free_place(self) -> int:
        """Returns a place whose worker is gone and whose results have been read, or a new one."""
        unread = {r.worker for r in self.ready}
        return next((w.place for w in self.workers if w.is_gone and w.place not in unread), len(self.workers))

    def start(self, id_: int, place: int, reader: SlotReader) -> WorkerHandle:
        tasks, outbox = os.pipe()
        try:
            inbox, results = os.pipe()
        except OSError:
            os.close(tasks)
            os.close(outbox)
            raise
        os.set_blocking(inbox, False)
        worker = WorkerHandle(place, id_, reader, Outbox(outbox), Reader(inbox, self.ready))
        self.workers[place : place + 1] = [worker]
        self._by_inbox[inbox] = worker
        pipes = [fd for w in self._by_inbox.values() for fd in (w.inbox.fd, w.outbox.fd)]
        if self._queue is not None and self._queue.write_fd is not None:
            pipes.append(self._queue.write_fd)
        try:
            worker.process = self.launcher.start(worker, tasks, results, self._queue, pipes)
        except BaseException:
            worker.leaving = True
            worker.state = ProcessState.GONE
            del self._by_inbox[inbox]
            os.close(outbox)
            os.close(inbox)
            raise
        finally:
            os.close(tasks)
            os.close(results)
        self.processes.append(worker.process)
        for poll in (self.poll, worker.poll):
            poll.register(inbox, select.POLLIN)
        self.poll.register(worker.process.sentinel, select.POLLIN)
        return worker

    def read(self, events: list[tuple[int, int]]) -> bool:
        """Reads results into ``ready``. Returns whether the end of a process was among the events."""
        ended = False
        for fd, _ in events:
            worker = self._by_inbox.get(fd)
            if worker is None:
                ended = True
            elif not worker.inbox.feed():  # the worker has ended, or is about to
                self.stop_polling(fd)
                worker.poll.register(worker.process.sentinel, select.POLLIN)
        return ended

    def is_inbox(self, fds: set[int]) -> bool:
        """Whether one of these descriptors is a result pipe."""
        return any(fd in fds for fd in self._by_inbox)

    def stop_polling(self, fd: int) -> None:
        """Takes a descriptor out of all polls."""
        for poll in (self.poll, *(w.poll for w in self.workers)):
            with contextlib.suppress(KeyError):
                poll.unregister(fd)

    def remove(self, worker: WorkerHandle) -> None:
        """Joins a process that has ended, and closes its pipes."""
        worker.state = ProcessState.GONE
        worker.process.join(KILLED_S if worker.timeout_stack else None)
        self.processes.remove(worker.process)
        if self._by_inbox.pop(worker.inbox.fd, None) is not None:
            self.stop_polling(worker.inbox.fd)
            os.close(worker.inbox.fd)
            os.close(worker.outbox.fd)
        self.stop_polling(worker.process.sentinel)

    def close(self, leave_s: float) -> None:
        """Ends all processes, which have been told to leave, and frees slots that the consumer does not hold."""
        for worker in self._by_inbox.values():
            os.close(worker.inbox.fd)
            os.close(worker.outbox.fd)
        if self._queue is not None:
            self._queue.close()
        processes.join(self.processes, leave_s)
        self.launcher.close(leave_s)
        for reader in self.readers:
            reader.reclaim()
