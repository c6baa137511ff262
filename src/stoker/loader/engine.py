"""``_get_iterator`` of a loader: chooses its iterator and limits, and resumes saved runs.

The choice, the first that applies (``_choose``)::

    debug=True, or STOKER_DEBUG=1                   DebugIter      this process, plain tracebacks
    the samples lie on the accelerator              ResidentIter   this process gathers them there
    no workers (also: "auto" came to none)          InlineIter, GuardedIter with on_error=
    a foreign multiprocessing context, or no Linux  torch's iterator
    else                                            PoolIter       processes or threads
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.utils.data import dataloader as torch_loader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..core import resources
from ..core.big_objects import big
from ..core.elsewhere import elsewhere
from ..core.errors import StateError, UsageError
from ..core.filesystems import opened
from ..core.options import AutoWorkers, Budget, parse_bytes, worker_word
from ..core.processes import starts_processes
from ..core.random_state import RandomState, set_from_text
from ..core.ranks import rank_and_ranks
from ..core.types import Batch, JsonObject, LoaderLike, MapDataset
from ..core.warn import warn_user
from ..sampling.cursor import Cursor
from ..sampling.stateful import load_into
from ..sampling.worker_init import only_seeds
from ..workers import can_start
from ..workers.faults import validate
from ..workers.fetcher import alone, staged_in
from ..workers.protocol import WorkersUselessError
from . import rank_batches
from .describe import name_of
from .device_iterator import ResidentIter, resident
from .loader_state import LoaderState, state_of

LEASE_SHARE = 4  # the consumer may keep a quarter of the granted memory in slots; batches beyond that are copied out
BIG_BYTES = 64 << 20  # of Python objects in one container; less is not worth a warning about a copy in each worker
SUPPORTED = sys.platform == "linux"
if SUPPORTED:
    from .pool_iterator import PoolIter
    from .pool_plan import PoolPlan
if TYPE_CHECKING:
    from ..sampling.state import State
    from ..workers.elsewhere import OtherMachines
    from ..workers.faults.error_log import ErrorLog
    from ..workers.faults.policy import OnError
    from ..workers.protocol import Helpers, LateDataset

    Faults = tuple[OnError, ErrorLog]  # what to do with samples that fail, and their log

torch_get_iterator = torch_loader.DataLoader._get_iterator


def budget(loader: LoaderLike) -> Budget:
    """Memory limits of a loader's transport: a share of the memory granted to this process, or the user's
    ``budget``."""
    granted = resources.memory_of_rank()
    asked = getattr(loader, "budget", None)
    nbytes = granted // LEASE_SHARE if asked is None else parse_bytes(asked, granted)
    return Budget(lease_bytes=nbytes, flight_bytes=nbytes, strict=asked is not None)


def get_iterator(loader: LoaderLike) -> _BaseDataLoaderIter:
    """Implements ``_get_iterator``: returns an iterator that begins an epoch, or resumes a run."""
    state = state_of(loader)
    rank_batches.compare(loader, name_of(loader))
    saved = state.pending_state
    if saved is None:
        return _make(loader, state)
    # if this raises, the state stays pending, so a second attempt does not start from scratch
    it = _resume(loader, state, saved)
    if saved.dealt_anew:
        state.saved_parts = 0  # the next epoch is divided as a new run is
    state.pending_state = state.pending_dict = None
    return it


# -- resuming


def _resume(loader: LoaderLike, state: LoaderState, saved: State) -> _BaseDataLoaderIter:
    """Returns an iterator that resumes a run."""
    _warn_of_differences(loader, state, saved)
    state.task_seeds = saved.task_seeds
    state.saved_parts = max(1, len(saved.parts)) if saved.kind == "iterable" else 0
    if not saved.finished:
        return _make(loader, state, saved)
    if saved.dealt_anew:
        state.saved_parts = 0
    inline, of_workers = loader.num_workers == 0, saved.workers > 0
    reset = loader.persistent_workers if of_workers else inline and saved.kind == "iterable"
    if saved.lives_on and reset and not saved.dealt_anew:
        # Restores the copies of the dataset, which then begin the next epoch.
        it = _make(loader, state, saved)
        next(it, None)
        if of_workers:
            _restore_generator(loader, saved)
            it._reset(loader)
            return it
    else:
        end = Cursor(loader._index_sampler, loader.generator, saved)
        end.kind = "iterable" if loader._dataset_kind == _DatasetKind.Iterable else "map"
        if saved.lives_on and saved.kind == "map" and (inline or getattr(loader, "worker_method", "") == "thread"):
            for part in end.saved_parts(1):
                load_into(loader.dataset, part.dataset_state, "dataset")
        end.go_to_end()
    _restore_generator(loader, saved)
    return _make(loader, state)


def _warn_of_differences(loader: LoaderLike, state: LoaderState, saved: State) -> None:
    if (saved.next or saved.finished) and _task_seeds(loader, state) and not saved.task_seeds:
        warn_user(
            "The saved run seeded random generators per worker, as torch does; this loader seeds them per task. "
            "Order and samples are the same, but random augmentation differs. Pass task_seeds=False to seed as torch "
            "does."
        )
    if not saved.torch_rng_restored and (saved.task_seeds or "torch" in saved.sampler_rng):
        warn_user(
            "The state of torch's global random generator differs from the one in which this run was saved, so later "
            "epochs will differ from that run's. Save torch.get_rng_state() beside the loader's state and call "
            "torch.set_rng_state() before iterating, or give the loader a generator=."
        )


def _restore_generator(loader: LoaderLike, saved: State) -> None:
    """Restores the loader's own generator, from which later epochs are drawn."""
    if saved.generator is not None and loader.generator is not None:
        set_from_text(loader.generator, saved.generator)


