"""``stoker run --apply``: adds stoker's engine and a cache to an unchanged script's loaders, and workers to some.

What happens to a loader::

    made                a trial of its dataset begins in a child process, beside what the script does next: it makes a
                        model and an optimizer. One runs at a time: that of a second dataset begins when the first
                        one has ended. It ends with its dataset
    first iterated      if the script has changed the dataset since then, a new trial begins
    ... WAIT_S, or half an epoch, later
                        the trial has ended: the first epoch fills the cache, or nothing is kept
                        it has not: the epoch begins without a cache, and gets it when the trial has ended
                        (``staging.late_plan``). A loader that gets no workers in any case does not wait

A loader with workers keeps their number. One without is reconsidered until its trial has ended and it is known whether
making its batches draws random numbers; if it does, it gets none. A failure here leaves the loader as the script made
it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import sys
import time
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import parent_process
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from ..core.allocator import keep_freed_memory
from ..core.dataset_tree import without_subsets
from ..core.errors import one_line
from ..core.filesystems import is_far
from ..core.handles import held
from ..core.marked_code import original
from ..core.options import AutoWorkers
from ..core.resources import ranks
from ..core.types import Batch, JsonObject, LoaderLike, MapDataset
from ..loader import engine
from ..loader.auto.limits import first_guess
from ..loader.describe import name_of
from ..loader.loader_state import state_of
from ..staging.fill_ahead import FillAhead
from ..staging.inputs import functions_of
from ..staging.late_plan import LateHere, LatePlan
from ..staging.samples import may_draw
from ..staging.store.memory import Flag
from ..staging.subsets import dataset_inside
from ..staging.trial import TrialResult
from ..staging.users_code import names_in
from ..workers.can_start import why_not
from ..workers.fetcher import is_plain
from . import given_workers, kept_epochs
from .applied_loader import applied_to
from .fill_helpers import helpers_of
from .given_workers import TINY_BATCH_S
from .managed_dataset import ManagedDataset, as_script_made_it

WAIT_S = 1.0  # before the first batch; a longer trial continues beside the first epoch
HERE_WAIT_S = 0.0  # for a loader that makes its first epoch without workers: it gets the cache during its epoch
# The same for remote storage, where the trial's samples and the first epoch both take long; and for a stream, or for
# persistent workers of a class with its own iterators: they keep the dataset that they are started with.
LONG_WAIT_S = 4.0
MOST_VAIN_S = 2.0  # spent waiting for trials that did not end: a script may recreate its dataset each epoch
MOST_LOST = 3  # trials that did not end before the script dropped their datasets
# Functions whose answer depends on the process that makes a sample.
ASK_FOR_PROCESS = {"get_worker_info", "parent_process", "current_process", "getpid", "getppid", "get_num_threads"}
FEW_DATASETS = 4  # any more are tried later
TRIAL_SHARE = 0.1  # if trials took more of the time so far
TINY_SAMPLE_S = 100e-6  # faster samples are mostly views of memory, which a worker would have to copy
MOST_DATASETS = 8  # remembered at most
MOST_LEFT_BYTES = 64 << 20  # held by a cached dataset that the script has dropped, in case it makes the same one again
TOO_MANY_LOST = "the script has dropped other datasets before their trial run had ended"
USED_ONCE = "the script has dropped other datasets of this class after one epoch"
TOO_LONG = "trial runs of other datasets took much of the time so far"
BY_SCRIPT = "; cached batches are loaded in the script's own process where that is faster"
WORKERS_ON = "STOKER_WORKERS_ON"  # environment variable: a ``worker_method`` with nodes of a cluster

_NEXT = {_BaseDataLoaderIter.__next__.__code__, _SingleProcessDataLoaderIter._next_data.__code__}

_datasets: list[ManagedDataset] = []
_entries: dict[str, tuple[JsonObject, ManagedDataset, weakref.ref[LoaderLike]]] = {}  # by loader name
_vain: list[float] = []  # seconds spent waiting for trials that did not end
_lost: list[int] = []  # an item for each trial that ended because the script dropped its dataset
_used_once = Counter[type]()  # by class: datasets, not remembered any more, that the script dropped after one epoch
_tried_s: list[float] = []  # of datasets that are not remembered any more: seconds that the script waited for trials
_began = [time.monotonic()]  # when the run began
_released: list[Callable[[], MapDataset | None]] = []  # datasets whose caches were freed
_kept_by_script: set[bool] = set()  # not empty: the script had kept one of them, and used it again
_with_gradients: set[bool] = set()  # whether gradients were enabled when epochs began; holds both values seen
_made: deque[weakref.ref[LoaderLike]] = deque(maxlen=MOST_DATASETS // 2)  # loaders that have not been iterated yet


def begin(applied: JsonObject) -> Callable[[LoaderLike], Iterator[Batch]]:
    """Returns the function that makes iterators from now on. ``applied`` receives one entry per loader: ``{"from":
    settings, "to": settings, "reason": text, "measured_s": seconds, "cache": what is kept}``."""
    keep_freed_memory()
    _began[0] = time.monotonic()

    def make_iterator(loader: LoaderLike) -> Iterator[Batch]:
        if _is_in_a_sample():
            return engine.torch_get_iterator(loader)  # type: ignore[arg-type]
        chosen = EpochChoice()
        with _left_as_it_is(loader):
            chosen = _choose(loader, applied)
        _begin_next_trial()
        with engine.with_dataset(loader, chosen.dataset, chosen.late, chosen.collate_fn, chosen.helpers):
            it = chosen.make(loader)
        if not chosen.is_put_off:
            given_workers.watch_draws(loader, it)
        return it

    return make_iterator


def _is_in_a_sample() -> bool:
    """Whether another loader's batch is being made: a sample may iterate over a loader of its own."""
    if get_worker_info() is not None:
        return True
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _NEXT:
            return True
        frame = frame.f_back
    return False


