"""The actor on a node, with its own pool of worker processes.

The actor unpickles no user objects. Its workers do; they are forked from a clean interpreter (``fork_server``) and
share the memory of a dataset's cache, which lasts as long as they work for this dataset. Each call waits in its own
thread; one more thread reads the pool's results. When a worker dies, the call with its task answers ``Died``, and the
trainer runs the task itself: so the cause is determined in one place.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from stoker.core import resources
from stoker.core.errors import WorkerDiedError, one_line
from stoker.core.options import Budget
from stoker.core.types import Batch, Index
from stoker.core.version import __version__
from stoker.sampling.order import Task
from stoker.transport.arena import TaskId
from stoker.transport.codec import decode
from stoker.transport.mapping import Memory
from stoker.transport.messages import Times
from stoker.transport.thread_slots import HeapWriter
from stoker.workers.process_pool import ProcessPool
from stoker.workers.protocol import SeededTask

from .cluster_cache import NodeCache
from .shipment import Shipment, ShippedSpec

POLL_S = 0.5  # how late the thread that reads results may notice that it must end
CONNECT_S = 10.0
WARM_S = 60.0  # how long to wait for the first worker to be ready before giving out tasks anyway
LOOK_S = 0.02  # between two checks whether it is ready
MAX_DEATHS = 8  # of workers without a batch in between; after more, the node is unusable


class Packed(NamedTuple):
    """A batch as ``transport.codec`` encodes it, in Ray's object store."""

    number: int  # of its task
    meta: bytes  # see ``codec.decode``
    leaves: Memory  # an array of uint8, or bytes
    times: Times  # spent on the task on the node

    def unpack(self, slots: HeapWriter) -> Batch:
        """Decodes the batch into the memory of the process that calls this."""
        leaves = self.leaves
        if isinstance(leaves, (bytes, bytearray)):
            return decode(self.meta, bytearray(leaves))
        if not slots.take(len(leaves)):
            return decode(self.meta, np.array(leaves))
        whole = slots.whole
        assert whole is not None
        whole[: len(leaves)] = leaves
        slots.sent()
        return decode(self.meta, whole)


class Died(NamedTuple):
    """A worker died while it did a task."""

    number: int  # of the task
    reason: str  # how it died


