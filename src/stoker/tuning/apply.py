"""``stoker run --apply``: puts stoker's engine, cache and worker count behind loaders that were written without it.

What happens to a loader::

    first iterated      a trial of its dataset begins in a child process
    ... WAIT_S later    the trial has ended: the first epoch fills the cache, or nothing is kept
                        it has not: the first epoch runs without a cache, and the trial ends beside it
                        (workers that stay keep that dataset, so for them the wait is LONG_WAIT_S)
    next epochs         a trial that ended meanwhile takes effect when an epoch begins

The worker count is decided once, when a loader is first iterated. A failure in here leaves the loader as its script
made it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from ..core.allocator import keep_freed_memory
from ..core.compare import equal_bits
from ..core.errors import one_line
from ..core.filesystems import is_far
from ..core.handles import held
from ..core.options import AutoWorkers
from ..core.types import Batch, JsonObject, LoaderLike, MapDataset
from ..loader import engine
from ..loader.auto.limits import cores_here, first_guess
from ..loader.emulated_workers import EmulatedWorkersIter, SeededTasksIter, worker_copies
from ..loader.loader_state import state_of
from ..staging.dataset import Staged
from ..staging.isolate import Trial
from ..staging.node_cache import start_trial
from ..staging.plan import Plan
from ..staging.split import Split
from ..staging.streams import dataset_inside
from ..staging.trial import Found
from .cached_epochs import CachedEpochs, Maker, why_not

if TYPE_CHECKING:
    from ..staging.store.memory import Memory

WAIT_S = 1.0  # before the first batch; a trial that takes longer goes on beside the first epoch
# The same where workers stay, for their dataset is the one that they are started with; and for far storage, where the
# samples that the trial reads take long, and so does the first epoch.
LONG_WAIT_S = 4.0
LIMIT_S = 30.0  # for a trial
FEWEST_SAMPLES = 8  # of a dataset for which a trial is made
LEAST_GAIN = 2.0  # times: making the first part of a sample, against copying it out of memory
LEAST_GAIN_S = 50e-6  # and at least so much less
LEAST_GAIN_SHARE = 0.02  # of a sample's time
LEAST_SHARE = 0.05  # of a dataset that has to fit into the cache
TINY_SAMPLE_S = 100e-6  # samples that take no longer are mostly views of memory: a worker would copy them
TINY_BATCH_S = 0.002  # a batch that takes no longer in the script's own process stays there
MOST_DATASETS = 8  # that are remembered
BY_SCRIPT = "; batches from the cache are made without them, in the script's own process, where that is faster"

WORKERS_ON = "STOKER_WORKERS_ON"  # of the environment: a ``worker_method`` with nodes of a cluster

_datasets: list[ManagedDataset] = []
_entries: list[tuple[JsonObject, ManagedDataset]] = []


class ManagedDataset:
    """A dataset of the script's, and what is known of it."""

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset
        self.found: Found | None = None  # by the trial
        self.reason = ""  # why nothing is kept
        self.staged: Staged | None = None  # the dataset with its cache
        self.start_s = 0.0  # that the script waited while the trial was started
        self.waited_s = 0.0  # that it waited for the trial's end
        self.by_script = False  # batches that came from the cache were made in the script's own process
        self.trial: Trial | None = None  # that has not ended yet
        if hasattr(type(dataset), "_stoker_batches"):
            self.reason = "the dataset is staged already"
        elif len(dataset) < FEWEST_SAMPLES:
            self.reason = f"{len(dataset)} samples are too few for a trial"
        else:
            self._start_trial()

    def _start_trial(self) -> None:
        began = time.monotonic()
        try:
            self.trial = start_trial(self.dataset, LIMIT_S)
            self.reason = "the trial has not ended yet"
        except OSError as e:
            self.reason = f"no process can be started for the trial: {e}"
        self.start_s = time.monotonic() - began

    def take_result(self, seconds: float) -> None:
        """Takes what the trial found, waiting for it no longer than ``seconds``."""
        if self.trial is None:
            return
        began = time.monotonic()
        has_ended = self.trial.wait(seconds)
        self.waited_s += time.monotonic() - began
        if not has_ended:
            return
        try:
            self.found = self.trial.result()
            self.reason = self._stage(self.found, self.trial.memories)
        except Exception as e:  # a script must not fail because it is to be faster
            self.reason = str(e)
        self.trial = None

    def _stage(self, found: Found, memories: Sequence[Memory]) -> str:
        """Stages the dataset, in the node's memory if that is shared; or says why not."""
        kept = found.plan or found.memo
        if kept is None:
            return found.why_not
        why = "" if found.plan is None else why_it_does_not_pay(found.plan)
        if why:
            return f"{why}; not more, because {found.why_not}" if found.why_not else why
        staged = Staged(self.dataset, _split=Split(self.dataset, found), _memories=memories)
        nbytes = kept.nbytes * len(self.dataset)
        if staged.account.budget < LEAST_SHARE * nbytes:
            return f"it would not fit: {nbytes / 1e9:,.1f} GB"
        staged.stands_for = self.dataset
        self.staged = staged
        return ""

    @property
    def own_cache(self) -> str:
        """The attribute in which the dataset keeps what it loaded itself; "" where it does not."""
        plan = None if self.found is None else self.found.plan
        return plan.own_caches[0][-1] if plan is not None and plan.own_caches else ""

    def staged_for(self, loader: LoaderLike) -> Staged | None:
        """The dataset with its cache; None where the loader goes without. Without workers the dataset's own cache
        serves, and the script can look into it."""
        return None if self.own_cache and not loader.num_workers else self.staged

    def is_same(self, dataset: MapDataset) -> bool:
        """Whether another dataset is this one, or one made anew with the same content."""
        if dataset is self.dataset:
            return True
        if type(dataset) is not type(self.dataset) or self.staged is None:
            return False
        try:
            return len(dataset) == len(self.dataset) and equal_bits(dataset, self.dataset)
        except Exception:
            return False

    def replace(self, dataset: MapDataset) -> None:
        """The script made its dataset anew: its random part is that object's from now on."""
        if self.staged is not None and dataset is not self.dataset:
            self.dataset = dataset
            self.staged.replace_dataset(dataset)

    def is_for_script(self, loader: LoaderLike) -> bool:
        """Whether the epoch that begins is to be made in the script's own process."""
        staged, found = self.staged, self.found
        if staged is None or found is None or found.changes or not staged.usable:
            return False
        epochs = loader.__dict__.get("_stoker_epochs")
        if epochs is None:
            plan, memo = found.plan, found.memo
            sample_s = plan.read_s + plan.tail_s if plan is not None else 0.0 if memo is None else memo.served_s
            epochs = loader.__dict__["_stoker_epochs"] = CachedEpochs(sample_s, int(loader.num_workers), cores_here())
        is_filled = epochs.is_filled(staged.account.filled, staged.capacity)
        if is_filled and "_stoker_in_workers" not in loader.__dict__:
            loader.__dict__["_stoker_in_workers"] = why_not(loader)
        may = is_filled and not loader.__dict__["_stoker_in_workers"]
        if epochs.choose(state_of(loader).metrics.by_epoch, may) is not Maker.SCRIPT:
            return False
        staged._begin()
        return staged.usable and staged.account.filled > 0

    def without_workers(self, loader: LoaderLike) -> Callable[[LoaderLike], Iterator[Batch]]:
        """What makes iterators of a loader without its workers; with them, if generators cannot be copied."""
        alone = self.found is not None and self.found.assigns
        try:
            with engine.with_dataset(loader, self.staged):
                own = worker_copies(loader, alone)
        except Exception:
            return engine.get_iterator
        self.by_script = True

        def make(loader: LoaderLike) -> Iterator[Batch]:
            if isinstance(loader.num_workers, AutoWorkers):
                with engine.with_dataset(loader, own[0][0]) if alone else contextlib.nullcontext():
                    return SeededTasksIter(loader)
            loader.check_worker_number_rationality()  # type: ignore[attr-defined]  # as torch does
            return EmulatedWorkersIter(loader, own)

        return make

    def report(self) -> JsonObject:
        """What a report says of the cache, without what is empty."""
        out: JsonObject = {"why_not": self.reason, "samples": len(self.dataset)}
        if self.staged is None or self.found is None:
            return out
        account, now = self.staged.account, self.staged.split or self.found  # a dataset that changed was looked at anew
        return out | {
            "kept": "; ".join(f"{row.where} {row.name}".strip() for row in now.rows if row.cached),
            "why_not": now.why_not,
            "calls": now.memo is not None,
            "filled": account.filled,
            "nbytes": account.nbytes,
            "shared": account.ranks,  # of this node, that fill and read one cache: "nbytes" is counted in each of them
            "fill_s": account.keep_s,
            "discarded": "" if self.staged.usable else account.reason,
            "cut": "" if now.plan is None else now.plan.shown,
        }