def state_dict(loader: LoaderLike) -> JsonObject:
    """Returns a loader's position in its run; creates the first iterator if there is none. Raises StateError if torch's
    own workers serve the loader."""
    state = state_of(loader)
    if state.pending_dict is not None:
        return dict(state.pending_dict)
    if state.cursor is None:
        state.unclaimed_iterator = iter(loader)  # type: ignore[assignment]
    if state.cursor is None:
        state.unclaimed_iterator = None  # otherwise its workers would live on
        raise StateError(f"this loader's position cannot be saved: {torch_serves(loader)}")
    return state.cursor.save().to_dict()


def load_state_dict(loader: LoaderLike, state_dict: JsonObject) -> None:
    """The next iterator resumes where the state dict was taken; with ``{}`` it starts a new run."""
    from ..sampling import rank_states  # not every run is saved

    saved = None
    if not isinstance(state_dict, dict) or state_dict:
        saved = rank_states.read(state_dict, *rank_and_ranks())
    state = state_of(loader)
    state.begin_run()
    state.pending_state = saved
    state.pending_dict = None if saved is None else dict(state_dict)
    loader._iterator = None


# -- choosing an iterator


def _make(loader: LoaderLike, state: LoaderState, saved: State | None = None) -> _BaseDataLoaderIter:
    """Returns an iterator that begins or resumes an epoch."""
    if state.cursor is not None and all(it._cursor is not state.cursor for it in state.iterators):
        state.cursor.undo_draws_ahead()  # no iterator can continue that epoch
    cursor = Cursor(loader._index_sampler, loader.generator, saved)
    cursor.task_seeds = _task_seeds(loader, state)
    it = _choose(loader, state, cursor)
    state.cursor = getattr(it, "_cursor", None)
    return it


def _task_seeds(loader: LoaderLike, state: LoaderState) -> bool:
    anywhere = elsewhere(getattr(loader, "worker_method", "")) is not None  # any worker may run any task
    asked = isinstance(loader.num_workers, AutoWorkers) or bool(getattr(loader, "task_seeds", False))
    return asked or anywhere or state.task_seeds


def _choose(loader: LoaderLike, state: LoaderState, cursor: Cursor) -> _BaseDataLoaderIter:
    if getattr(loader, "debug", False) or os.environ.get("STOKER_DEBUG") == "1":
        from .inline_iterator import DebugIter

        _warn_ignored(loader, "debug=True raises every error and enforces no time limit", "on_error", "sample_timeout")
        return DebugIter(loader, cursor)
    if cursor.saved is not None and cursor.saved.idle:
        return _nothing(loader, cursor)
    faults = _prepare(loader, state)
    gather = resident(loader)
    if gather is not None:
        why = "batches are made in this process, where the data lies on a device"
        _warn_ignored(loader, why, "worker_init_fn", "timeout", "sample_timeout")
        return ResidentIter(loader, gather, cursor)
    method = worker_word(str(getattr(loader, "worker_method", "process")))
    torchs = torch_serves(loader)
    if isinstance(loader.num_workers, AutoWorkers) and not torchs:
        from .auto import decide  # not every loader asks for it

        decide.begin(loader, state, method)
    if loader.num_workers == 0 and state.standby is None:
        if elsewhere(method) is not None:
            _warn_ignored(loader, "cluster nodes only assist local workers, and num_workers is 0", "worker_method")
        return _inline(loader, cursor, faults)
    if not torchs:
        return _pool_or_inline(loader, state, cursor, faults, method)
    if cursor.saved is not None:
        raise StateError(f"this loader cannot resume a run: {torchs}")
    return torch_get_iterator(loader)  # type: ignore[arg-type]