class EpochChoice(NamedTuple):
    """How to make the epoch that begins. None: the loader's own."""

    dataset: object = None
    collate_fn: Callable[..., Batch] | None = None
    late: LatePlan | LateHere | None = None
    helpers: FillAhead | None = None
    make: Callable[[LoaderLike], Iterator[Batch]] = engine.get_iterator
    is_put_off: bool = False  # nothing is decided soon, so nothing has to be known of this epoch


def _choose(loader: LoaderLike, applied: JsonObject) -> EpochChoice:
    """Decides the loader's open settings, and how its next epoch is made."""
    if not _is_manageable(loader):
        return EpochChoice(_stream_with_cache(loader, applied))
    state = state_of(loader)
    if state.own_workers == 0 and int(loader.num_workers) > 0:
        taken = given_workers.take_back(loader)
        if taken:
            entry = _entries[name_of(loader)][0]
            entry |= {"reason": f"kept 0: {taken}", "to": {**entry["to"], "num_workers": 0}}
    known = _manage(loader, applied)
    is_given = state.own_workers == 0 and int(loader.num_workers) > 0
    state.changed = state.drew = None
    if is_given and known.found is not None:
        record = applied_to(loader)
        changes = given_workers.ScriptChanges(loader, known.found, known.staged)
        changes.drew = record.drew = record.drew or Flag()
        record.given_for = record.given_for or changes
        state.changed, state.drew = changes, changes.drew
    staged, collate_fn = known.staged_for(loader), known.collate_for(loader)
    kept_epochs.decide(loader, known.found, known.staged)
    in_script = known.is_for_script(loader)
    known.by_script = known.by_script or in_script
    make = as_script_made_it if in_script else engine.get_iterator
    is_put_off = known.waits and not known.is_due
    return EpochChoice(staged, collate_fn, known.late_plan(loader), helpers_of(loader, known), make, is_put_off)


def loader_made(loader: LoaderLike) -> None:
    """Starts a trial of the dataset as soon as no other one runs. Spawned workers, which recreate their script's
    loaders, start none; neither do ranks of a node, which agree on one when they iterate."""
    if get_worker_info() is None and parent_process() is None and ranks() == 1:
        _made.append(weakref.ref(loader))
        _begin_next_trial()


def _begin_next_trial() -> None:
    while _made and not _is_trying():
        loader = _made.popleft()()
        if loader is not None and applied_to(loader).entry is None:
            with _left_as_it_is(loader):
                # A known dataset is left alone: another loader may be about to use it.
                if _is_manageable(loader) and not any(
                    known.is_same(without_subsets(loader.dataset)) for known in _datasets
                ):
                    _managed(loader).is_fresh = False


def _is_trying() -> bool:
    """Whether a trial runs. Ranks of a node agree on theirs and do not wait for others."""
    return ranks() == 1 and any(known.is_trying for known in _datasets)