def why_it_does_not_pay(plan: Plan) -> str:
    """Why the first part of a sample is not worth keeping; "" if it is."""
    least_s = max(LEAST_GAIN_S, LEAST_GAIN_SHARE * (plan.head_s + plan.tail_s))
    if plan.head_s >= max(LEAST_GAIN * plan.read_s, plan.read_s + least_s):
        return ""
    return (
        f"it would not pay: the deterministic part of a sample takes {plan.head_s * 1e6:,.0f} us of "
        f"{(plan.head_s + plan.tail_s) * 1e6:,.0f} us, copying it out of memory {plan.read_s * 1e6:,.0f} us"
    )


def attach(module: Any, applied: JsonObject) -> None:
    """Puts stoker's engine behind ``module.DataLoader``. ``applied``: gets one entry a loader: ``{"from": settings,
    "to": settings, "reason": text, "measured_s": seconds, "cache": what is kept}``."""
    keep_freed_memory()

    def _get_iterator(loader: LoaderLike) -> Iterator[Batch]:
        staged: object = None
        make: Callable[[LoaderLike], Iterator[Batch]] = engine.get_iterator
        with _left_as_it_is(loader):
            known = _manage(loader, applied) if _is_manageable(loader) else None
            staged = _stream_with_cache(loader, applied) if known is None else known.staged_for(loader)
            if known is not None and known.is_for_script(loader):
                make = known.without_workers(loader)
        with engine.with_dataset(loader, staged):
            return make(loader)

    module.DataLoader._get_iterator = _get_iterator


