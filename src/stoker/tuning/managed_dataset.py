"""A script's dataset under ``stoker run --apply``: its trial, its cache, and where its cached batches are made."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from ..core.compare import equal_bits
from ..core.dataset_tree import without_subsets
from ..core.errors import StokerError, UsageError
from ..core.filesystems import is_far
from ..core.resources import ranks
from ..core.types import Batch, JsonObject, LoaderLike, MapDataset
from ..loader import engine
from ..loader.auto.limits import cores_here
from ..loader.loader_state import state_of
from ..sampling.generators import find_generators
from ..sampling.worker_init import only_seeds
from ..staging import keep, subsets
from ..staging.change_watch import STALE, Changing, Discards, shortly
from ..staging.collated import Collated
from ..staging.dataset import Staged
from ..staging.executed_code import written_by
from ..staging.inputs import Inputs, functions_of
from ..staging.isolate import Trial
from ..staging.late_plan import LateHere, LatePlan
from ..staging.node_cache import start_trial
from ..staging.split import Split
from ..staging.store.folder import root
from ..staging.store.memory import MemoryTables
from ..staging.trial import TrialResult
from ..staging.verify import attribute_of_dataset, changed_name
from ..workers.fetcher import is_plain
from .applied_loader import applied_to
from .cache_pays import why_comparing_does_not_pay, why_it_does_not_pay
from .cached_epochs import CachedEpochs, Maker
from .given_workers import loop_may_write

T = TypeVar("T")
LIMIT_S = 30.0  # for a trial
WAIT_SHARE = 0.5  # of an epoch: longer waiting for a trial costs more than another epoch without a cache, except for
LEAST_WAIT_S = 0.25  # which is also the limit as long as the time of a sample is not known, if digesting the dataset
MUCH_S = 0.02  # takes longer than this: the trial does so, too, before it loads a sample
LOOK_S = 0.01  # between two looks at what is known of an epoch's time
DELAY_S = 10.0  # a dataset that is tried late must have been in use for this long
FEWEST_SAMPLES = 8  # smaller datasets get no trial
MOST_SERVED = 8  # subsets remembered
NEW_CALLS = 0.9  # share of new results in an epoch above which a cache of calls is useless
LEAST_SHARE = 0.05  # of a dataset that must fit into the cache


class ManagedDataset:
    """The dataset of one of the script's loaders, and what is known about it. Without a cache, the dataset is
    referenced only weakly: once the script drops it, its trial ends. ``may_try``: no other trial runs. ``why_late``:
    why its trial starts only once the script has used the dataset for ``DELAY_S``; "" for at once."""

    def __init__(self, loader: LoaderLike, may_try: bool = True, why_late: str = "") -> None:
        asked = loader.dataset
        dataset = without_subsets(asked)
        self._dataset = _weakly(dataset)
        self.kind = type(dataset)
        self._length = len(dataset)
        self._samples = len(asked)  # number that one loader requests
        self._workers = max(1, int(loader.num_workers))
        self._served: deque[Callable[[], MapDataset | None]] = deque(maxlen=MOST_SERVED)
        self._indices = subsets.for_trial(asked)
        self._loader = weakref.ref(loader)  # the latest
        self._loaders = [self._loader]
        self._end_trial: Callable[[], object] = lambda: None
        self._last_report: JsonObject | None = None
        self.nbytes = 0  # of what it holds
        self._digest_s = 0.0  # seconds of processor time that digesting the dataset took here
        self._collate_fn: Callable[[], Callable[..., Batch] | None] = lambda: None  # for which the trial runs
        self.found: TrialResult | None = None  # the trial's result
        self.reason = ""  # why nothing is kept
        self.staged: Staged | None = None  # the dataset with its cache
        self.collated: Staged | None = None  # the collate function of one of its loaders, with a cache
        self._filled_before = 0  # results in that cache when the last epoch began
        self.kept_before = 0  # samples found on disk, from earlier runs
        self.why_not_kept = ""  # why nothing is kept for the next run
        self.start_s = 0.0  # for which the script waited for the trial to start
        self.waited_s = 0.0  # for which the script waited for the trial to end
        self.by_script = False  # the script's own process made batches from the cache
        self.trial: Trial[TrialResult] | None = None  # while it has not ended
        self.is_fresh = False  # the script has not run since the trial began
        self.asked_for = 0  # samples requested in the epochs begun so far
        self.is_single_pass = False  # only one pass is expected, so nothing is cached
        self._lock = threading.Lock()  # a script may take batches in one thread and create iterators in another
        self._discards = Discards()  # trials and caches discarded because the dataset changed
        self._collate_discards = Discards()
        self._is_alone = False  # the trial is not shared by the ranks of this node
        self._did_not_pay = False  # comparing what samples depend on costs too much for the epochs seen so far
        self._written: dict[tuple[int, int], set[str]] = {}  # names changed by a loader's functions: id, their number
        self.waits = False  # waits until no other trial runs
        self._is_second = False  # the first trial could not load any sample
        self._threads_matter = True  # see ``set_threads_matter``
        self._not_before = time.monotonic() + (DELAY_S if why_late else 0.0)
        self._begin(dataset, may_try, why_late)

    def _begin(self, dataset: MapDataset, may_try: bool, why_late: str) -> None:
        """Starts the trial, or says why not now."""
        if hasattr(type(dataset), "_stoker_batches"):
            self.reason = "the dataset is already staged"
        elif len(dataset) < FEWEST_SAMPLES:
            self.reason = f"{len(dataset)} samples are too few for a trial run"
        elif why_late:
            self.reason = why_late
            self.waits = True
        elif may_try:
            self.start_trial()
        else:
            self.reason = "the trial run of another dataset has not finished yet"
            self.waits = True

    @property
    def dataset(self) -> MapDataset | None:
        """The dataset; None once the script has dropped it."""
        return self._dataset()

    def start_trial(self, alone: bool = False) -> None:
        """Starts a trial, which looks for parts of samples to cache. ``alone``: ranks of this node do not share it."""
        began, self.is_fresh, self.waits, self._is_alone = time.monotonic(), True, False, alone
        dataset, loader = self.dataset, self._loader()
        if dataset is None:
            return
        sampler = () if loader is None else loader._index_sampler
        is_users = loader is not None and loader._auto_collation and not is_plain(loader.collate_fn)
        fn = loader.collate_fn if loader is not None and is_users else None
        self._collate_fn = _weakly(fn)  # a method of the dataset would keep it alive
        try:
            of_samples, of_collate = self._discards.changing, self._collate_discards.changing
            changing = Changing(of_samples.often | of_collate.often, of_samples.once | of_collate.once)
            self.trial = start_trial(dataset, LIMIT_S, changing, self._indices, sampler, fn, alone)
            self.reason = "the trial run has not finished yet"
            forked = time.thread_time()
            self._looked_at = Inputs(dataset).let_go()  # in parallel with the trial
            self._digest_s, self.nbytes = time.thread_time() - forked, self._looked_at.nbytes
            with contextlib.suppress(TypeError):
                gone = weakref.finalize(dataset, self.trial.close)
                gone.atexit = False
                self._end_trial = gone
        except OSError as e:
            self.reason = f"cannot start a process for the trial run: {e}"
        self.start_s += time.monotonic() - began

    def begin_epoch(self, loader: LoaderLike) -> None:
        """Ends a cache if what it was made from has changed, and starts another trial, for this loader."""
        self._loader = weakref.ref(loader)
        self._note_length(loader)
        if not any(served() is loader for served in self._loaders):
            self._loaders = [served for served in self._loaders if served() is not None] + [self._loader]
        for staged in filter(None, (self.staged, self.collated)):
            if self.is_single_pass or staged.begin_first():
                continue
            if staged is self.staged:
                self.staged, self._dataset = None, _weakly(staged.dataset)
            else:
                self.collated = None
            if staged.changes_always:
                self.reason = "it changes before each epoch"
                continue
            self.end_trial()  # it began before the change
            self.start_trial(alone=True)  # a shared cache may hold samples from before the change

    def _note_length(self, loader: LoaderLike) -> None:
        """Starts another trial if longer epochs come than those in which caching would not have paid off."""
        samples = len(loader.dataset)
        with contextlib.suppress(TypeError, NotImplementedError):  # a sampler without a length
            samples = max(samples, len(loader.sampler))
        is_longer = samples > self._samples
        self._samples = max(samples, self._samples)
        if is_longer and self._did_not_pay and self.trial is None:
            self._did_not_pay = False
            self.start_trial(alone=True)

    def take_result(self, seconds: float, by_epoch: bool = True) -> None:
        """Takes the trial's result, waiting at most ``seconds``. ``by_epoch``: and not longer than ``WAIT_SHARE`` of an
        epoch. Starts another trial if the script has changed the dataset since this one began."""
        if self.trial is None:
            return
        began = time.monotonic()
        with self._lock:
            while self.trial is not None and self._has_ended(self.trial, began, seconds, by_epoch):
                trial, self.trial = self.trial, None
                self.end_trial()
                try:
                    self._take(trial)
                except Exception as e:  # an attempt to speed up a script must not make it fail
                    self.reason = str(e)
        self.waited_s += time.monotonic() - began
        self.is_fresh = False

    def _has_ended(self, trial: Trial[TrialResult], began: float, seconds: float, by_epoch: bool) -> bool:
        """Waits for a trial, and returns whether it has ended."""
        while True:
            limit_s = max(LEAST_WAIT_S, WAIT_SHARE * trial.sample_s * self._samples / self._workers)
            if math.isinf(trial.sample_s) and self._digest_s > MUCH_S:
                limit_s = LEAST_WAIT_S
            left = began + (min(seconds, limit_s) if by_epoch else seconds) - time.monotonic()
            if trial.wait(max(0.0, min(left, LOOK_S))):
                return True
            if left <= 0:
                return False

    @property
    def is_trying(self) -> bool:
        """Whether the trial's process runs. Nobody may ask for its answer for a long time."""
        if not self._lock.acquire(blocking=False):
            return self.trial is not None  # another thread waits for it
        try:
            return self.trial is not None and not self.trial.wait(0)
        finally:
            self._lock.release()

    def end_trial(self) -> None:
        """Ends the trial: nobody needs its result any more."""
        self._end_trial()

    def _take(self, trial: Trial[TrialResult]) -> None:
        found: TrialResult | None = None
        try:
            found, self.reason = trial.result(), ""
        except UsageError as e:
            self.reason = str(e)
        has_loaded = found is not None and math.isfinite(found.sample_s)
        is_shared = ranks() > 1 and not self._is_alone  # then it is not repeated
        if not (has_loaded or self.is_fresh or self._is_second or is_shared):  # the files may have appeared since
            self._is_second = True
            self.start_trial()
            return
        changes = [] if self.is_fresh or is_shared else self._changes(found, self._looked_at)
        if not changes:
            self.found = found
            self.reason = self.reason if found is None else self._stage(found, trial.memories)
            self._stage_collate(found)
            return
        self._discards.add(changes)
        if self._discards.too_many:
            self.reason = f"it changes before each epoch: {shortly(changes)}"
        else:
            self.start_trial()

    def late_plan(self, loader: LoaderLike) -> LatePlan | LateHere | None:
        """Returns how a coming epoch receives the cache if the trial ends during it; None if it has ended."""
        if self.trial is None or self.staged is not None or self.is_single_pass:
            return None
        if not int(loader.num_workers):
            return LateHere(functools.partial(self._look_here, weakref.ref(loader)))
        started_with = Inputs(self.dataset).let_go()

        def ask(late: LatePlan) -> bool:
            with contextlib.suppress(Exception):  # the next epoch has the cache anyway
                self.take_result(0)
                if self.trial is not None:
                    return True
                staged = self.staged
                if staged is not None and staged.usable and not self._changes(self.found, started_with):
                    late.publish(staged)
            return False

        return LatePlan(ask)

    def _look_here(self, asking: weakref.ref[LoaderLike], late: LateHere) -> bool:
        """Hands the cache to an iterator without workers. Returns whether it must ask again."""
        with contextlib.suppress(Exception):  # the next epoch has the cache anyway
            self.take_result(0)
            if self.trial is not None:
                return True
            loader = asking()
            staged = None if loader is None or self.staged is None else self.staged_for(loader)
            if staged is not None and self.staged is not None and self.staged.usable:
                late.publish(staged)
        return False

    def _changes(self, found: TrialResult | None, before: Inputs) -> list[str]:
        """What the script has changed in the dataset since a fingerprint was taken. Ignores changes by loading samples,
        and attributes that the cached part does not read."""
        known, opened, reads = set(self._discards.changing.often), {}, None
        if found is not None:
            known |= {found.changes} if found.changes else set()
            opened = found.opened or {}
            kept = found.plan or found.memo
            reads = None if kept is None else kept.reads
        changes = before.changes(Inputs(self.dataset), opened)
        read = [c for c in changes if reads is None or changed_name(c) in reads]
        return [c for c in read if not known & {changed_name(c), attribute_of_dataset(c)}]

    def _stage(self, found: TrialResult, memories: Sequence[MemoryTables]) -> str:
        """Stages the dataset, in the node's shared memory if there is one. Returns why not; "" on success."""
        kept = found.plan or found.memo
        if kept is None:
            return found.why_not
        if self.staged is not None:
            return ""  # only its collate function was tried again
        why = "" if found.plan is None else why_it_does_not_pay(found.plan)
        if not why:
            why = why_comparing_does_not_pay(found, self._samples, self._workers)
            self._did_not_pay = bool(why)
        if why:
            return f"{why}; not more, because {found.why_not}" if found.why_not else why
        dataset = self.dataset
        assert dataset is not None  # guaranteed: its loader is calling
        split = Split(dataset, found)
        staged = Staged(dataset, cache="ram", _split=split, _memories=memories, _discards=self._discards)
        nbytes = kept.nbytes * self._samples
        if staged.account.budget < LEAST_SHARE * nbytes:
            return f"it would not fit: {nbytes / 1e9:,.1f} GB"
        staged.stands_for = dataset
        self._keep(staged)
        staged.set_threads_matter(self._threads_matter)
        self.staged = staged
        self._dataset = lambda: dataset
        return ""

    def set_threads_matter(self, matter: bool) -> None:
        """Sets whether samples may have other bits with a worker's native threads than with those of the script."""
        self._threads_matter = matter
        for staged in filter(None, (self.staged, self.collated)):
            staged.set_threads_matter(matter)

    def _keep(self, staged: Staged) -> None:
        """Connects a cache with the samples of earlier runs, if ``--keep`` asks for it. Leaves out ranks, results of
        calls, and data on servers, which has no stamps."""
        if staged.capacity != len(staged) or ranks() > 1 or is_far(staged.dataset):
            return
        try:
            most = keep.quota(root())
            if not most:
                return
            loader = self._loader()
            threads = torch.get_num_threads() if loader is None or not _own_workers(loader) else 1
            self.kept_before = staged.keep_between_runs(root(), most, threads)
        except (StokerError, OSError) as e:
            self.why_not_kept = str(e)

    def _stage_collate(self, found: TrialResult | None) -> None:
        """Stages the collate function of the loader for which the trial ran."""
        collate_fn = self._collate_fn()
        if self.collated is not None or self._collate_discards.too_many:
            return
        if found is None or found.collate is None or collate_fn is None:
            return
        if not find_generators(collate_fn):
            with contextlib.suppress(UsageError):  # it reads something that cannot be compared
                collated = Collated(collate_fn, self._length)
                split = Split(collated, found.collate)
                self.collated = Staged(collated, cache="ram", _split=split, _discards=self._collate_discards)
                self.collated.set_threads_matter(self._threads_matter)

    def collate_for(self, loader: LoaderLike) -> Callable[..., Batch] | None:
        """Returns the loader's collate function with its cache when an epoch begins; None to go without. Persistent
        workers would not be told that an epoch begins."""
        collated = self.collated
        if collated is None or loader.persistent_workers or collated.dataset.collate_fn != loader.collate_fn:
            return None
        if self.is_single_pass or self._changed_by(loader, [loader.worker_init_fn], collated):
            return None
        filled = collated.account.filled
        if filled > (1 + NEW_CALLS) * self._filled_before > 0:
            collated._disable("most calls in collate_fn have different arguments in each epoch")
        self._filled_before = filled
        return collated.__getitem__ if collated.usable else None

    @property
    def own_cache(self) -> str:
        """The attribute in which the dataset caches what it loaded; "" if it does not."""
        plan = None if self.found is None else self.found.plan
        return plan.own_caches[0][-1] if plan is not None and plan.own_caches else ""

    def staged_for(self, loader: LoaderLike) -> MapDataset | None:
        """Returns the loader's dataset with its cache; None to go without: e.g. it has its own, and no workers."""
        if self.staged is None or self.is_single_pass or (self.own_cache and not loader.num_workers):
            return None
        if self.found is not None and self.found.forgets and not int(loader.num_workers):
            self.reason = f"{self.found.forgets} has an lru_cache of limited size, which each call may change"
            return None
        if self.found is not None and not int(loader.num_workers) and loop_may_write(loader, self.found):
            self.reason = "samples are memory of the dataset's, to which the loop may write; with workers it cannot"
            return None
        changed = self._changed_by(loader, [loader.collate_fn, loader.worker_init_fn], self.staged)
        if changed:
            self.reason = f"the loader's collate_fn or worker_init_fn changes {changed}, which the cached part reads"
            return None
        return subsets.with_whole(loader.dataset, self.staged)

    def _changed_by(self, loader: LoaderLike, asked: Sequence[object], staged: Staged) -> str:
        """A name that the loader's functions may change and a cached part may read; "" if there is none."""
        split = staged.split
        functions = [fn for fn in asked if fn is not None and not is_plain(fn)]
        if split is None or not functions:
            return ""
        known = self._written.get((id(loader), len(asked)))
        if known is None:
            written: set[str] = set()
            for fn in functions:
                if fn is not loader.worker_init_fn or not only_seeds(fn):
                    written |= set().union(*(written_by(f) for f in functions_of(fn)))
            known = self._written[id(loader), len(asked)] = written
        return min(known if split.reads is None else known & split.reads, default="")

    @property
    def is_due(self) -> bool:
        """Whether it waits for its trial, and may start it as far as it is concerned."""
        return self.waits and time.monotonic() >= self._not_before

    @property
    def is_lost(self) -> bool:
        """Whether the script dropped the dataset before its trial had ended."""
        return self.dataset is None and self.trial is not None

    @property
    def was_used_once(self) -> bool:
        """Whether the script dropped the dataset, or all loaders of it, after one epoch."""
        is_dropped = self.dataset is None or not any(loader() is not None for loader in self._loaders)
        return is_dropped and self.asked_for <= self._samples

    @property
    def is_left(self) -> bool:
        """Whether no loader of the script is left that a cached dataset was made for."""
        return self.staged is not None and not any(loader() is not None for loader in self._loaders)

    def release(self) -> Callable[[], MapDataset | None]:
        """Drops the dataset and its cache, not the report. Returns a weak reference: iterators may still use it."""
        released: Callable[[], MapDataset | None] = lambda: None  # noqa: E731
        with contextlib.suppress(TypeError):
            released = weakref.ref(self.dataset)
        self._last_report = self.report()
        self.end_trial()
        self.staged = self.collated = self.trial = None
        self._dataset = lambda: None
        self._served.clear()
        return released

    def is_same(self, dataset: MapDataset) -> bool:
        """Whether another dataset is the same object, or a recreated one with the same content."""
        if dataset is self.dataset:
            return True
        if type(dataset) is not type(self.dataset) or self.staged is None:
            return False
        try:
            return len(dataset) == self._length and equal_bits(dataset, self.dataset)
        except Exception:
            return False

    def is_unchanged(self) -> bool:
        """Whether the dataset is unchanged since its cache was started; True without a cache."""
        return self.staged is None or not self.staged._watch.changes()

    def has_served(self, asked: MapDataset) -> bool:
        """Whether a loader used this dataset, or this subset of it, before."""
        return any(served() is asked for served in self._served)

    def serve(self, asked: MapDataset) -> None:
        """Records that a loader uses this dataset, or a subset. A recreated one makes the random parts from now on."""
        dataset = without_subsets(asked)
        if self.staged is not None and dataset is not self.dataset:
            self._dataset = lambda: dataset
            self.staged.replace_dataset(dataset)
        if not self.has_served(asked):
            self._served.append(_weakly(asked))

    def is_for_script(self, loader: LoaderLike) -> bool:
        """Whether the script's own process makes the coming epoch of a loader that the script made without workers."""
        staged, found = self.staged, self.found
        is_given = state_of(loader).own_workers == 0 and int(loader.num_workers)
        if staged is None or found is None or not staged.usable or not is_given:
            return False
        applied = applied_to(loader)
        if applied.epochs is None:
            applied.epochs = CachedEpochs(found.cached_s + found.collate_s, int(loader.num_workers), cores_here())
        is_filled = applied.epochs.is_filled(*self._filled(staged, loader))
        maker = applied.epochs.choose(state_of(loader).metrics.by_epoch, is_filled)
        return maker is Maker.SCRIPT and staged.account.filled > 0

    def _filled(self, staged: Staged, loader: LoaderLike) -> tuple[int, int]:
        """Number of a loader's samples in the cache, and their total; for calls, all results and the capacity."""
        indices = subsets.indices(loader.dataset)
        if indices is None or staged._store is None or staged._table is not None:
            return staged.account.filled, staged.capacity
        return int(np.count_nonzero(staged._store.locations[indices])), len(indices)

    def report(self) -> JsonObject:
        """The cache's part of the report, without empty entries."""
        if self._last_report is not None:
            return self._last_report
        out: JsonObject = {"why_not": self.reason, "samples": self._length}
        if self.collated is not None and self.collated.usable and self.collated.account.filled:
            out["collate"] = "; ".join(row.name for row in self.collated.split.rows) if self.collated.split else ""
        if self.staged is None or self.found is None:
            return out
        if self.is_single_pass:
            return out | {
                "why_not": "no gradients were computed so far, so only a single pass over the samples is expected"
            }
        account, now = self.staged.account, self.staged.split or self.found  # a changed dataset was tried again
        return out | {
            "kept": "; ".join(f"{row.where} {row.name}".strip() for row in now.rows if row.cached),
            "why_not": now.why_not,
            "calls": now.memo is not None,
            "filled": account.filled,
            "nbytes": account.nbytes,
            "from_earlier_runs": self.kept_before,
            "why_not_kept": self.why_not_kept or ("" if self.staged._kept is None else self.staged._kept.why_not),
            "shared": account.ranks,  # ranks of this node that share one cache; each of them counts "nbytes"
            "fill_s": account.keep_s,
            "compared": account.compared,
            "discarded": "" if self.staged.usable else account.reason,
            "stale": not self.staged.usable and STALE in account.reason,
            "cut": "" if now.plan is None else now.plan.shown,
        }


def as_script_made_it(loader: LoaderLike) -> Iterator[Batch]:
    """Makes an iterator of a loader that got workers as if it had none, as the script made it."""
    given = {name: vars(loader)[name] for name in ("num_workers", "prefetch_factor")}
    vars(loader).update(num_workers=0, prefetch_factor=None)
    try:
        return engine.get_iterator(loader)
    finally:
        vars(loader).update(given)


def _weakly(x: T) -> Callable[[], T | None]:
    """Returns a function that returns the object; None once it is dropped. Holds what has no weak references."""
    try:
        return weakref.WeakMethod(x) if isinstance(x, types.MethodType) else weakref.ref(x)
    except TypeError:
        return lambda: x


def _own_workers(loader: LoaderLike) -> int:
    """Number of workers that the script asked for."""
    own = state_of(loader).own_workers
    return int(loader.num_workers) if own is None else own