def cache_alone(applied: JsonObject, loader: LoaderLike) -> contextlib.AbstractContextManager[None]:
    """Context for starting an epoch of a loader whose class makes its own iterators, such as torchdata's
    ``StatefulDataLoader``. Gives the loader the cache; its workers remain the class's. Persistent workers have the
    cache only if the trial ended before they started. They are not told when an epoch begins, so a changed dataset ends
    their cache."""
    makes = getattr(type(loader), "_get_iterator", None)
    if not isinstance(loader, TorchLoader) or makes is TorchLoader._get_iterator:
        return contextlib.nullcontext()
    asks_torch = "_get_iterator" in getattr(getattr(makes, "__code__", None), "co_names", ("_get_iterator",))
    if asks_torch or str(makes.__module__).startswith("stoker."):
        return contextlib.nullcontext()  # torch's method is replaced by stoker's
    run_already = getattr(loader, "_iterator", None) is not None and not applied_to(loader).has_cache_in_workers
    if loader.persistent_workers and (run_already or ranks() > 1):
        return contextlib.nullcontext()
    if engine.init_sees_dataset(loader) or not _is_manageable(loader):
        return contextlib.nullcontext()
    staged: MapDataset | None = None
    collate_fn: Callable[..., Batch] | None = None
    with _left_as_it_is(loader):
        managed = _manage(loader, applied, f"kept {int(loader.num_workers)}: its class has its own iterators")
        collate_fn = managed.collate_for(loader)
        staged = managed.staged_for(loader)
        if loader.persistent_workers and staged is not None:
            applied_to(loader).has_cache_in_workers = True
    return engine.with_dataset(loader, staged, None, collate_fn)


@contextlib.contextmanager
def _left_as_it_is(loader: LoaderLike) -> Iterator[None]:
    """Reports a failure and leaves the loader as the script made it."""
    try:
        yield
    except Exception as e:
        sys.stderr.write(f"stoker: {name_of(loader)}: left unchanged: {one_line(e)}\n")


def refresh() -> None:
    """Updates the entries of all loaders."""
    for entry, known, made in _entries.values():
        entry["cache"] = known.report()
        loader = made()
        left = "" if loader is None else state_of(loader).no_workers
        if left and entry["to"]["num_workers"]:
            entry["to"]["num_workers"] = entry["from"]["num_workers"]
            entry["reason"] = f"kept {entry['from']['num_workers']}: {left}"
        if known.staged is not None and not known.is_single_pass:
            entry["from"]["staged"], entry["to"]["staged"] = False, True
        if known.by_script and BY_SCRIPT not in entry["reason"]:
            entry["reason"] += BY_SCRIPT


def _is_manageable(loader: LoaderLike) -> bool:
    # An iterable dataset's shards depend on the number of workers, so it stays; "auto" decides for itself.
    is_auto = isinstance(loader.num_workers, AutoWorkers) and applied_to(loader).entry is None
    is_stream = isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__")
    return not is_auto and loader._dataset_kind == 0 and engine.SUPPORTED and not is_stream


def _stream_with_cache(loader: LoaderLike, applied: JsonObject) -> object:
    """Returns a copy of a stream that reads from a dataset with a cache; None to leave the stream alone. Without
    workers it is left alone: the script can observe what iterating changes in the stream."""
    stream, workers = loader.dataset, loader.num_workers
    if not workers or isinstance(workers, AutoWorkers) or engine.init_sees_dataset(loader) or not engine.SUPPORTED:
        return None
    name = dataset_inside(stream)
    if not name:
        return None
    why_own_count = f"kept {workers}: the number of workers decides which samples of a stream each worker loads"
    with engine.with_dataset(loader, vars(stream)[name]):
        known = _manage(loader, applied, why_own_count)
        staged = known.staged_for(loader)
    if known.staged is None:
        return None
    out = copy.copy(stream)
    vars(out)[name] = staged
    return out