def _nothing(loader: LoaderLike, cursor: Cursor) -> _BaseDataLoaderIter:
    """An iterator for the rest of an epoch in which this rank has no part."""
    from .inline_iterator import DebugIter

    warn_user(
        f"This epoch of an iterable dataset began with fewer parts than there are ranks now ({cursor.ranks}), so rank "
        f"{cursor.rank} gets no samples until it ends. The next epoch is divided among all ranks."
    )
    it = DebugIter(loader, cursor)
    it.ends_with_epoch = True
    return it


def _prepare(loader: LoaderLike, state: LoaderState) -> Faults | None:
    """Prepares what every iterator needs: pinning, fault handling, a cache. Returns how to handle samples that fail."""
    if state.pinning.auto:
        loader.pin_memory = state.pinning.decide()
    faults = validate.faults_of(loader, state) if validate.asked(loader) else None
    validate.check_timeout(loader)
    staged = staged_in(loader.dataset)
    if staged is not None:
        init = loader.worker_init_fn
        staged._begin((init is None or only_seeds(init)) and not can_start.thread_of_script())
        if not loader._auto_collation:
            alone(loader.dataset)
    return faults


def _inline(loader: LoaderLike, cursor: Cursor, faults: Faults | None) -> _BaseDataLoaderIter:
    from .inline_iterator import GuardedIter, InlineIter

    _warn_ignored(loader, "without workers, only one batch is loaded at a time", "budget")
    it = InlineIter(loader, cursor) if faults is None else GuardedIter(loader, cursor, *faults)
    it.gather(loader.dataset)
    if faults is None:
        it.expect(state_of(loader).late)
    return it


def _pool_or_inline(
    loader: LoaderLike, state: LoaderState, cursor: Cursor, faults: Faults | None, method: str
) -> _BaseDataLoaderIter:
    """Uses workers; falls back to the script's process if stoker chose them and they cannot start."""
    if not isinstance(loader.num_workers, AutoWorkers):
        return _pool(loader, state, cursor, faults, method)
    before = RandomState([] if loader.generator is None else [("own", loader.generator)])
    try:
        return _pool(loader, state, cursor, faults, method)
    except WorkersUselessError as e:
        from .auto import decide

        before.restore()
        can_start.failed(str(e))
        decide.retreat(loader, state).said(str(e))
        again = Cursor(loader._index_sampler, loader.generator)
        again.task_seeds = _task_seeds(loader, state)
        return _inline(loader, again, faults)


def _pool(loader: LoaderLike, state: LoaderState, cursor: Cursor, faults: Faults | None, method: str) -> PoolIter:
    state.leave_parent()
    auto = isinstance(loader.num_workers, AutoWorkers)
    if not auto:
        loader.check_worker_number_rationality()  # type: ignore[attr-defined]
    threads = method == "thread"
    if method == "process":
        _advise(loader, state)
    if threads and state.rng_watch is None:
        from ..workers.rng_watch import GlobalRngUse

        state.rng_watch = GlobalRngUse()
    make_batch, retreat = None, None
    if auto:
        from .auto import decide

        make_batch, retreat = decide.maker(loader, state, cursor)
    if not threads:
        _name_reopened(loader.dataset, state.metrics.decisions)
    nodes = _nodes(loader, state)
    restarts = not threads and validate.restarts(loader)
    keeps = not any((threads, nodes, state.standby, restarts, cursor.saved)) and state.keeps_workers > 0
    plan = PoolPlan(
        budget=budget(loader),
        slots=state.heaps if threads else state.arenas,
        saved_parts=state.saved_parts if loader._dataset_kind == _DatasetKind.Iterable else 0,
        thread_rng=state.rng_watch if threads else None,
        locker=state.pinning.lock(getattr(loader, "budget", None)) if loader.pin_memory else state.pinning.locker,
        faults=faults,
        fatal_samples=state.fatal_samples if restarts else None,
        make_batch=make_batch,
        retreat=retreat,
        draws_late=state.own_workers == 0,
        nodes=nodes,
        standby=state.standby,
        late=None if threads or nodes is not None else state.late,
        helpers=state.helpers,
        drew=state.drew,
        keep=functools.partial(state.keep, state.kept_since) if keeps else None,
        keep_until=state.keeps_workers,
        kept=state.take_kept(keeps),
    )
    it = PoolIter(loader, cursor, state.metrics, plan)
    state.iterators.add(it)
    if auto and loader._dataset_kind == _DatasetKind.Map and not state.manual_workers:
        it.tune(decide.tuner(loader, state))
    return it