class Facts(NamedTuple):
    """What must be the same on both sides to get the same bits, and the node that reports it."""

    host: str  # the node's name
    pid: int  # of the actor
    cores: int  # number of cores that its processes may use
    versions: dict[str, str]  # by name, of Python and of the packages that make batches


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Returns the versions of Python, of what always makes batches, and of other packages; "" if not installed."""
    from importlib import metadata

    out = {"python": platform.python_version().rpartition(".")[0], "stoker": __version__}
    out |= {"torch": torch.__version__, "numpy": np.__version__, "byte order": sys.byteorder}
    for name in packages:
        out[name] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            out[name] = metadata.version(name)
    return out


def _end_with(trainer: tuple[str, int]) -> None:
    try:
        connection = socket.create_connection(trainer, timeout=CONNECT_S)
    except OSError:
        return  # a firewall, for instance: Ray notices later that the trainer has gone
    connection.settimeout(None)
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(0)  # the workers end when their pipes are closed


class NodeWorkers:
    """The actor of a node, called by ``nodes`` and ``pool``. ``own_process``: this process does nothing else."""

    def __init__(self, own_process: bool = True) -> None:
        if own_process:  # the fork server's interpreter would import the actor's main module, which is Ray's
            sys.modules["__main__"].__file__ = None
        self._pool: ProcessPool | None = None
        self._key = ""
        self._round = -1
        self._lock = threading.Lock()
        self._waiting: dict[TaskId, tuple[Future[Packed | Died], Index]] = {}
        self._deaths = 0
        self._broken = ""
        self._reader: threading.Thread | None = None
        self._caches: list[NodeCache] = []
        self._ports: list[int] = []

    def facts(self, packages: list[str], trainer: tuple[str, int] | None) -> Facts:
        """Returns versions and the number of cores. This process ends when its connection to ``trainer`` ends."""
        if trainer is not None:
            threading.Thread(target=_end_with, args=(trainer,), name="stoker_trainer", daemon=True).start()
        return Facts(socket.gethostname(), os.getpid(), resources.read().cores, versions(packages))

    def start(self, key: str, shipment: Shipment, workers: int, host: str) -> list[int]:
        """Replaces the workers by new ones for a dataset, and waits for the first of them: otherwise the first batch's
        time would include the workers' imports. ``key`` identifies the pickled dataset; calling again with the same key
        changes nothing. ``host``: this node's address. Returns for each cache of the dataset the port at which other
        nodes may ask for samples; 0 if they may not."""
        if key == self._key and not self._broken:
            return self._ports
        self.stop()
        with self._lock:
            shipment.settle()
            spec = ShippedSpec.of(shipment, workers)
            memory = resources.memory_granted()
            self._broken, self._deaths, self._round = "", 0, -1
            self._caches = [cache for cache in spec.caches if cache is not None]
            self._ports = [cache.serve(host, shipment.secret) for cache in self._caches]
            pool = ProcessPool(spec, multiprocessing.get_context("spawn"), Budget(memory // 4), [])
            self._pool, self._key = pool, key
            self._reader = threading.Thread(target=self._read, args=(pool,), name="stoker_node", daemon=True)
            self._reader.start()
        deadline = time.monotonic() + WARM_S
        while time.monotonic() < deadline:
            with self._lock:
                if self._pool is not pool or any(worker.reader.arena.ready for worker in pool.workers):
                    break
            time.sleep(LOOK_S)
        return self._ports

    def set_peers(self, key: str, peers: list[tuple[str, list[int]]]) -> None:
        """Sets the nodes that may be asked for samples: addresses, and the ports that ``start`` returned there."""
        with self._lock:
            if key == self._key:
                for k, cache in enumerate(self._caches):
                    cache.set_peers([(host, ports[k]) for host, ports in peers if len(ports) > k and ports[k]])

    def make(
        self, key: str, round_: int, seeds: tuple[int, int], tasks: list[tuple[int, Index]]
    ) -> list[Packed | Died]:
        """Runs tasks, given by number and indices, and waits for them. ``key``: see ``start``. ``round_``: number of
        the loader's epoch over all its iterators; tasks of earlier rounds are dropped. ``seeds``: the iterator's base
        seed, and the present epoch. Raises RuntimeError if these workers have been replaced, or cannot work."""
        base_seed, epoch = seeds
        futures: list[Future[Packed | Died]] = []
        with self._lock:
            if self._pool is None or key != self._key or round_ < self._round or self._broken:
                raise RuntimeError(self._broken or "these workers have been replaced")
            if round_ > self._round:
                self._round = round_
                self._pool.resume(round_, None)
                self._drop_all("an epoch was left early")
            for number, indices in tasks:
                known = self._waiting.get(TaskId(round_, number))
                if known is not None:  # an earlier, late call waits for the same task
                    futures.append(known[0])
                    continue
                future: Future[Packed | Died] = Future()
                futures.append(future)
                seeded = SeededTask(base_seed, epoch - round_, indices)
                self._waiting[TaskId(round_, number)] = future, seeded
                self._pool.submit(None, Task(round_, number, seeded))
        return [future.result() for future in futures]

    def stop(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
            self._key = ""
            self._drop_all("the workers were ended")
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.join()  # it reads descriptors that ``close`` closes
        if pool is not None:
            pool.close()
        while self._caches:
            self._caches.pop().close()

    def _drop_all(self, reason: str) -> None:
        for (_, number), (future, _) in self._waiting.items():
            future.set_result(Died(number, reason))
        self._waiting.clear()

    def _read(self, pool: ProcessPool) -> None:
        """Hands results to the calls that wait for them, until the pool is replaced or becomes unusable."""
        try:
            while self._pool is pool:
                self._read_one(pool)
        except Exception as e:
            with self._lock:
                if self._pool is pool:
                    self._give_up(one_line(e))

    def _read_one(self, pool: ProcessPool) -> None:
        try:
            result = pool.receive(POLL_S)
        except WorkerDiedError as e:
            with self._lock:
                if self._pool is pool:
                    self._after_death(pool, e)
            return
        if result is None:
            return
        with self._lock:
            waiting = self._waiting.pop(TaskId(result.epoch, result.task), None)
        if waiting is None:
            result.drop()
            return
        self._deaths = 0
        try:
            meta, memory = result.encoded()
            leaves = memory if isinstance(memory, (bytes, bytearray)) else np.frombuffer(memory, np.uint8)
            waiting[0].set_result(Packed(result.task, meta, leaves, result.times))
        except Exception as e:
            waiting[0].set_exception(e)
            raise

    def _after_death(self, pool: ProcessPool, e: WorkerDiedError) -> None:
        """Replaces each dead worker, and answers the call with its task."""
        for place in e.places:
            dead = pool.workers[place]
            self._deaths += 1
            reason = dead.how_it_ended()
            if self._deaths > MAX_DEATHS or (not dead.reader.arena.ready and self._deaths > 2):
                self._give_up(f"its workers die, the last one {reason}")
                return
            pool.replace(place, [])
            if dead.current_task is None:  # it may have taken any waiting task off the queue
                for (round_, number), (_, indices) in self._waiting.items():
                    pool.submit(None, Task(round_, number, indices))
            elif (waiting := self._waiting.pop(dead.current_task, None)) is not None:
                waiting[0].set_result(Died(dead.current_task.number, f"a worker {reason}"))

    def _give_up(self, reason: str) -> None:
        self._broken = reason
        for future, _ in self._waiting.values():
            future.set_exception(RuntimeError(reason))
        self._waiting.clear()
        pool, self._pool = self._pool, None
        with contextlib.suppress(Exception):
            if pool is not None:
                pool.close(0.0)