def _manage(loader: LoaderLike, applied: JsonObject, why_own_count: str = "") -> ManagedDataset:
    """Returns the managed dataset of a loader; decides the loader's settings the first time. ``why_own_count``: why the
    worker count must not change; "": it is decided here."""
    known = _managed(loader)
    known.asked_for += len(loader.dataset)
    known.is_single_pass = _expects_single_pass(loader, known)
    is_far_away = known.trial is not None and known.waited_s == 0 and is_far(loader.dataset)
    is_long = loader._dataset_kind != 0 or is_far_away or (bool(why_own_count) and loader.persistent_workers)
    waits_s = LONG_WAIT_S if is_long else WAIT_S if _may_get_workers(loader) else HERE_WAIT_S
    known.begin_epoch(loader)
    is_first = (known.waited_s == 0 or known.is_fresh) and sum(_vain) < MOST_VAIN_S
    known.take_result(waits_s if is_first else 0, by_epoch=not is_long)
    if is_first and known.trial is not None:
        _vain.append(known.waited_s)
    if applied_to(loader).entry is None or (known.trial is None and applied_to(loader).is_undecided):
        _decide_settings(loader, known, applied, why_own_count)
    return known


def _may_get_workers(loader: LoaderLike) -> bool:
    """Whether a loader has workers, or may get some for its coming epoch once the trial has ended."""
    if int(loader.num_workers) or ranks() > 1 or applied_to(loader).entry is not None:
        return True
    stays = state_of(loader).no_workers or why_not(loader, threads=True) or given_workers.own_sampler(loader)
    if stays:
        return False
    code = getattr(getattr(type(without_subsets(loader.dataset)), "__getitem__", None), "__code__", None)
    return code is None or not may_draw(names_in(original(code))[1])


def _expects_single_pass(loader: LoaderLike, known: ManagedDataset) -> bool:
    """Whether the script has only predicted so far and requests no more samples than there are. Caching costs time and
    pays off only in a second pass. Persistent workers could not start caching later."""
    _with_gradients.add(torch.is_grad_enabled())
    is_first = known.asked_for <= len(without_subsets(loader.dataset)) and isinstance(loader.sampler, SequentialSampler)
    return is_first and not (True in _with_gradients or loader.persistent_workers)


def _managed(loader: LoaderLike) -> ManagedDataset:
    """Returns the managed dataset of one of the script's loaders, creating one for a new dataset. There are two if the
    script modifies a dataset for one subset, and back for another."""
    asked = loader.dataset
    same = [known for known in _datasets if known.is_same(without_subsets(asked))]
    before = next((x for x in same if x.has_served(asked)), None)
    known = before if len(same) == 1 and before else next((x for x in same if x.is_unchanged()), before)
    if known is None:
        if any(released() is without_subsets(asked) for released in _released):
            _kept_by_script.add(True)
        left = [known for known in _datasets if known.is_left and known.nbytes > MOST_LEFT_BYTES]
        if left and not _kept_by_script:
            refresh()
            for known in left:
                _released.append(known.release())
            gc.collect()  # the parts of a cached dataset refer to each other
        _lost.extend(0 for known in _datasets if known.is_lost)
        why_late = _why_late(type(without_subsets(asked)))
        _forget([known for known in _datasets if known.dataset is None] or _datasets[: 1 - MOST_DATASETS])
        known = ManagedDataset(loader, not _is_trying(), why_late)
        _datasets.append(known)
    elif known.is_due and not _is_trying():
        known.start_trial()
    known.serve(asked)
    return known


def _why_late(kind: type) -> str:
    """Why a new dataset of this class is not tried at once; "" if it is."""
    once = _used_once[kind] + sum(known.kind is kind and known.was_used_once for known in _datasets)
    if once >= MOST_LOST:
        return USED_ONCE
    return TOO_MANY_LOST if len(_lost) >= MOST_LOST else TOO_LONG if _tries_too_much() else ""


def _tries_too_much() -> bool:
    """Whether trials took much of the script's time: it may have a hundred small datasets."""
    spent = _tried_s + [known.start_s + known.waited_s for known in _datasets]
    return len(spent) >= FEW_DATASETS and sum(spent) > TRIAL_SHARE * (time.monotonic() - _began[0])


def _forget(datasets: Sequence[ManagedDataset]) -> None:
    """Ends the trials of datasets that are not remembered any more."""
    for known in datasets:
        known.end_trial()
        _used_once[known.kind] += known.was_used_once
        _tried_s.append(known.start_s + known.waited_s)
        _tried_s[:-FEW_DATASETS] = [sum(_tried_s[:-FEW_DATASETS])]  # a script may make thousands of datasets
        _datasets.remove(known)


