"""How many workers: an empty loop over throw-away workers, one count after another, and the knee of the curve.

The loop runs on workers of its own, over indices of its own: the loader's sampler, its generator and the process'
random state are not touched, and a dataset's copy in those workers dies with them. A model in the loop would hide what
is measured, so there is none.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.distributed import DistributedSampler

from .. import machine, seeding
from ..errors import StokerError
from ..options import Budget, Measured
from ..source import FeistelSampler, Task
from ..workers.draws import Noticed
from ..workers.process import ProcessPool
from ..workers.protocol import WorkerSpec
from ..workers.thread import ThreadPool

KNEE = 0.97  # the smallest count within 3 % of the best
WINDOW_S = 0.4  # one measurement; long enough that a scheduler tick of a busy machine is noise
TASKS = 3  # and at least so many tasks for each worker
ROUNDS = 2  # each count is measured so often, the rounds interleaved
LIMIT_S = 5.0  # all together; a dataset too slow for it gets the first guess
WAITING = 0.5  # workers that use less CPU than this share of their time wait for something, and more of them may help
SEED = 0x570C


class _ProbeError(StokerError):
    """The probe cannot go on; its words are the reason."""


def knee(rates: dict[int, float]) -> int:
    """The smallest count whose rate is within 3 % of the best.

    Example:
        >>> knee({1: 50.0, 2: 98.0, 4: 100.0})
        2
    """
    best = max(rates.values())
    return min(n for n, rate in rates.items() if rate >= KNEE * best)


def measure(loader: Any, budget: Budget, method: str = "process") -> Measured:
    """Measures ``loader``'s workers, all of one kind. Never raises for what its dataset does: the reason says it."""
    began = time.monotonic()
    cores = machine.cores_granted()
    if loader._dataset_kind == _DatasetKind.Iterable:
        return Measured(1, reason="an iterable dataset: only itself knows how to share its samples among workers")
    draw = Draw.like(loader)
    if draw is None:
        return Measured(
            cores, reason=f"a sampler of its own, whose order is not to be disturbed: {cores} cores granted"
        )
    pool: ProcessPool | ThreadPool | None = None
    try:
        with seeding.unchanged():
            pool = _pool(spec_of(loader, 1), loader.multiprocessing_context, budget, method)
            prober = _Prober(pool, draw, time.monotonic() + LIMIT_S)
            rates = prober.curve(cores)
    except _ProbeError as e:
        return Measured(
            cores,
            reason=f"{e}: {cores} cores granted",
            seconds=time.monotonic() - began,
            failed=e.__cause__ is not None,
        )
    except Exception as e:
        return Measured(
            cores, reason=f"could not measure ({type(e).__name__}: {e})", seconds=time.monotonic() - began, failed=True
        )
    finally:
        if pool is not None:
            pool.close(leave_s=0.0)
    n = knee(rates)
    curve = ", ".join(f"{k}: {rate:.3g}" for k, rate in rates.items())
    reason = f"measured batches/s by workers: {curve}; {n} is the smallest within 3 % of the best"
    return Measured(n, rates, prober.inline_rate(), reason, time.monotonic() - began)


def spec_of(loader: Any, num_workers: int) -> WorkerSpec:
    """What a probe's workers are told."""
    return WorkerSpec(
        kind=loader._dataset_kind,
        dataset=loader.dataset,
        auto_collation=loader._auto_collation,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        base_seed=SEED,
        init_fn=loader.worker_init_fn,
        num_workers=num_workers,
        shared_seed=None,
        task_seeds=True,
    )


def _pool(spec: WorkerSpec, context: Any, budget: Budget, method: str) -> ProcessPool | ThreadPool:
    if method == "thread":
        return ThreadPool(spec, budget, Noticed(), [])
    return ProcessPool(spec, context or torch.multiprocessing, budget, [])