def _nodes(loader: LoaderLike, state: LoaderState) -> OtherMachines | None:
    """The cluster nodes that help a loader, shared by all its iterators; None if it wants none."""
    named = elsewhere(getattr(loader, "worker_method", ""))
    if named is None:
        return None
    if state.nodes is None:
        from ..workers.elsewhere import load

        try:
            state.nodes = load(named[0])(named[1], budget(loader).lease_bytes)
        except UsageError as e:
            warn_user(f"No workers on other nodes: {e}. Only this machine loads batches")
            return None
        weakref.finalize(loader, state.nodes.close)
    return state.nodes


def _name_reopened(dataset: MapDataset, decisions: list[str]) -> None:
    """Notes which filesystems forked workers reopen; those opened before the fork do not work there."""
    for path, fs in opened(getattr(dataset, "stands_for", None) or dataset):
        decision = f"{path} ({type(fs).__name__}) was opened before the workers started, so each worker opens its own"
        if decision not in decisions:
            decisions.append(decision)


def _warn_ignored(loader: LoaderLike, why: str, *names: str) -> None:
    """Warns once about settings without effect, and why."""
    state, found = state_of(loader), validate.ignored(loader, *names)
    if found and why not in state.warned:
        state.warned.add(why)
        warn_user(f"No effect here: {found}. Reason: {why}.")


def _advise(loader: LoaderLike, state: LoaderState) -> None:
    """Warns once about objects that each worker process will copy page by page, if the loader is stoker's."""
    if state.advised or not hasattr(loader, "worker_method"):
        return
    state.advised = True
    for found in big(loader.dataset, BIG_BYTES):
        warn_user(
            f"{found.path} is {found.words}, about {found.nbytes >> 20:,} MB. Every read updates reference counts, so "
            f"each worker process ends up with its own copy. {found.path} = {found.remedy} keeps it in one buffer "
            "that all processes share."
        )


def torch_serves(loader: LoaderLike) -> str:
    """Why torch's own workers serve a loader; "" if stoker's do."""
    if not SUPPORTED:
        return f"stoker's workers are supported on Linux only, not on {sys.platform}"
    context = loader.multiprocessing_context
    if getattr(loader, "worker_method", "process") != "thread" and not starts_processes(context):
        return validate.FOREIGN.format(type(context).__name__)
    return ""


@contextmanager
def with_dataset(
    loader: LoaderLike,
    dataset: object,
    late: LateDataset | None = None,
    collate_fn: Callable[..., Batch] | None = None,
    helpers: Helpers | None = None,
) -> Iterator[None]:
    """Substitutes another dataset and collate function for the loader's own while its iterator is created. None: its
    own. ``late``: may exchange the dataset in the middle of the epoch. ``helpers``: make parts of its batches."""
    held = loader.__dict__
    own, own_collate = held["dataset"], held["collate_fn"]
    held["dataset"] = own if dataset is None else dataset
    held["collate_fn"] = own_collate if collate_fn is None else collate_fn
    state = state_of(loader)
    state.late, state.helpers, state.own = late, helpers, (own, own_collate)
    try:
        yield
    finally:
        held["dataset"], held["collate_fn"] = own, own_collate
        state.late = state.helpers = state.own = None


def init_sees_dataset(loader: LoaderLike) -> bool:
    """Whether ``worker_init_fn`` may modify each worker's dataset: they may then all differ."""
    init = loader.worker_init_fn
    code = getattr(init, "__code__", None)
    return init is not None and (code is None or "dataset" in code.co_names)
