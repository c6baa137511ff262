"""Workers for a loader that the script made without: they must make what the script's own process would.

The script may change its dataset between two batches, look at what its samples changed, and catch their errors; a
loader without workers draws its order when the first batch is asked for. So workers are given only where samples and
the collate function change nothing, in any branch, and the order comes from torch's own samplers. What batches are made
from is compared before each batch is delivered: after a change the script's process makes the rest of the epoch. The
same holds once a worker has found a branch of a sample that changes or prints something. A change between two epochs
may let samples draw random numbers, so it takes the workers away until an epoch without them shows that they do not.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch.utils.data import RandomSampler
from torch.utils.data._utils.fetch import _BaseDatasetFetcher

from ..core.compare import equal_bits
from ..core.random_state import RandomState
from ..core.types import Batch, Index, LoaderLike, MapDataset
from ..loader.loader_state import state_of
from ..sampling.generators import Found, find_generators
from ..staging.change_watch import shortly
from ..staging.dataset import Staged
from ..staging.executed_code import written_by
from ..staging.inputs import Inputs, functions_of
from ..staging.store.decode import stored_copy
from ..staging.store.memory import Flag
from ..staging.trial import TrialResult
from ..workers.fetcher import is_plain
from ..workers.native_threads import one_thread
from .applied_loader import Draws, applied_to
from .cached_epochs import WORTH, Epoch

UNSEEN = "an epoch without workers must first show whether loading batches draws random numbers"
EFFECTS = "some samples change or print something"
DREW = "some samples draw random numbers, or hold objects that a worker can only send as copies"
TRIED = 16  # samples made with one thread and with several
FIRST_TRIED = 4  # no more than these if no other thread takes part in making them
OTHERS_SHARE = 0.1  # of processor time, from which on other threads take part
TINY_BATCH_S = 0.002  # faster batches stay in the script's own process
MOST_SHARE = 0.05  # of the time between two batches that comparing may take
ROUGHLY = 4.0  # by which factor the trial's measurement of it may be too long


class ScriptChanges:
    """Compares what a loader's batches are made from with what it was when this object was made."""

    def __init__(
        self, loader: LoaderLike, found: TrialResult, staged: Staged | None = None, more: Sequence[object] = ()
    ) -> None:
        """``more``: further functions that run."""
        self._staged = staged
        dataset, functions = made_from(loader)
        self._made_from = dataset, (*functions, *filter(None, more))
        self._opened = found.opened or {}
        self._before = Inputs(*self._made_from).let_go()
        self.is_complete = not self._before.why_incomplete(self._opened)
        # Raised by workers: a rare sample may draw in a way that neither code nor trial shows.
        self.drew: Flag | None = None

    def __call__(self) -> str:
        """Describes what has changed; "" if nothing has."""
        if self._staged is not None and self._staged.has_effects:
            return EFFECTS
        if self.drew is not None and self.drew.is_up:
            return DREW
        return shortly(self._before.changes(Inputs(*self._made_from), self._opened))


def made_from(loader: LoaderLike) -> tuple[MapDataset, tuple[object, ...]]:
    """The dataset and the functions that make a loader's batches."""
    return loader.dataset, () if loader.collate_fn is None else (loader.collate_fn,)


def take_back(loader: LoaderLike) -> str:
    """Takes the workers away if the loader may not have them any more. Returns why; "" if it may."""
    applied = applied_to(loader)
    changed = "" if applied.given_for is None else applied.given_for()
    if not changed:
        return ""
    state = state_of(loader)
    loader.num_workers, loader.prefetch_factor, state.own_workers = 0, None, None
    applied.draws, applied.given_for = Draws(), None
    applied.is_undecided = applied.was_taken_back = changed not in (EFFECTS, DREW)
    return changed


def loop_may_write(loader: LoaderLike, found: TrialResult) -> bool:
    """Whether what the loop writes to a batch that its own process made may change the dataset."""
    return found.is_view and not (loader._auto_collation and is_plain(loader.collate_fn))


def why_none(loader: LoaderLike, found: TrialResult, workers: int) -> str:
    """Why a loader without workers must stay so; "" if ``workers`` make the same batches."""
    changes = found.changes or ("data" if found.may_write else "") or written_by_collate(loader)
    if changes:
        return f"loading a sample may change {changes}, and the script would not see that change from a worker"
    if loop_may_write(loader, found):
        return "samples are views of the dataset's memory, and what the loop writes to a worker's batch would be lost"
    if found.may_print:
        return "samples may print or log, and the lines of workers come in another order"
    sampler = own_sampler(loader)
    if sampler:
        return f"{sampler} is the script's own, and workers would ask it for batches ahead of time"
    batch_s = (found.sample_s + found.collate_s) * (loader.batch_size or 1) / workers
    took_s = found.compare_s
    if took_s <= ROUGHLY * MOST_SHARE * batch_s:  # by the trial, whose child has cold caches
        drawn = _drawn(loader, found)
        if drawn:
            return drawn
        compare = ScriptChanges(loader, found)
        if not compare.is_complete:
            return "whether the script changes data between batches cannot be seen"
        took_s = min(_seconds(compare) for _ in range(5))  # with the collate function
    if took_s <= MOST_SHARE * batch_s:
        return ""
    return (
        f"the script may change data between batches, and to compare them takes {took_s * 1e3:.1f} ms of the "
        f"{batch_s * 1e3:.1f} ms of a batch"
    )