def cache_alone(module: Any, applied: JsonObject, loader: LoaderLike) -> contextlib.AbstractContextManager[None]:
    """Entered around what begins an epoch of a loader whose class makes iterators of its own (torchdata's
    ``StatefulDataLoader``): gives it the cache. Its workers are the class's. Persistent workers get no cache, for
    they are not told that an epoch begins.
    """
    makes: Any = getattr(type(loader), "_get_iterator", None)
    if not isinstance(loader, module.DataLoader) or makes is module.DataLoader._get_iterator:
        return contextlib.nullcontext()
    asks_torch = "_get_iterator" in getattr(getattr(makes, "__code__", None), "co_names", ("_get_iterator",))
    if asks_torch or str(makes.__module__).startswith("stoker.") or loader.persistent_workers:
        return contextlib.nullcontext()  # torch's is stoker's
    if engine.init_sees_dataset(loader) or not _is_manageable(loader):
        return contextlib.nullcontext()
    staged: Staged | None = None
    with _left_as_it_is(loader):
        managed = _manage(loader, applied, f"kept {int(loader.num_workers)}: its iterators are its class's")
        if managed.staged is not None:
            managed.staged._begin()
            staged = managed.staged
    return engine.with_dataset(loader, staged)


@contextlib.contextmanager
def _left_as_it_is(loader: LoaderLike) -> Iterator[None]:
    """A failure is reported, and the loader stays as its script made it."""
    try:
        yield
    except Exception as e:
        name = loader.__dict__.get("_stoker_name", "?")
        sys.stderr.write(f"stoker: {name}: left as it is: {one_line(e)}\n")


def refresh() -> None:
    """Brings the entries of all loaders up to date."""
    for entry, known in _entries:
        entry["cache"] = known.report()
        if known.by_script and BY_SCRIPT not in entry["reason"]:
            entry["reason"] += BY_SCRIPT


def _is_manageable(loader: LoaderLike) -> bool:
    # An iterable dataset's shards depend on the count, so that stays; "auto" takes care of itself.
    is_auto = isinstance(loader.num_workers, AutoWorkers) and "_stoker_applied" not in loader.__dict__
    is_stream = isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__")
    return not is_auto and loader._dataset_kind == 0 and engine.SUPPORTED and not is_stream


def _stream_with_cache(loader: LoaderLike, applied: JsonObject) -> object:
    """A copy of a stream that asks a dataset with a cache for its samples; None where it is left as it is. Without
    workers it is: what iterating changes in the stream, the script can see."""
    stream, workers = loader.dataset, loader.num_workers
    if not workers or isinstance(workers, AutoWorkers) or engine.init_sees_dataset(loader) or not engine.SUPPORTED:
        return None
    name = dataset_inside(stream)
    if not name:
        return None
    with engine.with_dataset(loader, vars(stream)[name]):
        known = _manage(loader, applied, f"kept {workers}: which samples a worker makes of a stream depends on it")
    if known.staged is None:
        return None
    known.staged._begin()
    out = copy.copy(stream)
    vars(out)[name] = known.staged
    return out