def _decide_settings(loader: LoaderLike, known: ManagedDataset, entries: JsonObject, why_own_count: str) -> None:
    """Decides and records a loader's settings."""
    applied = applied_to(loader)
    own = int(loader.num_workers)
    count, reason = (own, why_own_count) if why_own_count else workers_for(loader, known)
    where = os.environ.get(WORKERS_ON, "")
    by_task = bool(where) and not why_own_count and not (own == 0 and why_not(loader))
    if by_task:
        count = count or first_guess(loader)[0]
        loader.__dict__["worker_method"] = where
        reason += f"; and workers on other nodes ({where}): random generators are seeded per batch"
    _use_workers(loader, count, by_task)
    # Read-ahead threads load samples in a different order, and several at once.
    is_safe = known.found is not None and known.found.is_stateless
    if loader.__dict__.get("read_threads") is None or applied.entry is not None:
        loader.__dict__["read_threads"] = "auto" if is_safe else 1
    # Whether a loader without workers gets some is decided again once the trial has ended, and once the cost of its own
    # collate function and whether its samples draw random numbers are known.
    may_collate = not is_plain(loader.collate_fn)
    is_open = known.waits or known.trial is not None or may_collate or given_workers.UNSEEN in reason
    applied.is_undecided = count == own == 0 and not why_own_count and is_open
    name = name_of(loader)
    applied.entry = entry = entries[name] = {} if applied.entry is None else applied.entry
    _entries[name] = entry, known, weakref.ref(loader)
    entry |= {
        "from": {"num_workers": own},
        "to": {"num_workers": count},
        "reason": reason,
        "measured_s": known.start_s + known.waited_s,
        "cache": known.report(),
    }


def workers_for(loader: LoaderLike, known: ManagedDataset) -> tuple[int, str]:
    """Returns the worker count for a loader whose settings are its own, and the reason."""
    own, found = int(loader.num_workers), known.found
    if own:  # a rare sample may draw in a way that neither its code nor the trial shows
        return own, f"kept {own}: each worker draws its own random numbers, so more of them might make other samples"
    if found is None:  # a script may make thousands of loaders, and a guess reads a dozen files
        return 0, f"kept 0: {known.reason}"
    guess, why = first_guess(loader)
    cannot = _why_given_none(loader, known, found, guess)
    return (0, f"kept 0: {cannot}") if cannot else (guess, why)


def _why_given_none(loader: LoaderLike, known: ManagedDataset, found: TrialResult, workers: int) -> str:
    """Why a loader without workers gets none; "" if it gets ``workers``."""
    if not 0 < found.sample_s < math.inf:
        return found.why_not
    size = loader.batch_size or 1
    cannot = found.only_in_workers or state_of(loader).no_workers or why_not(loader, threads=True)
    if cannot:
        return cannot
    if known.own_cache:
        return f"the dataset caches samples in {known.own_cache}, where the script may look"
    served_s = found.sample_s if known.staged is None else found.cached_s
    is_tiny = found.sample_s * size < TINY_BATCH_S or found.sample_s < TINY_SAMPLE_S
    if is_tiny and not given_workers.collates_long(loader):
        return f"a batch takes {served_s * size * 1e3:.2g} ms"
    cannot = _why_alone(loader) or given_workers.why_none(loader, found, workers)
    cannot = cannot or given_workers.why_other_bits(loader)
    known.set_threads_matter(bool(cannot))
    return cannot


def _why_alone(loader: LoaderLike) -> str:
    """Why samples in workers would be others than in the script's process; "" if they would not."""
    handle = held(loader.dataset)
    if handle:
        return f"{handle}, which several processes would have to share"
    functions = functions_of(*given_workers.made_from(loader))
    named = set().union(*(names_in(original(f.__code__))[1] for f in functions))
    asked = min(ASK_FOR_PROCESS & named, default="")
    return f"samples may depend on the process that makes them, which {asked}() tells" if asked else ""


def _use_workers(loader: LoaderLike, count: int, by_task: bool) -> None:
    """Sets a loader's worker count. Its own count keeps torch's seeds; any other, or ``by_task``, seeds each task."""
    own = int(loader.num_workers)
    if count == own and not by_task:
        return
    loader.num_workers = AutoWorkers(count)
    if loader.prefetch_factor is None:
        loader.prefetch_factor = 2
    state = state_of(loader)
    state.first_count_reason = state.first_count_reason or "applied"
    state.own_workers = own
