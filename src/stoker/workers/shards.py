"""Runs several parts of an iterable dataset in each worker, after a resume with a different number of workers.

How such a dataset divides itself depends on the number of workers in ``get_worker_info()``. So a resumed run keeps the
number that it began with: each worker makes several parts, and each part sees its own worker info.

With a different number of ranks, some parts come from another rank (``WorkerSpec.places``). Then the dataset must ask
``sampling.shard``, which answers for the part. A dataset that does not ask would read other samples: that is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

from ..core.errors import StateError, WorkerDiedError, one_line
from ..core.random_state import RandomState
from ..core.types import Batch, Index
from ..sampling.order import Task
from ..sampling.shard import ShardStart, here
from ..transport.messages import Times
from .exceptions import Caught
from .protocol import Pool, Result, WorkerSpec
from .task_runner import TaskRunner


class OfShard(NamedTuple):
    """A task's indices and the part that they belong to."""

    shard: int
    indices: Index


class Shards:
    """Does the tasks of one worker that has several parts. See ``TaskRunner``."""

    exhausted = False  # whether the part that ran last has ended
    read_threads = 0  # a stream's samples come one after the other

    def __init__(
        self,
        spec: WorkerSpec,
        worker: int,
        dataset: object,
        # returns the runner for a part, from its number and dataset; all parts but the first get copies
        make: Callable[[int, object], TaskRunner],
        # sets what ``get_worker_info()`` returns for a part
        set_worker_info: Callable[[int, ShardStart, object], None],
        # seeds the process-wide random state, which is switched with the part, from base seed and number; None if each
        # part has its own random state
        seed: Callable[[int, int], object] | None,
    ) -> None:
        mine = range(worker, spec.shards, spec.num_workers)
        try:
            datasets = [dataset if i == worker else copy.deepcopy(dataset) for i in mine]
        except Exception as e:
            raise StateError(
                f"{spec.shards} parts of a {type(dataset).__name__} continue on {spec.num_workers} workers, so some "
                f"workers need several copies of it, but it cannot be copied ({one_line(e)}). Set "
                f"num_workers={spec.shards}"
            ) from e
        self._spec, self._set_worker_info = spec, set_worker_info
        self._random: dict[int, RandomState] = {}  # of parts not running now, if random state is process-wide
        self._runners: dict[int, TaskRunner] = {}
        for shard, own in zip(mine, datasets, strict=True):
            if seed is not None:
                place = spec.place(shard)
                seed(place.base_seed, place.worker)
                self._random[shard] = RandomState()
            self._runners[shard] = make(shard, own)
        self._last: TaskRunner | None = None
        self._unsure = {i for i in mine if spec.places}  # parts that have not asked ``shard`` yet

    def _enter(self, shard: int) -> TaskRunner:
        runner = self._runners[shard]
        if runner is not self._last:
            if self._random:
                if self._last is not None:
                    self._random[self._last.id] = RandomState()
                self._random[shard].restore()
            place = self._spec.place(shard)
            here.shard, here.asked = place.shard, False
            self._set_worker_info(shard, place, runner.dataset)
            self._last = runner
        return runner

    def start(self) -> None:
        for shard in self._runners:
            self._enter(shard).start()
            self._unsure -= {shard} if here.asked else set()

    def resume(self, shared_seed: int | None) -> None:
        for shard in self._runners:
            self._enter(shard).resume(shared_seed)

    def wants(self, indices: OfShard) -> bool:
        return self._runners[indices.shard].wants(indices.indices)

    def run(self, epoch: int, number: int, indices: OfShard) -> Batch:
        runner = self._enter(indices.shard)
        data = runner.run(epoch, number, indices.indices)
        if type(data) is not Caught and indices.shard in self._unsure and not here.asked:
            self.exhausted = False
            return self._not_asked(runner)
        self._unsure.discard(indices.shard)
        self.exhausted = runner.exhausted
        return data

    def _not_asked(self, runner: TaskRunner) -> Batch:
        try:
            raise StateError(
                f"{type(runner.dataset).__name__} does not ask stoker.shard() which part to read, so how ranks divide "
                "it is unknown. Only as many ranks as saved this run can resume it"
            )
        except StateError:
            return runner.error()

    def error(self) -> Caught:
        assert self._last is not None
        return self._last.error()

    def times(self, transport_ns: int, cpu_ns: int) -> Times:
        return (0, 0, transport_ns, cpu_ns) if self._last is None else self._last.times(transport_ns, cpu_ns)


class ShardPool:
    """A pool in which each part has its own number, as a worker would. See ``workers.protocol.Pool``."""

    ahead = 0

    def __init__(self, pool: Pool, shards: int, workers: int) -> None:
        self._pool, self._shards, self._workers = pool, shards, workers
        self.resize, self.alive, self.finish, self.close = pool.resize, pool.alive, pool.finish, pool.close
        self._shard_of: dict[tuple[int, int], int] = {}
        self._open = set(range(shards))

    def submit(self, worker: int | None, task: Task) -> None:
        assert worker is not None
        self._shard_of[task.epoch, task.number] = worker
        self._pool.submit(worker % self._workers, Task(task.epoch, task.number, OfShard(worker, task.indices)))

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        self._shard_of = {k: v for k, v in self._shard_of.items() if k[0] >= epoch - 1}
        self._pool.resume(epoch, shared_seed)

    def retire(self, worker: int) -> None:
        self._open.discard(worker)
        if not any(shard % self._workers == worker % self._workers for shard in self._open):
            self._pool.retire(worker % self._workers)

    def receive(self, timeout: float | None, worker: int | None = None) -> Result | None:
        try:
            result = self._pool.receive(timeout, None if worker is None else worker % self._workers)
        except WorkerDiedError as e:
            e.workers = tuple(s for s in range(self._shards) if s % self._workers in e.workers)
            raise
        if result is not None:
            result.worker = self._shard_of.pop((result.epoch, result.task), result.worker)
        return result