def _manage(loader: LoaderLike, applied: JsonObject, why_own_count: str = "") -> ManagedDataset:
    """What is known of a loader's dataset. The loader's settings are decided the first time. ``why_own_count``: the
    reason for which the worker count is left alone; "": it is decided here."""
    known = _managed(loader.dataset)
    # A stream, and a sampler without a length, may have no end: ultralytics' loader makes one iterator for all epochs.
    stays = loader.persistent_workers or loader._dataset_kind != 0 or not hasattr(loader._index_sampler, "__len__")
    waits_s = LONG_WAIT_S if stays or (known.waited_s == 0 and is_far(loader.dataset)) else WAIT_S
    known.take_result(waits_s if known.waited_s == 0 else 0)
    if "_stoker_applied" not in loader.__dict__ or (known.trial is None and loader.__dict__["_stoker_undecided"]):
        _decide(loader, known, applied, why_own_count)
    for entry, other in _entries:
        if other is known and known.staged is not None:
            entry["from"]["staged"], entry["to"]["staged"] = False, True
    return known


def _managed(dataset: MapDataset) -> ManagedDataset:
    """The managed dataset for one of the script's; a new one for a dataset that was not seen before."""
    for known in _datasets:
        if known.is_same(dataset):
            known.replace(dataset)
            return known
    if len(_datasets) == MOST_DATASETS:
        del _datasets[0]
    _datasets.append(ManagedDataset(dataset))
    return _datasets[-1]


def _decide(loader: LoaderLike, known: ManagedDataset, applied: JsonObject, why_own_count: str) -> None:
    """Decides a loader's settings."""
    own = int(loader.num_workers)
    count, reason = (own, why_own_count) if why_own_count else workers_for(loader, known)
    where = os.environ.get(WORKERS_ON, "")
    if where and not why_own_count:
        count = count or first_guess(loader)[0]
        loader.__dict__["worker_method"] = where
        reason += f"; and workers on other nodes ({where}): random numbers are set per batch"
    _use_workers(loader, count, by_task=bool(where) and not why_own_count)
    loader.__dict__["read_threads"] = loader.__dict__.get("read_threads") or "auto"
    # Whether a loader without workers gets some is decided again when the trial has ended.
    loader.__dict__["_stoker_undecided"] = count == 0 and not why_own_count and known.trial is not None
    entry = loader.__dict__.setdefault("_stoker_applied", {})
    if not entry:
        _entries.append((entry, known))
    applied[loader.__dict__.get("_stoker_name", "?")] = entry
    entry |= {
        "from": {"num_workers": own},
        "to": {"num_workers": count},
        "reason": reason,
        "measured_s": known.start_s + known.waited_s,
        "cache": known.report(),
    }


def workers_for(loader: LoaderLike, known: ManagedDataset) -> tuple[int, str]:
    """The worker count for a loader with settings of its own, and the reason."""
    own, found = int(loader.num_workers), known.found
    guess, why = first_guess(loader)
    if own >= guess:
        return own, f"kept {own}: {why}"
    handle = held(loader.dataset)
    if handle:
        return own, f"kept {own}: {handle}, which more processes would share"
    if own:
        return guess, why
    if found is None:
        return 0, f"kept 0: {known.reason}"
    if not 0 < found.sample_s < math.inf:
        return 0, f"kept 0: {found.why_not}"
    plan, size = found.plan, loader.batch_size or 1
    changes = found.changes or known.own_cache
    if changes:
        return 0, f"kept 0: loading a sample changes {changes}, which the script would not see from a worker"
    served_s = plan.read_s + plan.tail_s if plan is not None and known.staged is not None else found.sample_s
    if found.sample_s * size < TINY_BATCH_S or found.sample_s < TINY_SAMPLE_S:
        return 0, f"kept 0: a batch takes {served_s * size * 1e3:.2g} ms"
    return guess, why


def _use_workers(loader: LoaderLike, count: int, by_task: bool) -> None:
    """Gives a loader a count. Its own count keeps torch's seeds; another one seeds each task, as ``by_task`` asks."""
    if count == int(loader.num_workers) and not by_task:
        return
    loader.num_workers = AutoWorkers(count)
    if loader.prefetch_factor is None:
        loader.prefetch_factor = 2
    state = state_of(loader)
    state.first_count_reason = state.first_count_reason or "applied"