def own_sampler(loader: LoaderLike) -> str:
    """The class of a sampler that is not torch's, or that draws during the epoch from a generator of the script's; ""
    if there is none."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    own = (x for x in samplers if x is not None and not type(x).__module__.startswith("torch.utils.data."))
    late = (x for x in samplers if isinstance(x, RandomSampler) and x.generator is not None and _draws_late(x))
    return next((type(x).__name__ for x in itertools.chain(own, late)), "")


def _draws_late(sampler: RandomSampler) -> bool:
    """Whether a sampler draws more than once in an epoch. The loop may draw from its generator meanwhile."""
    return sampler.replacement or sampler.num_samples > len(sampler.data_source)


def why_other_bits(loader: LoaderLike) -> str:
    """Why workers, in which torch has one thread, might make other bits than the script's process; "" if they make
    the same. A sum, a matrix product or a Fourier transform of torch is divided among threads, so its last bits depend
    on their number. A sum has the same bits by chance in every other sample, so many are compared. Makes them twice,
    which changes nothing where ``why_none`` found no reason."""
    if torch.get_num_threads() == 1:
        return ""
    collate = loader.collate_fn if loader._auto_collation else None
    count = len(loader.dataset)
    states = RandomState(find_generators(loader.dataset, loader.collate_fn))
    try:
        is_divided = False
        for n, k in enumerate(sorted(range(TRIED), key=lambda k: k % FIRST_TRIED)):
            if n == FIRST_TRIED and not is_divided:
                break
            i = k * count // TRIED
            with contextlib.suppress(Exception), _silence():  # a sample that cannot be loaded has no bits
                began = time.process_time(), time.thread_time()
                own = _made(loader.dataset, i, collate)
                all_s, own_s = time.process_time() - began[0], time.thread_time() - began[1]
                is_divided |= all_s > (1 + OTHERS_SHARE) * own_s
                with one_thread():
                    is_same = equal_bits(_made(loader.dataset, i, collate), own)
                if not is_same:
                    return "the bits of its samples depend on the number of native threads, and a worker has one"
    finally:
        states.restore()
    return ""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What samples print, log, or warn of comes when the script asks for them."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _made(dataset: MapDataset, i: int, collate: Callable[..., Batch] | None) -> Batch:
    sample = dataset[i]
    return stored_copy(sample if collate is None else collate([sample]))


def _seconds(compare: ScriptChanges) -> float:
    began = time.thread_time()  # comparing waits for nothing; other processes must not make it look slow
    compare()
    return time.thread_time() - began


def written_by_collate(loader: LoaderLike) -> str:
    """A name that the loader's collate function may change; "" if none."""
    if loader.collate_fn is None or is_plain(loader.collate_fn):
        return ""
    return min(set().union(*map(written_by, functions_of(loader.collate_fn))), default="")


def _drawn(loader: LoaderLike, found: TrialResult) -> str:
    """Whether making the loader's batches draws random numbers in the script's process, from which the sampler's next
    order is drawn too, as a reason; "" if it draws none."""
    applied = applied_to(loader)
    seen = applied.draws
    if find_generators(loader.dataset, loader.collate_fn):
        return "its samples have random generators, which are seeded in workers"
    if found.draws or seen.moved:
        return "loading its batches draws random numbers, which changes what the script draws next"
    may_draw = found.may_draw or not is_plain(loader.collate_fn) or applied.was_taken_back
    if not may_draw:
        return ""
    before = seen.made_from
    if before is not None and not before.changes(Inputs(*made_from(loader)), found.opened):
        return "" if seen.batches >= len(loader) else UNSEEN
    applied.draws = Draws()  # the script has changed something since: the next epoch shows whether it draws now
    return UNSEEN


def collates_long(loader: LoaderLike) -> bool:
    """Whether previous epochs show that the work of a loader without workers is in its own ``collate_fn``."""
    rows = state_of(loader).metrics.by_epoch
    if is_plain(loader.collate_fn) or not rows or not rows[-1][0]:
        return False
    last = Epoch(*rows[-1])
    return last.wait_s / last.batches >= TINY_BATCH_S and last.wait_s >= WORTH * last.loop_s


def watch_draws(loader: LoaderLike, it: Any) -> None:
    """Records whether making the batches of an iterator without workers draws random numbers."""
    fetcher = getattr(it, "_dataset_fetcher", None)
    if fetcher is None or not applied_to(loader).is_undecided:
        return
    seen = applied_to(loader).draws
    seen.made_from = seen.made_from or Inputs(*made_from(loader)).let_go()
    generators = find_generators(loader.collate_fn)
    generators += [] if loader.generator is None else [("generator", loader.generator)]
    it._dataset_fetcher = _WatchedFetcher(fetcher, seen, generators)


class _WatchedFetcher:
    """Wraps torch's fetcher and records whether it draws. Forms no reference cycle, which would keep the dataset."""

    def __init__(self, fetcher: _BaseDatasetFetcher, seen: Draws, generators: Found) -> None:
        self._fetcher, self._seen, self._generators = fetcher, seen, generators

    def fetch(self, index: Index) -> Batch:
        before = RandomState(self._generators)
        try:
            return self._fetcher.fetch(index)
        finally:
            self._seen.batches += 1
            self._seen.moved |= bool(before.moved())

    def __getattr__(self, name: str) -> object:
        return getattr(self._fetcher, name)
