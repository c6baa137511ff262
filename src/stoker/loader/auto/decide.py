"""Implements ``num_workers="auto"`` before each iterator of a loader, and connects a running iterator with
``Controller`` and ``InProcessTrial``.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from ...core import resources
from ...core.elsewhere import elsewhere
from ...core.handles import held
from ...core.options import AutoWorkers
from ...core.types import Batch, Index, LoaderLike
from ...sampling.stateful import is_stateful
from ...sampling.worker_init import only_seeds
from ...transport.task_queue import supported
from ...workers.can_start import why_not
from ...workers.exceptions import note
from ...workers.faults import validate
from ..describe import name_of
from ..inline_iterator import here
from ..scheduler import MakeBatch, Retreat
from .controller import Controller
from .in_process import BatchMaker, InProcessTrial, Worked
from .limits import cores_here, first_guess, per_core

if TYPE_CHECKING:
    from ...sampling.cursor import Cursor
    from ..loader_state import LoaderState
    from ..pool_iterator import PoolIter

logger = logging.getLogger("stoker.loader.engine")


def begin(loader: LoaderLike, state: LoaderState, kind: str) -> None:
    """Sets a loader's ``num_workers`` before one of its iterators is created."""
    if kind != "thread" and not (state.manual_workers or state.own_workers):
        state.no_workers = state.no_workers or why_not(loader)
    if state.no_workers:
        state.first_count_reason = state.first_count_reason or f"0 workers: {state.no_workers}"
        leave_workers(loader, state)
        return
    if not state.first_count_reason:
        count, state.first_count_reason = first_guess(loader)
        loader.num_workers = AutoWorkers(count)
        if not _only_workers(loader, kind):
            # Weak references, here and below: the state holds their callers, and its cursor holds the dataset.
            ref, fatal = weakref.ref(loader), state.fatal_samples
            state.place = InProcessTrial(
                lambda: "samples kill workers" if fatal else held(getattr(ref(), "dataset", None)),
                functools.partial(_opened, state.iterators),
            )
    place = state.place
    if place is None:
        return
    m = state.metrics
    worked = Worked(m.tasks, m.fetch_ns + m.collate_ns, m.cpu_ns)
    words = place.begin(state.cursor is not None and state.cursor.finished, worked)
    if place.was_called and not place.here and held(loader.dataset):
        # Workers forked now would share what the dataset has opened in this process, so none are forked.
        place.state = BatchMaker.ONLY_HERE
        words = f"{held(loader.dataset)} in the script's own process, and workers would have to share it"
    before = int(loader.num_workers)
    if place.here:
        if before:
            place.workers, place.prefetch = before, loader.prefetch_factor or 1
        loader.num_workers, loader.prefetch_factor = AutoWorkers(0), None
    else:
        _with_workers(loader, place)
    if words:
        _record(state, f"{before} -> {int(loader.num_workers)} workers: {words}")


def retreat(loader: LoaderLike, state: LoaderState) -> Retreat:
    """Returns the fallback for a loader whose workers, chosen by stoker, cannot work."""
    ref, before = weakref.ref(loader), int(loader.num_workers)
    name = name_of(loader)

    def said(reason: str) -> None:
        loader = ref()
        state.no_workers = reason
        if loader is not None:
            leave_workers(loader, state)
        _record(state, f"{before} -> 0 workers: {reason}")
        sys.stderr.write(f"stoker: {name}: loading batches in the script's own process, without workers: {reason}\n")

    return Retreat(said, state.own_workers == 0, state.changed)


def leave_workers(loader: LoaderLike, state: LoaderState) -> None:
    """Makes a loader run without workers from its next iterator on. If the script created it so, restores the script's
    own random numbers."""
    loader.num_workers = AutoWorkers(0) if state.own_workers is None else 0
    vars(loader).update(prefetch_factor=None, persistent_workers=False, timeout=0)
    state.place = None


def _with_workers(loader: LoaderLike, place: InProcessTrial) -> None:
    """Restores the settings of a loader with workers."""
    if not int(loader.num_workers):
        loader.num_workers, loader.prefetch_factor = AutoWorkers(place.workers), place.prefetch


