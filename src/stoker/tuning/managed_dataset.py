"""A dataset of a script under ``stoker run --apply``: its trial, its cache, and where its cached batches are made."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..core.compare import equal_bits
from ..core.dataset_tree import without_subsets
from ..core.errors import UsageError
from ..core.filesystems import is_far
from ..core.options import AutoWorkers
from ..core.resources import ranks
from ..core.types import Batch, JsonObject, LoaderLike, MapDataset
from ..loader import engine
from ..loader.auto.limits import cores_here
from ..loader.emulated_workers import EmulatedWorkersIter, SeededTasksIter, WorkerlessIter, worker_copies
from ..loader.loader_state import state_of
from ..sampling.generators import find_generators
from ..sampling.worker_init import only_seeds
from ..staging import keep, subsets
from ..staging.change_watch import STALE, Discards, shortly
from ..staging.collated import Collated
from ..staging.dataset import Staged
from ..staging.executed_code import written_by
from ..staging.inputs import Inputs
from ..staging.isolate import Trial
from ..staging.late_plan import LatePlan
from ..staging.node_cache import start_trial
from ..staging.plan import Plan
from ..staging.split import Split
from ..staging.store.folder import root
from ..staging.trial import TrialResult
from ..staging.verify import attribute_of_dataset, changed_name
from ..workers.fetcher import is_plain
from .applied_loader import applied_to
from .cached_epochs import CachedEpochs, Maker, why_not

if TYPE_CHECKING:
    from ..staging.store.memory import MemoryTables

LIMIT_S = 30.0  # for a trial
FEWEST_SAMPLES = 8  # of a dataset for which a trial is made
LEAST_GAIN = 2.0  # times: making the first part of a sample, against copying it out of memory
LEAST_GAIN_S = 50e-6  # and at least so much less
LEAST_GAIN_SHARE = 0.02  # of a sample's time
MOST_SERVED = 8  # subsets that are remembered
NEW_CALLS = 0.9  # of the results kept, new ones in an epoch: a cache is of no use
LEAST_SHARE = 0.05  # of a dataset that has to fit into the cache


class ManagedDataset:
    """The dataset of one of the script's loaders, and what is known of it. Without a cache for it the dataset is not
    held: once the script has let it go, its trial ends. ``may_try``: no other trial runs."""

    def __init__(self, loader: LoaderLike, may_try: bool = True) -> None:
        asked = loader.dataset
        dataset = without_subsets(asked)
        self._dataset = _weakly(dataset)
        self._length = len(dataset)
        self._samples = len(asked)  # that one loader wants
        self._served: deque[Callable[[], MapDataset | None]] = deque(maxlen=MOST_SERVED)
        self._indices = subsets.for_trial(asked)
        self._loader = weakref.ref(loader)
        self._end_trial: Callable[[], object] = lambda: None
        self.found: TrialResult | None = None  # by the trial
        self.reason = ""  # why nothing is kept
        self.staged: Staged | None = None  # the dataset with its cache
        self.collated: Staged | None = None  # the collate function of one of its loaders, with a cache
        self._filled_before = 0  # results in that when the last epoch began
        self.kept_before = 0  # samples that earlier runs left on disk
        self.why_not_kept = ""  # for the next run
        self.start_s = 0.0  # that the script waited while the trial was started
        self.waited_s = 0.0  # that it waited for the trial's end
        self.by_script = False  # batches that came from the cache were made in the script's own process
        self.failed_in_script = ""  # an error there that workers did not have
        self.trial: Trial | None = None  # that has not ended yet
        self.is_fresh = False  # the script has done nothing since the trial began
        self.asked_for = 0  # samples, in the epochs that were begun
        self.is_single_pass = False  # no more of them are expected, so nothing is kept
        self._lock = threading.Lock()  # a script may take batches in another thread than it makes iterators in
        self._discards = Discards()  # trials of a dataset that was changed meanwhile
        # by a loader's id, and how many of its functions: names of what they may change
        self._written: dict[tuple[int, int], set[str]] = {}
        self.waits = False  # until no other trial runs
        self._is_second = False  # no sample could be loaded in the first trial
        if hasattr(type(dataset), "_stoker_batches"):
            self.reason = "the dataset is staged already"
        elif len(dataset) < FEWEST_SAMPLES:
            self.reason = f"{len(dataset)} samples are too few for a trial"
        elif may_try:
            self.start_trial()
        else:
            self.reason = "the trial of another dataset has not ended yet"
            self.waits = True

    @property
    def dataset(self) -> MapDataset | None:
        """None: the script has let it go."""
        return self._dataset()

    def start_trial(self) -> None:
        """Begins to look for what can be kept."""
        began, self.is_fresh, self.waits = time.monotonic(), True, False
        dataset, loader = self.dataset, self._loader()
        if dataset is None:
            return
        sampler = () if loader is None else loader._index_sampler
        is_users = loader is not None and loader._auto_collation and not is_plain(loader.collate_fn)
        collate_fn = loader.collate_fn if loader is not None and is_users else None
        try:
            self.trial = start_trial(dataset, LIMIT_S, self._discards.changing, self._indices, sampler, collate_fn)
            self.reason = "the trial has not ended yet"
            self._looked_at = Inputs(dataset).let_go(dataset)  # beside the trial
            with contextlib.suppress(TypeError):
                gone = weakref.finalize(dataset, self.trial.close)
                gone.atexit = False
                self._end_trial = gone
        except OSError as e:
            self.reason = f"no process can be started for the trial: {e}"
        self.start_s += time.monotonic() - began

    def take_result(self, seconds: float) -> None:
        """Takes what the trial found, waiting for it no longer than ``seconds``. If the script has changed the dataset
        since the trial began, another trial begins."""
        if self.trial is None:
            return
        began = time.monotonic()
        with self._lock:
            while self.trial is not None and self.trial.wait(max(0.0, began + seconds - time.monotonic())):
                trial, self.trial = self.trial, None
                self.end_trial()
                try:
                    self._take(trial)
                except Exception as e:  # a script must not fail because it is to be faster
                    self.reason = str(e)
        self.waited_s += time.monotonic() - began
        self.is_fresh = False

    @property
    def is_trying(self) -> bool:
        """Whether its trial's process runs."""
        return self.trial is not None and self.trial.is_running

    def end_trial(self) -> None:
        """Nobody asks for its result any more."""
        self._end_trial()

    def _take(self, trial: Trial) -> None:
        found: TrialResult | None = None
        try:
            found, self.reason = trial.result(), ""
        except UsageError as e:
            self.reason = str(e)
        has_loaded = found is not None and math.isfinite(found.sample_s)
        if not (has_loaded or self.is_fresh or self._is_second or ranks() > 1):  # the files may have come since then
            self._is_second = True
            self.start_trial()
            return
        # Ranks of a node share one trial, which is not begun again.
        changes = [] if self.is_fresh or ranks() > 1 else self._changes(found, self._looked_at)
        if not changes:
            self.found = found
            self.reason = self.reason if found is None else self._stage(found, trial.memories)
            self._stage_collate(found, self._loader())
            return
        self._discards.add(changes)
        if self._discards.too_many:
            self.reason = f"it changes before each epoch: {shortly(changes)}"
        else:
            self.start_trial()

    def late_plan(self, loader: LoaderLike) -> LatePlan | None:
        """How workers that are about to start come by the cache, if the trial ends in the middle of their epoch; None
        where it has ended, or there are no workers."""
        if self.trial is None or self.is_single_pass or not int(loader.num_workers):
            return None
        started_with = Inputs(self.dataset)

        def ask(late: LatePlan) -> bool:
            with contextlib.suppress(Exception):  # the next epoch has the cache
                self.take_result(0)
                if self.trial is not None:
                    return True
                staged = self.staged
                if staged is not None and staged.usable and not self._changes(self.found, started_with):
                    late.publish(staged)
            return False

        return LatePlan(ask)

    def _changes(self, found: TrialResult | None, before: Inputs) -> list[str]:
        """What the script has changed in the dataset since a fingerprint of it, and not what loading samples changes,
        nor what the kept part does not read."""
        known, opened, reads = set(self._discards.changing), {}, None
        if found is not None:
            known |= {found.changes} if found.changes else set()
            opened = found.opened or {}
            kept = found.plan or found.memo
            reads = None if kept is None else kept.reads
        changes = before.changes(Inputs(self.dataset), opened)
        read = [c for c in changes if reads is None or changed_name(c) in reads]
        return [c for c in read if not known & {changed_name(c), attribute_of_dataset(c)}]

    def _stage(self, found: TrialResult, memories: Sequence[MemoryTables]) -> str:
        """Stages the dataset, in the node's memory if that is shared; or says why not."""
        kept = found.plan or found.memo
        if kept is None:
            return found.why_not
        why = "" if found.plan is None else why_it_does_not_pay(found.plan)
        if why:
            return f"{why}; not more, because {found.why_not}" if found.why_not else why
        dataset = self.dataset
        assert dataset is not None  # its loader asks
        staged = Staged(dataset, _split=Split(dataset, found), _memories=memories)
        nbytes = kept.nbytes * self._samples
        if staged.account.budget < LEAST_SHARE * nbytes:
            return f"it would not fit: {nbytes / 1e9:,.1f} GB"
        staged.stands_for = dataset
        self._keep(staged)
        self.staged = staged
        self._dataset = lambda: dataset
        return ""

    def _keep(self, staged: Staged) -> None:
        """Connects a cache with what earlier runs left of it, where ``--keep`` asks for that. Ranks and what is read
        from servers, which nobody can ask for stamps, do without; so do results of calls."""
        most = keep.quota(root())
        if not most or staged.capacity != len(staged) or ranks() > 1 or is_far(staged.dataset):
            return
        try:
            self.kept_before = staged.keep_between_runs(root(), most)
        except (UsageError, OSError) as e:
            self.why_not_kept = str(e)

    def _stage_collate(self, found: TrialResult | None, loader: LoaderLike | None) -> None:
        """Stages the collate function of the loader for which the trial was made."""
        # One that draws from a generator of its own is copied for each worker that the script's process plays.
        if found is None or found.collate is None or loader is None:
            return
        if not find_generators(loader.collate_fn):
            with contextlib.suppress(UsageError):  # it reads what cannot be compared
                collated = Collated(loader.collate_fn, self._length)
                self.collated = Staged(collated, _split=Split(collated, found.collate))

    def collate_for(self, loader: LoaderLike) -> Callable[..., Batch] | None:
        """The loader's collate function with its cache, at an epoch's beginning; None where it goes without. Workers
        that stay would not be told that an epoch begins."""
        collated = self.collated
        if collated is None or loader.persistent_workers or collated.dataset.collate_fn != loader.collate_fn:
            return None
        if self.is_single_pass or self._changed_by(loader, [loader.worker_init_fn], collated):
            return None
        collated._begin()
        filled = collated.account.filled
        if filled > (1 + NEW_CALLS) * self._filled_before > 0:
            collated._disable("most calls in collate_fn have other arguments in each epoch")
        self._filled_before = filled
        return collated.__getitem__ if collated.usable else None

    @property
    def own_cache(self) -> str:
        """The attribute in which the dataset keeps what it loaded itself; "" where it does not."""
        plan = None if self.found is None else self.found.plan
        return plan.own_caches[0][-1] if plan is not None and plan.own_caches else ""

    def staged_for(self, loader: LoaderLike) -> MapDataset | None:
        """The loader's dataset with its cache; None where the loader goes without. Without workers the dataset's own
        cache serves, and the script can look into it."""
        if self.staged is None or self.is_single_pass or (self.own_cache and not loader.num_workers):
            return None
        changed = self._changed_by(loader, [loader.collate_fn, loader.worker_init_fn], self.staged)
        if changed:
            self.reason = f"the loader's collate_fn or worker_init_fn changes {changed}, which the cached part reads"
            return None
        return subsets.with_whole(loader.dataset, self.staged)

    def _changed_by(self, loader: LoaderLike, asked: Sequence[object], staged: Staged) -> str:
        """An attribute or a global variable that some of the loader's functions may change, and a cached part may
        read."""
        split = staged.split
        functions = [fn for fn in asked if fn is not None and not is_plain(fn)]
        if split is None or not functions:
            return ""
        known = self._written.get((id(loader), len(asked)))
        if known is None:
            written: set[str] = set()
            for fn in functions:
                if fn is not loader.worker_init_fn or not only_seeds(fn):
                    written |= set().union(*(written_by(f) for f in Inputs(fn).functions.values()))
            known = self._written[id(loader), len(asked)] = written
        return min(known if split.reads is None else known & split.reads, default="")

    def is_same(self, dataset: MapDataset) -> bool:
        """Whether another dataset is this one, or one made anew with the same content."""
        if dataset is self.dataset:
            return True
        if type(dataset) is not type(self.dataset) or self.staged is None:
            return False
        try:
            return len(dataset) == self._length and equal_bits(dataset, self.dataset)
        except Exception:
            return False

    def is_unchanged(self) -> bool:
        """Whether the dataset is as it was when its cache was begun; true where there is none."""
        return self.staged is None or not self.staged._watch.changes()

    def has_served(self, asked: MapDataset) -> bool:
        """Whether a loader had this dataset, or this subset of it, before."""
        return any(served() is asked for served in self._served)

    def serve(self, asked: MapDataset) -> None:
        """A loader has this dataset, or a subset of it. Where the script has made it anew, its random part is that
        object's from now on."""
        dataset = without_subsets(asked)
        if self.staged is not None and dataset is not self.dataset:
            self._dataset = lambda: dataset
            self.staged.replace_dataset(dataset)
        if not self.has_served(asked):
            self._served.append(_weakly(asked))

    def is_for_script(self, loader: LoaderLike) -> bool:
        """Whether the epoch that begins is to be made in the script's own process."""
        staged, found = self.staged, self.found
        if staged is None or found is None or found.changes or not staged.usable or not int(loader.num_workers):
            return False
        applied = applied_to(loader)
        if applied.epochs is None:
            plan, memo = found.plan, found.memo
            sample_s = plan.read_s + plan.tail_s if plan is not None else 0.0 if memo is None else memo.served_s
            sample_s += found.collate_s
            applied.epochs = CachedEpochs(sample_s, int(loader.num_workers), cores_here())
        is_filled = applied.epochs.is_filled(*self._filled(staged, loader))
        if is_filled and applied.only_in_workers is None:
            applied.only_in_workers = found.only_in_workers or why_not(loader)
        may = is_filled and not applied.only_in_workers
        if applied.epochs.choose(state_of(loader).metrics.by_epoch, may) is not Maker.SCRIPT:
            return False
        staged._begin()
        return staged.usable and staged.account.filled > 0

    def _filled(self, staged: Staged, loader: LoaderLike) -> tuple[int, int]:
        """How many samples of a loader are in the cache, and how many it has; of calls, all results."""
        indices = subsets.indices(loader.dataset)
        if indices is None or staged._store is None or staged._table is not None:
            return staged.account.filled, staged.capacity
        return int(np.count_nonzero(staged._store.locations[indices])), len(indices)

    def without_workers(
        self, loader: LoaderLike, collate_fn: Callable[..., Batch] | None
    ) -> Callable[[LoaderLike], Iterator[Batch]]:
        """What makes iterators of a loader without its workers; with them, if generators cannot be copied.
        ``collate_fn``: with its cache; None: the loader's own."""
        alone = self.found is not None and self.found.assigns
        try:
            with engine.with_dataset(loader, self.staged_for(loader), None, collate_fn):
                own = worker_copies(loader, alone)
        except Exception:
            return engine.get_iterator
        self.by_script = True

        def failed(error: str) -> None:
            self.failed_in_script = applied_to(loader).only_in_workers = error

        def make(loader: LoaderLike) -> Iterator[Batch]:
            it: WorkerlessIter
            if isinstance(loader.num_workers, AutoWorkers):
                with engine.with_dataset(loader, own[0][0]) if alone else contextlib.nullcontext():
                    it = SeededTasksIter(loader)
            else:
                loader.check_worker_number_rationality()  # type: ignore[attr-defined]  # as torch does
                it = EmulatedWorkersIter(loader, own)
            it.failed_here = failed
            return it

        return make

    def report(self) -> JsonObject:
        """What a report says of the cache, without what is empty."""
        out: JsonObject = {"why_not": self.reason, "samples": self._length}
        if self.collated is not None and self.collated.usable and self.collated.account.filled:
            out["collate"] = "; ".join(row.name for row in self.collated.split.rows) if self.collated.split else ""
        if self.staged is None or self.found is None:
            return out
        if self.is_single_pass:
            return out | {"why_not": "no gradients were asked for so far: a single pass over the samples is expected"}
        account, now = self.staged.account, self.staged.split or self.found  # a dataset that changed was looked at anew
        return out | {
            "kept": "; ".join(f"{row.where} {row.name}".strip() for row in now.rows if row.cached),
            "why_not": now.why_not,
            "calls": now.memo is not None,
            "filled": account.filled,
            "nbytes": account.nbytes,
            "from_earlier_runs": self.kept_before,
            "why_not_kept": self.why_not_kept,  # for later ones
            "shared": account.ranks,  # of this node, that fill and read one cache: "nbytes" is counted in each of them
            "fill_s": account.keep_s,
            "discarded": "" if self.staged.usable else account.reason,
            "stale": not self.staged.usable and STALE in account.reason,
            "cut": "" if now.plan is None else now.plan.shown,
        }


def _weakly(x: MapDataset) -> Callable[[], MapDataset | None]:
    """Returns the object, None once the script has let it go. Lists and the like are held."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: x


def why_it_does_not_pay(plan: Plan) -> str:
    """Why the first part of a sample is not worth keeping; "" if it is."""
    least_s = max(LEAST_GAIN_S, LEAST_GAIN_SHARE * (plan.head_s + plan.tail_s))
    if plan.head_s >= max(LEAST_GAIN * plan.read_s, plan.read_s + least_s):
        return ""
    return (
        f"it would not pay: the deterministic part of a sample takes {plan.head_s * 1e6:,.0f} us of "
        f"{(plan.head_s + plan.tail_s) * 1e6:,.0f} us, copying it out of memory {plan.read_s * 1e6:,.0f} us"
    )