class Draw:
    """Draws tasks like a loader's, from a generator of its own.

    Args:
        keys: what may be drawn.
        size: samples in a task; 0 for a single key.
    """

    def __init__(self, keys: Any, size: int) -> None:
        self._keys, self._size, self._rng = keys, size, random.Random(SEED)

    @classmethod
    def like(cls, loader: Any) -> Draw | None:
        """None where only the loader's sampler could."""
        plain = (
            RandomSampler,
            SequentialSampler,
            SubsetRandomSampler,
            WeightedRandomSampler,
            DistributedSampler,
            FeistelSampler,
        )
        if type(loader.sampler) not in plain or type(loader.batch_sampler) not in (BatchSampler, type(None)):
            return None
        keys = getattr(loader.sampler, "indices", None) if type(loader.sampler) is SubsetRandomSampler else None
        try:
            keys = range(len(loader.dataset)) if keys is None else keys
        except TypeError:
            return None
        if not len(keys):
            return None
        return cls(keys, 0 if loader.batch_sampler is None else loader.batch_sampler.batch_size)

    def __call__(self) -> Any:
        if not self._size:
            return self._one()
        return [self._one() for _ in range(self._size)]

    def _one(self) -> Any:
        return self._keys[self._rng.randrange(len(self._keys))]


class _Prober:
    def __init__(self, pool: ProcessPool | ThreadPool, draw: Draw, deadline: float, workers: int = 1) -> None:
        self._pool, self._draw, self._deadline = pool, draw, deadline
        self._load: list[int] = [0] * workers
        self._sent = 0
        self._finished: list[int] = [0] * workers
        self._wall_ns = self._cpu_ns = self._work_ns = self._done = 0

    def curve(self, cores: int) -> dict[int, float]:
        """Rates by count, from 1 up to where more cannot help."""
        seen: dict[int, list[float]] = {1: [self.rate(1)]}
        most = cores if self._cpu_ns >= WAITING * self._wall_ns else 4 * cores
        counts = [n for n in range(1, most + 1) if n <= 4 or n in (6, 8, 12) or n % 16 == 0 or n == most]
        try:
            for n in counts[1:]:
                seen[n] = [self.rate(n)]
                if seen[n][0] < 0.8 * max(r[0] for r in seen.values()):
                    break  # far past the top
            for _ in range(ROUNDS - 1):
                for n in seen:
                    seen[n].append(self.rate(n))
        except _ProbeError as e:
            if e.__cause__ is not None or len(seen) < min(2, len(counts)):
                raise
        return {n: max(rates) for n, rates in seen.items()}  # noise only ever slows down

    def inline_rate(self) -> float:
        """Tasks per second of fetch and collate alone."""
        return self._done / (self._work_ns / 1e9) if self._work_ns else 0.0

    def rate(self, n: int) -> float:
        """Tasks per second with ``n`` workers kept busy."""
        while len(self._load) < n:
            self._pool.grow()
            self._load.append(0)
            self._finished.append(0)
        while any(self._load[n:]) or not all(self._finished[:n]):
            self._one(n)
        began, count = time.monotonic(), 0
        while count < TASKS * n or time.monotonic() - began < WINDOW_S:
            self._one(n)
            count += 1
        return count / (time.monotonic() - began)

    def _one(self, n: int) -> None:
        """Keeps two tasks at each of the first ``n`` workers and waits for one result."""
        for worker in range(n):
            while self._load[worker] < 2:
                self._pool.submit(worker, 0, Task(self._sent, self._draw()))
                self._load[worker] += 1
                self._sent += 1
        result = self._pool.receive(max(0.0, self._deadline - time.monotonic()))
        if result is None:
            raise _ProbeError(f"too slow to be measured in {LIMIT_S:g} s")
        self._load[result.worker] -= 1
        self._finished[result.worker] += 1
        data = result.take()
        if isinstance(data, ExceptionWrapper):
            raise _ProbeError("a sample could not be loaded in a worker") from RuntimeError(data.exc_msg)
        fetch, collate, transport, cpu = result.times
        self._wall_ns += fetch + collate + transport
        self._work_ns += fetch + collate
        self._cpu_ns += cpu
        self._done += 1
