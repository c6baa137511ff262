"""What stands behind ``_get_iterator``: which iterator a loader gets, its limits, and what is kept between iterators.

On systems other than Linux torch's own iterators stand there.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader as torch_loader
from torch.utils.data.dataloader import _DatasetKind

from ..core import resources
from ..core.big_objects import big
from ..core.errors import StateError, StokerWarning
from ..core.options import AutoWorkers, Budget, parse_bytes
from ..core.processes import starts_processes
from ..sampling.cursor import Cursor
from ..sampling.stateful import put
from ..workers.faults import validate
from ..workers.fetcher import alone, staged_in
from .device_iterator import ResidentIter, resident
from .loader_state import LoaderState, state_of

logger = logging.getLogger(__name__)
LEASE_SHARE = 4  # the consumer may keep a quarter of the granted memory in slots; beyond that batches are copied out
BIG_BYTES = 64 << 20  # of Python objects in one container; what a worker may copy without being worth a word
SUPPORTED = sys.platform == "linux"
if SUPPORTED:
    from .pool_iterator import PoolIter
if TYPE_CHECKING:
    from ..sampling.rng import SavedGlobalRng
    from ..sampling.state import State

torch_get_iterator = torch_loader.DataLoader._get_iterator


def budget(loader: Any = None) -> Budget:
    """What a loader's transport may take: a share of the memory that this process is granted, or what its user says."""
    granted = resources.memory_of_rank()
    asked = getattr(loader, "budget", None)
    if asked is None:
        return Budget(lease_bytes=granted // LEASE_SHARE, flight_bytes=granted // LEASE_SHARE)
    nbytes = parse_bytes(asked, granted)
    return Budget(lease_bytes=nbytes, flight_bytes=nbytes, strict=True)


def get_iterator(loader: Any) -> Any:
    """What stands behind ``_get_iterator``: torch's inline iterator for 0 workers, stoker's workers otherwise."""
    state = state_of(loader)
    saved = state.pending
    if saved is None:
        with nullcontext() if state.shadow is None else state.shadow.over():
            return _made(loader, state)
    it = _resumed(loader, state, saved)  # if it raises, the state stays: nobody begins anew by trying again
    state.pending = state.given = None
    return it


def _resumed(loader: Any, state: LoaderState, saved: State) -> Any:
    """An iterator that goes on where a state was taken."""
    if (saved.next or saved.finished) and _task_seeds(loader, state) and not saved.task_seeds:
        warnings.warn(
            "The run that was saved had random state by worker, as torch sets it, and here it is set by task: order "
            "and samples are that run's, random augmentation is another draw. task_seeds=False keeps to torch's.",
            StokerWarning,
            stacklevel=4,
        )
    state.task_seeds = saved.task_seeds
    state.shards = max(1, saved.workers) if saved.kind == "iterable" else 0
    if not saved.finished:
        _go_on_from(loader, state, saved)
        return _made(loader, state, saved)
    inline, of_workers = loader.num_workers == 0, saved.workers > 0
    through = loader.persistent_workers if of_workers else inline and saved.kind == "iterable"
    if saved.lives_on and through:  # workers, or an iterator, are put where they were, and then begin the next epoch
        it = _made(loader, state, saved)
        next(it, None)
        if of_workers:
            _go_on_from(loader, state, saved)
            it._reset(loader)
            return it
    else:
        end = Cursor(loader._index_sampler, loader.generator, saved)
        end.kind = "iterable" if loader._dataset_kind == _DatasetKind.Iterable else "map"
        if saved.lives_on and saved.kind == "map" and (inline or getattr(loader, "worker_method", "") == "thread"):
            for part in end.parts(1):
                put(loader.dataset, (part.state or {"dataset": None})["dataset"], "dataset")
        end.go_to_end()
    with _go_on_from(loader, state, saved).over():
        return _made(loader, state)


def _go_on_from(loader: Any, state: LoaderState, saved: State) -> SavedGlobalRng:
    """What later epochs are drawn from, as the saved run had it."""
    from ..sampling.rng import SavedGlobalRng, restore

    if saved.finished and saved.generator is not None and loader.generator is not None:
        restore(loader.generator, saved.generator)
    shadow = state.shadow = SavedGlobalRng(saved.torch_rng)
    shadow.mark()
    if state.cursor is not None:
        state.cursor.shadow = shadow
    return shadow


def _made(loader: Any, state: LoaderState, saved: State | None = None) -> Any:
    """An iterator that begins an epoch, or goes on in one."""
    cursor = Cursor(loader._index_sampler, loader.generator, saved, state.shadow)
    cursor.task_seeds = _task_seeds(loader, state)
    it = _iterator(loader, cursor)
    state.cursor = getattr(it, "_cursor", None)
    return it


def _task_seeds(loader: Any, state: LoaderState) -> bool:
    asked = isinstance(loader.num_workers, AutoWorkers) or bool(getattr(loader, "task_seeds", False))
    return asked or state.task_seeds


@contextmanager
def with_dataset(loader: Any, dataset: Any) -> Iterator[None]:
    """Another dataset in the place of a loader's own, while an iterator is made of it. None: its own."""
    held = loader.__dict__
    own = held["dataset"]
    held["dataset"] = own if dataset is None else dataset
    try:
        yield
    finally:
        held["dataset"] = own


def init_sees_dataset(loader: Any) -> bool:
    """Whether ``worker_init_fn`` may change each worker's dataset: then no two of them are the same."""
    init = loader.worker_init_fn
    code = getattr(init, "__code__", None)
    return init is not None and (code is None or "dataset" in code.co_names)


def state_dict(loader: Any) -> dict[str, Any]:
    """Where a loader is in its run. Begins it if nobody has.

    Raises:
        StateError: worker processes of torch's own, on other systems than Linux.
    """
    state = state_of(loader)
    if state.given is not None:
        return dict(state.given)
    if state.cursor is None:
        state.first = iter(loader)
    if state.cursor is None:
        state.first = None  # its workers would live on
        raise StateError(f"this loader's place cannot be saved: {torch_serves(loader)}")
    return state.cursor.save().to_dict()


def load_state_dict(loader: Any, state_dict: dict[str, Any]) -> None:
    """The next iterator goes on where the state dict was taken; with ``{}`` it begins a new run.

    Raises:
        StateError: no such state dict.
    """
    from ..sampling.state import State

    saved = None if isinstance(state_dict, dict) and not state_dict else State.from_dict(state_dict)
    state = state_of(loader)
    state.begin_run()
    state.pending, state.given = saved, None if saved is None else dict(state_dict)
    loader._iterator = None


def torch_serves(loader: Any) -> str:
    """Why workers of a loader are torch's own; "" where they are stoker's."""
    if not SUPPORTED:
        return f"stoker's workers are there on Linux, not on {sys.platform}"
    context = loader.multiprocessing_context
    if getattr(loader, "worker_method", "process") != "thread" and not starts_processes(context):
        return validate.FOREIGN.format(type(context).__name__)
    return ""


def _iterator(loader: Any, cursor: Cursor) -> Any:
    if getattr(loader, "debug", False) or os.environ.get("STOKER_DEBUG") == "1":
        from .debug import DebugIter

        _warn_ignored(
            loader, "what fails is raised, and nothing is timed, with debug=True", "on_error", "sample_timeout"
        )
        return DebugIter(loader, cursor)
    state = state_of(loader)
    if state.pinning.auto:
        ahead = int(loader.num_workers) * (loader.prefetch_factor or 1) + 1
        loader.pin_memory = state.pinning.decide(state.metrics.batch_bytes, ahead).on
    faults = validate.faults_of(loader, state) if validate.asked(loader) else None
    validate.check_timeout(loader)
    staged = staged_in(loader.dataset)
    if staged is not None:
        staged._begin()
        if not loader._auto_collation:
            alone(loader.dataset)
    there = resident(loader)
    if there is not None:
        why = "batches are made in this process, where the data lies on a device"
        _warn_ignored(loader, why, "worker_init_fn", "timeout", "sample_timeout")
        return ResidentIter(loader, there, cursor)
    method = str(getattr(loader, "worker_method", "process"))
    torchs = torch_serves(loader)
    auto = isinstance(loader.num_workers, AutoWorkers) and not torchs
    if auto or (method == "auto" and loader.num_workers and not torchs):
        from .auto import decide as tuned  # for those who ask

        if method == "auto":
            method = tuned.method(loader, state)
        if auto:
            tuned.begin(loader, state, method)
    later = None if state.place is None or not state.place.here else (state.place.workers, state.place.prefetch or 2)
    if loader.num_workers == 0 and later is None:
        from .inline_iterator import GuardedIter, InlineIter, gathered

        _warn_ignored(loader, "without workers there is one batch at a time", "budget")
        it: Any = InlineIter(loader, cursor) if faults is None else GuardedIter(loader, cursor, *faults)
        fetcher = it._dataset_fetcher
        fetcher.fetch = gathered(it._dataset, it._auto_collation, it._collate_fn, fetcher.fetch) or fetcher.fetch
        return it
    if torchs:
        if cursor.saved is not None:
            raise StateError(f"no run can be taken up again: {torchs}")
        return torch_get_iterator(loader)
    state.here()
    limits = budget(loader)
    if not isinstance(loader.num_workers, AutoWorkers):
        loader.check_worker_number_rationality()
    if method == "process" and not state.advised and hasattr(loader, "worker_method"):
        state.advised = True
        _advise(loader.dataset)
    if method == "thread" and state.noticed is None:
        from ..workers.rng_watch import GlobalRngUse

        state.noticed = GlobalRngUse()
    threads = state.noticed if method == "thread" else None
    locker = state.pinning.locker
    if loader.pin_memory:
        locker = state.pinning.lock(getattr(loader, "budget", None))
    it = PoolIter(
        loader,
        limits,
        state.heaps if threads is not None else state.arenas,
        state.metrics,
        cursor,
        state.shards if loader._dataset_kind == _DatasetKind.Iterable else 0,
        threads,
        locker,
        faults=faults,
        known=state.known if threads is None and validate.restarts(loader) else None,
        make=tuned.maker(loader, state, cursor) if auto else None,
        later=later,
    )
    state.iterators.add(it)
    if auto and loader._dataset_kind == _DatasetKind.Map and not state.hold:
        it.tune(tuned.tuner(loader, state))
    return it


def _warn_ignored(loader: Any, why: str, *names: str) -> None:
    """Says once which settings have no effect, and why."""
    state, found = state_of(loader), validate.ignored(loader, *names)
    if found and why not in state.ignored:
        state.ignored.add(why)
        warnings.warn(f"No effect here: {found}. The reason: {why}.", StokerWarning, stacklevel=8)


def _advise(dataset: Any) -> None:
    """Names what each worker will copy bit by bit."""
    for found in big(dataset, BIG_BYTES):
        warnings.warn(
            f"{found.path} is {found.words}, about {found.nbytes >> 20:,} MB. Each worker process copies it page by "
            f"page as it reads, because a look at an object writes its reference count. {found.path} = "
            f"{found.remedy} keeps it in one buffer that all share.",
            StokerWarning,
            stacklevel=5,
        )
