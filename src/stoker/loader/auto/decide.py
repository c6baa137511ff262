"""What ``"auto"`` decides for a loader: before each of its iterators, and while they run. Nothing is measured before
the first batch: it begins with what ``stoker tune`` found, else with a first guess, and adapts."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from ...core import resources
from ...core.errors import UsageError
from ...core.handles import held
from ...core.options import AutoWorkers, Measured
from ...core.picklable import refused
from ...sampling.generators import find_generators, in_words
from ...sampling.stateful import is_stateful
from ...workers.faults import validate
from ...workers.thread_pool import refuse
from ..inline_iterator import here
from . import profile
from .controller import Controller
from .in_process import Place
from .limits import cores_here, first_guess, per_core, workers_bound

if TYPE_CHECKING:
    from ...sampling.cursor import Cursor
    from ..loader_state import LoaderState

logger = logging.getLogger("stoker.loader.engine")


def method(loader: Any, state: LoaderState) -> str:
    """The kind of workers for ``worker_method="auto"``: processes, for any code is safe there, unless ``stoker tune``
    found threads to be faster."""
    if state.method is None:
        found = "thread" in (_profile(loader, state) or {})
        why = validate.only_processes(loader) or (unsafe(loader) if found else "")
        if found and not why:
            state.method = "thread", "stoker tune found threads to be faster"
        else:
            state.method = "process", why or "threads are taken where stoker tune found them to be faster"
        _tell(state, f"worker_method={state.method[0]!r}: {state.method[1]}")
    return state.method[0]


def unsafe(loader: Any) -> str | None:
    """Why threads are not even tried: the dataset says so, or it holds what pickle refuses (files, connections, locks),
    which several threads would use at once, or random generators, which each worker process has for itself."""
    try:
        refuse(loader.dataset)
    except UsageError as e:
        return str(e)
    why = refused(loader.dataset)
    if why is not None:
        return f"the dataset holds something that cannot be shared for sure ({type(why).__name__}: {why})"
    found = find_generators(loader.dataset, loader.collate_fn)
    return f"{in_words(found[0][0])} is a random generator, which threads would share" if found else None


def begin(loader: Any, state: LoaderState, kind: str) -> None:
    """Sets ``num_workers`` of a loader, of which an iterator is about to be made.

    Args:
        loader: with ``num_workers="auto"``.
        state: of that loader.
        kind: of its workers.
    """
    if state.measured is None:
        state.measured = _first(loader, state, kind)
        loader.num_workers = AutoWorkers(state.measured.workers or first_guess(loader)[0])
        if not _only_workers(loader, kind):
            state.place = Place(_asks(loader, state))
            state.place.here = not state.measured.workers
    place, m = state.place, state.metrics
    if place is None:
        return
    place.epoch(state.cursor is not None and state.cursor.finished, m.fetch_ns + m.collate_ns)
    why = held(loader.dataset) if place.called and not place.here else ""
    if why:
        place.stay(_sharing(why))
        _tell(state, place.reason)
    if place.here:
        _leave_workers(loader, place)


def maker(loader: Any, state: LoaderState, cursor: Cursor) -> Callable[[int, Any], Any] | None:
    """What makes a loader's batches in this process; None where workers make all."""
    place = state.place
    if place is None or not place.possible:
        return None
    make = here(loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last, cursor)
    return place.timed(make)


def tuner(loader: Any, state: LoaderState) -> Callable[[int], tuple[str, int] | None]:
    """What changes the number of workers, and whether there are any, while an epoch runs."""
    place, m = state.place, state.metrics
    controller = state.controller
    if controller is None:
        ahead = max(loader.prefetch_factor or 1, getattr(loader, "_ahead", 0))
        assert state.measured is not None
        n = int(loader.num_workers) or (place.workers if place is not None else 1)
        controller = state.controller = Controller(n, _most(state), state.measured.known, ahead)
    controller.begin(0)
    if place is not None:
        place.begin(0, (m.tasks, m.fetch_ns + m.collate_ns, m.cpu_ns))
    ref = weakref.ref(loader)

    def step(waited_ns: int) -> tuple[str, int] | None:
        loader = ref()
        if loader is None or state.manual_workers:
            return None
        if place is not None:
            worked = m.tasks, m.fetch_ns + m.collate_ns, m.cpu_ns
            todo = place.step(waited_ns, worked)
            if todo:
                return _move(loader, state, todo, waited_ns)
            if place.here or (place.possible and not place.judged):
                return None
        decision = controller.step(waited_ns)
        if decision is None:
            return None
        _tell(state, decision.reason)
        loader.num_workers = AutoWorkers(decision.workers)
        return "num_workers", decision.workers

    return step


