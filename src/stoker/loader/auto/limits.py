"""Limits on the number of workers: cores, memory, and space for batches. Settings beyond a limit are never tried."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from torch.utils.data import IterableDataset

from ...core import resources
from ...core.options import AutoWorkers, Budget
from ...core.types import LoaderLike

PER_CORE = 16  # if workers nearly always wait
BUSY_PER_CORE = 2  # if workers compute: one that is briefly off its core does not stall the others
PINNED_SHARE = 4  # at most this fraction of the memory granted is page-locked


def cores_here() -> int:
    """Cores for this process' workers: those granted, divided among the ranks of the node."""
    return max(1, resources.cores_granted() // resources.ranks())


def first_count(dataset: object) -> AutoWorkers:
    """Initial value of "auto": a worker per core; one for an iterable dataset, which only the dataset can shard."""
    return AutoWorkers(1 if isinstance(dataset, IterableDataset) else cores_here())


def first_guess(loader: LoaderLike) -> tuple[int, str]:
    """Number of workers for an unmeasured loader, and the reason: one per granted core, divided among the ranks of the
    node, but no more than fit in memory and no more than there are batches."""
    if isinstance(loader.dataset, IterableDataset):
        return 1, "1 worker: only the iterable dataset itself knows how to divide its samples among workers"
    cores, ranks = cores_here(), resources.ranks()
    bounds = [(cores, f"a first guess from {cores} core{'s' if cores > 1 else ''} granted")]
    if ranks > 1:
        bounds = [(cores, f"a first guess from {resources.cores_granted()} cores granted to {ranks} ranks")]
    bounds.append(resources.workers_bound(resources.WORKER_BYTES))
    try:
        batches = len(loader)
        bounds.append((batches, f"{batches} batch{'es' if batches != 1 else ''} in an epoch"))
    except Exception:  # no length, or not known yet
        pass
    n, words = min(bounds, key=lambda b: b[0])
    n = max(1, n)
    return n, f"{n} worker{'s' if n > 1 else ''}: {words}"


class Limit(NamedTuple):
    """One bound."""

    name: str  # cores, memory, shm, budget, pinned
    most: int  # workers
    words: str  # the numbers from which it follows


def per_core(waits: float) -> int:
    """Maximum workers per core if they wait for this share of their time: twice what keeps the core busy."""
    return max(BUSY_PER_CORE, min(PER_CORE, math.ceil(BUSY_PER_CORE / max(1e-3, 1 - waits))))


def limits(
    *, waits: float, each: int, nbytes: int, prefetch: int, budget: Budget, shm: bool = False, pinned: bool = False
) -> list[Limit]:
    """The limits on this machine, the tightest first. ``waits``: share of a worker's time that is not CPU time.
    ``each``: bytes of memory per worker; ``nbytes``: per batch. ``prefetch``: batches in flight per worker. ``shm``:
    batches pass through /dev/shm, as with torch's own loader."""
    cores, of_host = resources.cores_granted(), os.cpu_count() or 1
    of = f"{cores} core{'s' if cores > 1 else ''} granted" + (f" of {of_host}" if of_host > cores else "")
    each_core = per_core(waits)
    how = f"which wait {waits:.0%} of their time" if waits > 0.1 else "which compute"
    out = [Limit("cores", each_core * cores, f"{of}, {each_core} workers each, {how}")]
    most, words = resources.workers_bound(max(each, 1 << 20))
    out.append(Limit("memory", most, words))
    flight = max(1, nbytes) * prefetch
    out.append(
        Limit("budget", budget.flight_bytes // flight, f"{budget.flight_bytes >> 20:,} MB for batches made ahead")
    )
    shm_free = resources.shm_free() if shm else None
    if shm_free is not None:
        out.append(Limit("shm", shm_free // flight, f"{shm_free >> 20:,} MB free in /dev/shm"))
    if pinned:
        locked = resources.memory_granted() // PINNED_SHARE
        out.append(Limit("pinned", locked // flight, f"{locked >> 20:,} MB may be page-locked"))
    return sorted((Limit(b.name, max(1, b.most), b.words) for b in out), key=lambda b: b.most)
