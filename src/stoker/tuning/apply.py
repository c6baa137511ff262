"""``stoker run --apply``: stoker's engine, cache and worker count behind loaders that were written without it.

When a loader is first iterated, a trial in a child process looks for the deterministic part of its dataset. If it ends
within ``WAIT_S`` the first epoch fills the cache, else it goes on beside the first epoch and the second one does.
Whatever fails here leaves the loader as its script made it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from ..core.handles import held
from ..core.options import AutoWorkers, Measured
from ..loader import engine
from ..loader.auto.limits import cores_here, first_guess
from ..loader.emulated_workers import EmulatedWorkersIter
from ..loader.loader_state import state_of
from ..staging.compare import equal_bits
from ..staging.dataset import Staged
from ..staging.isolate import Trial
from ..staging.node_cache import start_trial
from ..staging.split import Split
from ..staging.trial import Found
from .cached_epochs import CachedEpochs, Maker, why_not

if TYPE_CHECKING:
    from ..staging.store.memory import Memory

WAIT_S = 1.0  # before the first batch; a trial that takes longer goes on beside the first epoch
LIMIT_S = 30.0  # for a trial
FEWEST = 16  # samples of a dataset for which a trial is made
PAYS = 2.0  # times: making the first part of a sample, against copying it out of memory
PAYS_S = 50e-6  # and by so much
SHARE = 0.05  # of a dataset that has to fit into the cache, for it to be worth anything
TINY_SAMPLE_S = 100e-6  # samples that take no longer are mostly views of memory: a worker would copy them
TINY_S = 0.002  # a batch that takes no longer in the script's own process stays there
BY_SCRIPT = "; batches from the cache are made without them, in the script's own process, where that is faster"
MOST = 8  # datasets that are remembered

_datasets: list[Dataset] = []
_entries: list[tuple[dict[str, Any], Dataset]] = []


class Dataset:
    """What is known of one dataset.

    Attributes:
        dataset: the script's own.
        trial: while it runs.
        found: what it found; None before, and where it failed.
        reason: why nothing is kept; "" while it is not known, or something is.
        staged: the dataset with its cache; None where nothing is kept.
        by_script: batches were made in the script's own process, once they came from the cache.
        start_s, waited_s: seconds that the script waited while the trial was started, and for its end.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.trial: Trial | None = None
        self.found: Found | None = None
        self.reason = ""
        self.staged: Staged | None = None
        self.by_script = False
        self.start_s = self.waited_s = 0.0
        if hasattr(type(dataset), "_stoker_batches"):
            self.reason = "the dataset is staged already"
        elif len(dataset) < FEWEST:
            self.reason = f"{len(dataset)} samples are too few for a trial"
        else:
            began = time.monotonic()
            try:
                self.trial = start_trial(dataset, LIMIT_S)
            except OSError as e:
                self.reason = f"no process can be started for the trial: {e}"
            self.start_s = time.monotonic() - began

    def settle(self, seconds: float) -> None:
        """Takes what the trial found, waiting for it no longer than ``seconds``."""
        if self.trial is None:
            return
        began = time.monotonic()
        ended = self.trial.wait(seconds)
        self.waited_s += time.monotonic() - began
        if not ended:
            return
        try:
            self.found = self.trial.result()
            self.reason = self._decide(self.found, self.trial.memories)
        except Exception as e:  # what somebody wanted faster must not break a script
            self.reason = str(e)
        self.trial = None

    def _decide(self, found: Found, memories: Sequence[Memory]) -> str:
        """Stages the dataset, in the node's memory where that is shared, if that pays. Why not, else."""
        plan, memo = found.plan, found.memo
        if plan is None and memo is None:
            return found.why_not
        nbytes = memo.nbytes if plan is None and memo is not None else 0.0
        if plan is not None:
            nbytes = plan.nbytes
            if plan.head_s < max(PAYS * plan.read_s, plan.read_s + PAYS_S):
                return (
                    f"it would not pay: the deterministic part of a sample takes {plan.head_s * 1e6:,.0f} us, "
                    f"copying it out of memory {plan.read_s * 1e6:,.0f} us"
                )
        staged = Staged(self.dataset, _split=Split(self.dataset, found), _memories=memories)
        if staged.account.budget < SHARE * nbytes * len(self.dataset):
            return f"it would not fit: {nbytes * len(self.dataset) / 1e9:,.1f} GB"
        staged.stands_for = self.dataset
        self.staged = staged
        return ""

    def same(self, dataset: Any) -> bool:
        """Whether another dataset is this one, or one made anew with the same content."""
        if dataset is self.dataset:
            return True
        if type(dataset) is not type(self.dataset) or self.staged is None:
            return False
        try:
            return len(dataset) == len(self.dataset) and equal_bits(dataset, self.dataset)
        except Exception:
            return False

    def adopt(self, dataset: Any) -> None:
        """The script made its dataset anew: its random part is that object's from now on."""
        if self.staged is not None and dataset is not self.dataset:
            self.dataset = dataset
            self.staged.replace_dataset(dataset)

    def in_script(self, loader: Any) -> Any:
        """An iterator over the epoch that begins, if it is to be made in the script's own process.

        ``loader.dataset`` is the staged one.
        """
        staged, found = self.staged, self.found
        if staged is None or found is None or found.changes or not staged.usable:
            return None
        epochs = loader.__dict__.get("_stoker_epochs")
        if epochs is None:
            plan, memo = found.plan, found.memo
            sample_s = plan.read_s + plan.tail_s if plan is not None else 0.0 if memo is None else memo.served_s
            epochs = loader.__dict__["_stoker_epochs"] = CachedEpochs(sample_s, int(loader.num_workers), cores_here())
        rows = state_of(loader).metrics.by_epoch
        filled = epochs.is_filled(staged.account.filled, staged.slots)
        if filled and "_stoker_in_workers" not in loader.__dict__:
            with engine.with_dataset(loader, self.dataset):
                loader.__dict__["_stoker_in_workers"] = why_not(loader)
        maker = epochs.choose(rows, filled and not loader.__dict__["_stoker_in_workers"])
        if maker is not Maker.SCRIPT:
            return None
        staged._begin()
        if not (staged.usable and staged.account.filled):
            return None
        it: Any = None
        if isinstance(loader.num_workers, AutoWorkers):
            with _without_workers(loader):
                it = engine.get_iterator(loader)
        else:
            with contextlib.suppress(Exception):  # generators that cannot be copied; nothing is drawn yet
                it = EmulatedWorkersIter(loader)
        self.by_script = self.by_script or it is not None
        return it

    def entry(self) -> dict[str, Any]:
        """What a report says of the cache."""
        out: dict[str, Any] = {
            "kept": "",
            "cut": "",
            "why_not": self.reason or ("the trial has not ended yet" if self.trial is not None else ""),
            "filled": 0,
            "samples": len(self.dataset),
            "nbytes": 0,
            "shared": 1,  # ranks of this node that fill and read one cache: "nbytes" is counted in each of them
            "trial_s": self.start_s + self.waited_s,
            "fill_s": 0.0,
            "discarded": "",
        }
        if self.staged is None or self.found is None:
            return out
        plan = self.found.plan
        account = self.staged.account
        kept = [row for row in self.found.rows if row.cached]
        out["kept"] = "; ".join(f"{row.where} {row.name}".strip() for row in kept)
        out["why_not"] = self.found.why_not
        out["filled"], out["nbytes"], out["shared"] = account.filled, account.nbytes, account.ranks
        out["fill_s"] = account.keep_s
        if plan is not None:
            out["cut"] = plan.shown
            out["head_s"], out["tail_s"], out["read_s"] = plan.head_s, plan.tail_s, plan.read_s
        out["discarded"] = "" if self.staged.usable else account.reason
        return out