def maker(loader: LoaderLike, state: LoaderState, cursor: Cursor) -> tuple[MakeBatch | None, Retreat | None]:
    """Returns the function that makes a loader's batches in this process, and the fallback if workers fail; None, None:
    workers make all batches."""
    place = state.place
    if state.own_workers != 0 and (place is None or place.state is BatchMaker.ONLY_WORKERS):
        return None, None
    may = supported() and cursor.saved is None and elsewhere(getattr(loader, "worker_method", "")) is None
    leaves = retreat(loader, state) if may else None
    dataset, collate_fn = loader.dataset, loader.collate_fn
    if state.own_workers == 0 and state.own is not None:
        dataset, collate_fn = state.own  # a cache may hold samples from before the script changed the dataset
    settings = dataset, loader._auto_collation, collate_fn, loader.drop_last
    # Without workers of the script's own, batches that draw must draw from the script's generators.
    seeds = None if state.own_workers == 0 else lambda: (cursor.base_seed, cursor.epoch)
    made = here(*settings, seeds)
    if place is not None:
        return place.timed(made), leaves

    def noted(number: int, indices: Index) -> Batch:
        try:
            return made(number, indices)
        except Exception as e:
            note(e, dataset)
            raise

    return noted, leaves


def tuner(loader: LoaderLike, state: LoaderState) -> Callable[[int], int | None]:
    """Returns the function that the scheduler calls at each delivery. It returns a new number of workers, or None."""
    place, controller = state.place, state.controller
    if controller is None:
        ahead = max(loader.prefetch_factor or 1, getattr(loader, "_ahead", 0))
        n = int(loader.num_workers) or (place.workers if place is not None else 1)
        controller = state.controller = Controller(n, _most(state), ahead)
    controller.begin(0)
    ref = weakref.ref(loader)

    def step(waited_ns: int) -> int | None:
        loader = ref()
        if loader is None or state.manual_workers:
            return None
        if place is not None:
            place.step(waited_ns)
            if place.here:
                return None
            _with_workers(loader, place)  # if a batch failed here
        decision = controller.step(waited_ns)
        if decision is None:
            return None
        _record(state, decision.reason)
        loader.num_workers = AutoWorkers(decision.workers)
        return decision.workers

    return step


def _only_workers(loader: LoaderLike, kind: str) -> bool:
    """Whether workers must make all batches: user code may behave differently in the script's own process, or the
    loader has settings that concern workers."""
    return bool(
        kind != "process"
        or loader._dataset_kind != _DatasetKind.Map
        or loader.persistent_workers
        or (loader.worker_init_fn is not None and not only_seeds(loader.worker_init_fn))  # seeds are set per task
        or loader.multiprocessing_context is not None
        or loader.timeout
        or getattr(loader, "sample_timeout", None)
        or validate.asked(loader)
        or isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
        or is_stateful(loader.dataset)
    )


def _opened(iterators: Iterable[PoolIter]) -> str | None:
    """What workers have opened and keep; "" for nothing, None if unknown."""
    found = [it.opened() for it in list(iterators)]
    return next(filter(None, found), None if None in found else "")


def _most(state: LoaderState) -> Callable[[], int]:
    """Returns the maximum number of workers: limited by memory, with more per core the more they wait."""
    before, ref = [0, 0], weakref.ref(state)

    def most() -> int:
        state = ref()
        if state is None:
            return 1
        m = state.metrics
        cpu, wall = m.cpu_ns, m.fetch_ns + m.collate_ns + m.transport_ns
        busy = (cpu - before[0]) / max(1, wall - before[1])  # since the last call
        before[:] = cpu, wall
        each = max(m.worker_pss.values(), default=resources.WORKER_BYTES)
        return min(per_core(1 - busy) * cores_here(), max(1, resources.workers_bound(each)[0]))

    return most


def _record(state: LoaderState, decision: str) -> None:
    logger.info(decision)
    state.metrics.decisions.append(decision)
