"""Starts a pool of worker processes, with fewer of them if the system is short of resources."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from ..core.errors import BudgetError
from ..core.options import Budget
from ..core.warn import warn_user
from ..transport.slots import PageLocker, SlotReader
from .launch import SHORTAGES
from .process_pool import ProcessPool
from .protocol import ProcessContext, WorkerSpec


def start(
    spec: WorkerSpec,
    context: ProcessContext | ModuleType,
    budget: Budget,
    arenas: list[SlotReader],
    locker: PageLocker | None,
    parts: int = 0,  # of an iterable dataset, which a run keeps; with fewer workers, some have several
    later: bool = False,
) -> tuple[ProcessPool, WorkerSpec]:
    """Starts a ``ProcessPool``, with fewer workers if the system lacks processes, descriptors or memory for all. Raises
    BudgetError if not even one worker can be started."""
    wanted, reason = spec.num_workers, ""
    while True:
        try:
            pool = ProcessPool(spec, context, budget, arenas, locker, later)
            break
        except OSError as e:
            if e.errno not in SHORTAGES:
                raise
            reason = str(e.strerror)
            if spec.num_workers == 1:
                raise BudgetError(
                    f"cannot start a worker: {reason}. Use num_workers=0, which loads in this process, or raise the "
                    "limits on open files and processes (ulimit -n, ulimit -u)"
                ) from e
            spec = replace(spec, num_workers=spec.num_workers // 2, shards=parts)
            while len(arenas) > spec.num_workers:
                arenas.pop().arena.close()  # the shortage may be of descriptors
    if spec.num_workers != wanted:
        text = f"{spec.num_workers} workers instead of {wanted}, because no more can be started: {reason}."
        if not (spec.task_seeds or parts):
            text += " Random augmentation depends on the number of workers, so it differs."
        warn_user(text)
    return pool, spec