@contextlib.contextmanager
def _without_workers(loader: Any) -> Iterator[None]:
    """While an iterator is made: a loader whose tasks are seeded, without workers."""
    count, prefetch = loader.num_workers, loader.prefetch_factor
    loader.num_workers, loader.prefetch_factor = AutoWorkers(0), None
    try:
        yield
    finally:
        loader.num_workers, loader.prefetch_factor = count, prefetch


def attach(module: Any, applied: dict[str, Any]) -> None:
    """Puts stoker's engine behind ``module.DataLoader``.

    Args:
        module: torch.utils.data.dataloader.
        applied: gets one entry a loader: ``{"from": settings, "to": settings, "reason": text, "measured_s": seconds,
            "cache": what is kept}``.
    """

    def _get_iterator(loader: Any) -> Any:
        held = loader.__dict__
        try:
            known = _prepare(loader, applied) if _fits(loader) else None
        except Exception as e:  # what somebody wanted faster must not break a script
            sys.stderr.write(f"stoker: {held.get('_stoker_name', '?')}: left as it is: {type(e).__name__}: {e}\n")
            known = None
        with engine.with_dataset(loader, None if known is None else known.staged):
            it = None if known is None else known.in_script(loader)
            if it is None:
                return engine.get_iterator(loader)
            loader.check_worker_number_rationality()  # as torch does
            return it

    module.DataLoader._get_iterator = _get_iterator