def _profile(loader: Any, state: LoaderState) -> dict[str, Any] | None:
    """What ``stoker tune`` kept of a loader; read once."""
    if state.profile is None:
        state.profile = profile.find(loader)
        found, words = state.profile
        if words:
            state.metrics.decisions.append(words)
            (logger.info if found else logger.warning)(words)
    return state.profile[0]


def _first(loader: Any, state: LoaderState, kind: str) -> Measured:
    found = _profile(loader, state)
    if found is None or not isinstance(found.get(kind), int):
        return Measured(*first_guess(loader))
    words = state.profile[1] if state.profile is not None else ""
    if found.get("num_workers") == 0 and not (_only_workers(loader, kind) or held(loader.dataset)):
        return Measured(0, f"no workers: {words}", known=True)
    n = max(1, min(found[kind] // resources.ranks(), workers_bound(resources.WORKER_BYTES)[0]))
    return Measured(n, f"{n} workers: {words}", known=True)


def _only_workers(loader: Any, kind: str) -> bool:
    """Whether no batch may be made in the script's own process: a worker is another place for what the loader's user
    wrote, or was asked for in so many words."""
    return bool(
        kind != "process"
        or loader._dataset_kind != _DatasetKind.Map
        or loader.persistent_workers
        or loader.worker_init_fn is not None
        or loader.multiprocessing_context is not None
        or loader.timeout
        or getattr(loader, "sample_timeout", None)
        or validate.asked(loader)
        or isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
        or is_stateful(loader.dataset)
    )


def _asks(loader: Any, state: LoaderState) -> Callable[[], str]:
    ref = weakref.ref(loader)

    def why_not() -> str:
        loader = ref()
        why = "samples kill workers" if state.fatal_samples else held(getattr(loader, "dataset", None))
        if why:
            return why
        for it in list(state.iterators):
            why = it.opened()
            if why:
                return f"the dataset opens {why}"
        return ""

    return why_not


def _most(state: LoaderState) -> Callable[[], int]:
    before = [0, 0]

    def most() -> int:
        m = state.metrics
        cpu, wall = m.cpu_ns, m.fetch_ns + m.collate_ns + m.transport_ns
        busy = (cpu - before[0]) / max(1, wall - before[1])  # since the last look
        before[:] = cpu, wall
        each = max(m.worker_pss.values(), default=resources.WORKER_BYTES)
        return min(per_core(1 - busy) * cores_here(), max(1, workers_bound(each)[0]))

    return most


def _move(loader: Any, state: LoaderState, todo: str, waited_ns: int) -> tuple[str, int] | None:
    """Carries out what ``Place.step`` returned."""
    place, controller = state.place, state.controller
    assert place is not None
    if todo == "here":
        place.workers = int(loader.num_workers)
        return "here", 0
    if todo == "stay":
        _tell(state, f"{place.workers} -> 0 workers: {place.reason}")
        _leave_workers(loader, place)
        return "here", 1
    why = held(loader.dataset) if int(loader.num_workers) == 0 else ""
    if why:
        place.stay(_sharing(why))
        _tell(state, place.reason)
        return None
    if int(loader.num_workers) == 0:
        _tell(state, f"0 -> {place.workers} workers: {place.reason}")
        loader.num_workers, loader.prefetch_factor = AutoWorkers(place.workers), place.prefetch
    assert controller is not None
    controller.workers = place.workers
    controller.begin(waited_ns)
    return "num_workers", place.workers


def _leave_workers(loader: Any, place: Place) -> None:
    """The settings of a loader without workers, as torch wants them."""
    if int(loader.num_workers):
        place.workers, place.prefetch = int(loader.num_workers), loader.prefetch_factor
        loader.num_workers, loader.prefetch_factor = AutoWorkers(0), None


def _sharing(why: str) -> str:
    return f"no workers any more: {why} in the script's own process, and workers would share it"


def _tell(state: LoaderState, words: str) -> None:
    logger.info(words)
    state.metrics.decisions.append(words)
