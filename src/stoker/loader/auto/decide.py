"""What ``num_workers="auto"`` decides before each iterator of a loader, and what connects a running iterator with
``Controller`` and ``Place``.

Nothing is measured before the first batch. A loader begins with a first guess.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from ...core import resources
from ...core.handles import held
from ...core.options import AutoWorkers
from ...core.types import LoaderLike
from ...sampling.stateful import is_stateful
from ...sampling.worker_init import only_seeds
from ...workers.faults import validate
from ..inline_iterator import here
from .controller import Controller
from .in_process import MakeBatch, Place, State, Worked
from .limits import cores_here, first_guess, per_core

if TYPE_CHECKING:
    from ...sampling.cursor import Cursor
    from ..loader_state import LoaderState

logger = logging.getLogger("stoker.loader.engine")


def begin(loader: LoaderLike, state: LoaderState, kind: str) -> None:
    """Sets ``num_workers`` of a loader before an iterator of it is made."""
    if not state.first_count_reason:
        count, state.first_count_reason = first_guess(loader)
        loader.num_workers = AutoWorkers(count)
        if not _only_workers(loader, kind):
            state.place = Place(_why_not_here(loader, state), _opened(state))
    place = state.place
    if place is None:
        return
    m = state.metrics
    worked = Worked(m.tasks, m.fetch_ns + m.collate_ns, m.cpu_ns)
    words = place.begin(state.cursor is not None and state.cursor.finished, worked)
    if place.was_called and not place.here and held(loader.dataset):
        # Workers that are forked now would share what the dataset has opened in this process: then none are.
        place.state = State.ONLY_HERE
        words = f"{held(loader.dataset)} in the script's own process, and workers would share it"
    before = int(loader.num_workers)
    if place.here:
        if before:
            place.workers, place.prefetch = before, loader.prefetch_factor or 1
        loader.num_workers, loader.prefetch_factor = AutoWorkers(0), None
    else:
        _with_workers(loader, place)
    if words:
        _record(state, f"{before} -> {int(loader.num_workers)} workers: {words}")


def _with_workers(loader: LoaderLike, place: Place) -> None:
    """The settings of a loader with workers again."""
    if not int(loader.num_workers):
        loader.num_workers, loader.prefetch_factor = AutoWorkers(place.workers), place.prefetch


def maker(loader: LoaderLike, state: LoaderState, cursor: Cursor) -> MakeBatch | None:
    """What makes a loader's batches in this process; None where workers make all."""
    place = state.place
    if place is None or place.state is State.ONLY_WORKERS:
        return None
    settings = loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    return place.timed(here(*settings, lambda: (cursor.base_seed, cursor.epoch)))


def tuner(loader: LoaderLike, state: LoaderState) -> Callable[[int], int | None]:
    """The function that the scheduler calls at each delivery. It returns another number of workers, or None."""
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
            _with_workers(loader, place)  # where a batch failed here
        decision = controller.step(waited_ns)
        if decision is None:
            return None
        _record(state, decision.reason)
        loader.num_workers = AutoWorkers(decision.workers)
        return decision.workers

    return step


def _only_workers(loader: LoaderLike, kind: str) -> bool:
    """Whether all batches have to be made in workers: what the user wrote may behave differently in the script's own
    process, or the loader has settings about workers."""
    return bool(
        kind != "process"
        or loader._dataset_kind != _DatasetKind.Map
        or loader.persistent_workers
        or (loader.worker_init_fn is not None and not only_seeds(loader.worker_init_fn))  # seeds are set for each task
        or loader.multiprocessing_context is not None
        or loader.timeout
        or getattr(loader, "sample_timeout", None)
        or validate.asked(loader)
        or isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
        or is_stateful(loader.dataset)
    )


def _why_not_here(loader: LoaderLike, state: LoaderState) -> Callable[[], str]:
    ref = weakref.ref(loader)
    return lambda: "samples kill workers" if state.fatal_samples else held(getattr(ref(), "dataset", None))


def _opened(state: LoaderState) -> Callable[[], str | None]:
    def opened() -> str | None:
        found = [it.opened() for it in list(state.iterators)]
        return next(filter(None, found), None if None in found else "")

    return opened


def _most(state: LoaderState) -> Callable[[], int]:
    """How many workers there may be: by memory, and more for each core the more of their time they wait."""
    before = [0, 0]

    def most() -> int:
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