def cache_alone(module: Any, applied: dict[str, Any], loader: Any) -> contextlib.AbstractContextManager[None]:
    """Around what begins an epoch of a loader: the cache, for classes that make iterators of their own (torchdata's
    ``StatefulDataLoader``). Their workers are the class's. With workers that stay nothing is kept, for these are not
    told that an epoch begins.

    Args:
        module, applied: as for ``attach``.
        loader: of any class.
    """
    makes: Any = getattr(type(loader), "_get_iterator", None)
    if not isinstance(loader, module.DataLoader) or makes is module.DataLoader._get_iterator:
        return contextlib.nullcontext()
    if "_get_iterator" in getattr(getattr(makes, "__code__", None), "co_names", ("_get_iterator",)):
        return contextlib.nullcontext()  # it asks for torch's, which is stoker's
    if str(makes.__module__).startswith("stoker.") or loader.persistent_workers:
        return contextlib.nullcontext()
    if engine.init_sees_dataset(loader) or not _fits(loader):
        return contextlib.nullcontext()
    try:
        staged = _prepare(loader, applied, f"kept {int(loader.num_workers)}: its iterators are its class's").staged
        if staged is not None:
            staged._begin()
        return engine.with_dataset(loader, staged)
    except Exception as e:  # what somebody wanted faster must not break a script
        sys.stderr.write(f"stoker: {loader.__dict__.get('_stoker_name', '?')}: left as it is: {e}\n")
        return contextlib.nullcontext()


def refresh() -> None:
    """Brings the entries of all loaders up to date."""
    for entry, known in _entries:
        entry["cache"] = known.entry()
        if known.by_script and BY_SCRIPT not in entry["reason"]:
            entry["reason"] += BY_SCRIPT


def _fits(loader: Any) -> bool:
    # An iterable dataset's shards depend on the count, so that stays; "auto" takes care of itself.
    auto = isinstance(loader.num_workers, AutoWorkers) and "_stoker_applied" not in loader.__dict__
    return not auto and loader._dataset_kind == 0 and engine.SUPPORTED and not _stream(loader.dataset)


def _stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def _prepare(loader: Any, applied: dict[str, Any], kept: str = "") -> Dataset:
    """What is known of a loader's dataset; the first time, its settings are decided. ``kept``: why they stay."""
    known = _known(loader.dataset)
    known.settle(WAIT_S if known.waited_s == 0 else 0)
    if "_stoker_applied" not in loader.__dict__:
        loader.__dict__["_stoker_applied"] = True
        own = int(loader.num_workers)
        count, reason = (own, kept) if kept else workers_for(loader, known)
        _use(loader, count)
        entry = applied[loader.__dict__.get("_stoker_name", "?")] = {
            "from": {"num_workers": own},
            "to": {"num_workers": count},
            "reason": reason,
            "measured_s": known.start_s + known.waited_s,
            "cache": known.entry(),
        }
        _entries.append((entry, known))
    for entry, other in _entries:
        if other is known and known.staged is not None:
            entry["from"]["staged"], entry["to"]["staged"] = False, True
    return known


def _known(dataset: Any) -> Dataset:
    for known in _datasets:
        if known.same(dataset):
            known.adopt(dataset)
            return known
    if len(_datasets) == MOST:
        del _datasets[0]
    known = Dataset(dataset)
    _datasets.append(known)
    return known


def workers_for(loader: Any, known: Dataset) -> tuple[int, str]:
    """The worker count for a loader with settings of its own, and why."""
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
        return 0, f"kept 0: {known.reason or 'the trial has not ended yet'}"
    if not 0 < found.sample_s < math.inf:
        return 0, f"kept 0: {found.why_not}"
    if found.changes:
        return 0, f"kept 0: loading a sample changes {found.changes}, which the script would not see from a worker"
    plan = found.plan
    sample_s = plan.read_s + plan.tail_s if plan is not None and known.staged is not None else found.sample_s
    batch_s = sample_s * (loader.batch_size or 1)
    if found.sample_s * (loader.batch_size or 1) < TINY_S or found.sample_s < TINY_SAMPLE_S:
        return 0, f"kept 0: a batch takes {batch_s * 1e3:.2g} ms"
    return guess, why


def _use(loader: Any, count: int) -> None:
    """Gives a loader another count. Its own count keeps torch's seeds; another one seeds each task."""
    if count == int(loader.num_workers):
        return
    loader.num_workers = AutoWorkers(count)
    if loader.prefetch_factor is None:
        loader.prefetch_factor = 2
    state = state_of(loader)
    state.measured = state.measured or Measured(count, reason="applied")
