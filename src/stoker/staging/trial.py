"""A trial: finds out what can be kept of a dataset's samples, by running a few of them.

::

    the script's process                          a forked child, which can change nothing outside (``isolate``)
    --------------------                          -----------------------------------------------------------------
    1. ``split`` or ``node_cache.start_trial``
       forks the child                       ->   2. ``samples``: loads two samples; times one
                                                  3. nothing draws: the plan is to keep the whole sample, go to 5
                                                  4. ``search``: a probed copy of ``__getitem__`` shows the first
                                                     statement, and the first call in it, that moves a generator
                                                     (``probe``); goes on inside that call, or slices the container
                                                     of transforms that is called (``containers``). The result is a
                                                     ``plan``, whose functions ``cut_function`` makes from the source
                                                  5. ``verify``: both parts must be the whole, bit by bit. If not, a
                                                     weaker plan is next: one statement, or one transform, less
                                                  6. if that leaves much to do: ``pure_calls`` looks for calls whose
                                                     results can be kept by their arguments (``memoize``); so it
                                                     does in the loader's collate function (``collated``)
    8. ``Split``, ``dataset.Staged``         <-   7. ``TrialResult``: a plan or a selection of calls, as plain data;
       compile the plan when they first              the reasons why not more, the stages for reports
       use it (``cut_function``), in each
       worker: head -> store -> tail
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from ..core.errors import one_line
from ..core.filesystems import is_far, reopen
from ..core.handles import iterator_in
from ..core.types import Batch, Index, MapDataset, Sample
from .callee import Compiled
from .change_watch import UNCHANGED, Changing
from .collated import SIZE, collate_samples
from .inputs import Inputs
from .isolate import allow_connections, files_read, places
from .library_objects import attributes_of
from .plan import Plan, WholeNode, nodes_in
from .pure_calls import MemoPlan, Survey
from .samples import TrialSamples
from .search import PlanSearch, weaker_plans
from .source_files import FolderWatch, with_places
from .stages import Row, cut_of, rows_of
from .store.encode import CacheError, kinds_of
from .users_code import is_users_module
from .value_digests import Entry
from .verify import CHANGES, attribute_of_dataset, changed_name, lies_in, verify

MOST_PLANS = 24  # verified at most
MEMO_SHARE = 0.3  # minimum share of a sample's time left by a cut for which cacheable calls are searched
NEARLY = 0.8  # a cache that saves this share of the time is as good as one that saves all of it
CLEARLY_LESS = 1.2  # by this factor and ``CLOCK_S``, so that a busy machine does not change which of two caches is used
CLOCK_S = 20e-6


class TrialResult(NamedTuple):
    """Result of a trial."""

    plan: Plan | None  # None if no first part can be cached
    rows: list[Row]  # what is cached and what is not, in execution order
    why_not: str  # why no more, or nothing; "" if everything is cached
    sample_s: float = 0.0  # seconds that a sample takes
    changes: str = ""  # an attribute of the dataset that loading a sample changes; "" if none
    memo: MemoPlan | None = None  # calls that are cached instead, if that leaves less to do; ``plan`` is then None
    opened: dict[str, Entry] | None = None  # what loading the first sample creates. See ``Inputs.opened``.
    files: Sequence[str] = ()  # some of the files from which samples are read
    folders: Mapping[str, Collection[str]] = {}  # where the trial's samples looked, with kinds: see ``source_files``
    has_no_effects: bool = False  # nor is anything printed, logged or written
    may_write: bool = True  # loading a sample may, in some branch, change something that another one reads
    in_turn: bool = True  # the same, without what libraries' objects change and the cached part does not read
    # and a copy of the dataset may share that: a global variable, an attribute of a class, a list that is appended to
    writes_elsewhere: bool = True
    is_view: bool = True  # samples may be views of the dataset's memory
    is_stateless: bool = False  # loading a sample changes nothing in the dataset, in any branch
    assigns: bool = False  # loading a sample may set attributes of the dataset, even if only on first use
    forgets: str = ""  # a function that keeps a limited number of its results
    only_in_workers: str = ""  # why a worker that has made samples differs from a new one, and the script's process too
    draws: bool = False  # making a sample advanced a random generator
    may_print: bool = False  # the user's code names functions that print, log or write
    may_draw: bool = False  # the user's code names drawing functions, perhaps not used by each sample
    sources: Sequence[str] = ()  # source files of rewritten functions
    kinds: frozenset[str] = frozenset()  # of values in the trial's samples: see ``encode.kinds_of``
    compare_s: float = 0.0  # seconds to digest the values that samples may depend on
    begin_s: float = 0.0  # seconds to digest them and to look for files, when a cache begins
    collate_s: float = 0.0  # collate time per sample; 0 if unknown
    collate: TrialResult | None = None  # cached calls of the loader's collate function; None if there are none

    @property
    def cached_s(self) -> float:
        """Seconds that a sample takes once its first part, or the results of its calls, are cached."""
        if self.plan is not None:
            return self.plan.read_s + self.plan.tail_s
        return 0.0 if self.memo is None else self.memo.served_s


def find_plan(
    dataset: MapDataset,
    limit_s: float = 30.0,
    changing: Changing = UNCHANGED,
    indices: Sequence[Index] = (),
    sampler: Iterable[Index] = (),
    collate_fn: Callable[[list[Sample]], Batch] | None = None,
) -> TrialResult:
    """Finds what can be cached of a dataset's samples, within ``limit_s`` seconds, in an isolated process (see
    ``isolate``). It must not depend on what the script changes (``changing``). ``indices``,
    ``sampler``: see ``TrialSamples``. ``collate_fn``: a user's function, whose calls may be cached too."""
    if is_far(dataset):
        allow_connections()
        reopen(dataset)
    samples = TrialSamples(dataset, indices, sampler)
    found = _described(samples, limit_s, changing)
    if collate_fn is None or not math.isfinite(samples.sample_s):
        return found
    of_collate: TrialResult | None = None
    with contextlib.suppress(Exception):  # the user's errors
        batches = collate_samples(samples, collate_fn)
        if batches is not None:
            of_collate = _described(batches, limit_s, changing._replace(often=changing.often | _changed_by(samples)))
    collate_s = samples.collate_s if math.isfinite(samples.collate_s) else 0.0
    if of_collate is not None and of_collate.memo is not None:
        return found._replace(collate_s=of_collate.memo.served_s / SIZE, collate=of_collate)
    return found._replace(collate_s=collate_s)


def _changed_by(samples: TrialSamples) -> set[str]:
    """Attributes and global variables that making a sample may change."""
    return samples.may_write | samples.assigned | samples.stored | set(map(changed_name, samples.changes))


def _described(samples: TrialSamples, limit_s: float, changing: Changing) -> TrialResult:
    """Runs the trial, and adds what is known about the samples."""
    dataset = samples.dataset
    began = time.thread_time()
    inputs = Inputs(dataset)
    compared = time.thread_time()
    watch = FolderWatch(dataset, inputs.texts, inputs.functions.values())
    begin_s = time.thread_time() - began
    known = set(sys.modules)
    with kinds_of() as kinds:
        found = _found(samples, time.monotonic() + limit_s, changing)
    found = _with_writes(found, samples)
    draws_once = samples.draws and samples.caches  # a cached result may be a drawn number
    is_stateless = not (found.may_write or samples.made or draws_once or samples.varies or iterator_in(dataset))
    # What native objects keep is seen in what they pickle to.
    later_began = time.thread_time()
    later = Inputs(dataset)
    compare_s = min(compared - began, time.thread_time() - later_began)  # a child's first look copies memory
    is_stateless = is_stateless and not (inputs.why_incomplete({}) or inputs.changes(later))
    is_kept = found.plan is not None or found.memo is not None  # ``samples.assigned`` is then known already
    nodes = nodes_in(found.plan.root) if found.plan else found.memo.root.nodes() if found.memo else ()
    return found._replace(
        sample_s=samples.sample_s,
        changes=next(filter(None, map(attribute_of_dataset, samples.filled)), ""),
        opened=samples.made | inputs.made_first(later),  # also by what few draws lead to
        files=[*files_read(), *_files_of_modules(sys.modules.keys() - known)],
        folders=with_places(watch.folders(), places()),
        is_view=samples.are_views(),
        is_stateless=is_stateless,
        has_no_effects=is_stateless and samples.has_no_effects,
        assigns=is_kept and bool(samples.opened or samples.made or samples.assigned),
        only_in_workers=samples.only_in_workers if is_kept else samples.only_together or samples.made_once,
        draws=samples.draws,
        forgets=samples.forgets,
        may_print=samples.may_print,
        may_draw=samples.may_draw,
        compare_s=compare_s,
        begin_s=begin_s,
        kinds=frozenset(kinds),
        sources=sorted({file for node in nodes if isinstance(node, Compiled) for file, _ in node.rewritten}),
    )


def _with_writes(found: TrialResult, samples: TrialSamples) -> TrialResult:
    """Adds what the user's code may change while it makes a sample."""
    if not samples.loaded:
        return found._replace(may_write=True, in_turn=True, writes_elsewhere=True)
    names, changed = samples.may_write, [*samples.changes, *samples.filled]
    own = {name for name, _ in attributes_of(samples.dataset)} & samples.assigned
    elsewhere = not names <= own  # a copy of the dataset shares what its attributes hold: ``self.hits.append(i)``
    elsewhere = elsewhere or any(path.startswith("dataset[1]") for path in changed)
    # Libraries' transforms keep what they drew in themselves, which no other sample reads.
    writes = elsewhere or bool(names) or any(map(attribute_of_dataset, changed))
    scratch = found.plan.scratch if found.plan else set()
    in_turn = writes or not all(lies_in(path, scratch) for path in samples.changes)
    may_write = bool(samples.changes or names)
    return found._replace(may_write=may_write, in_turn=in_turn, writes_elsewhere=elsewhere)


def _found(samples: TrialSamples, until: float, changing: Changing) -> TrialResult:
    """Finds the plan, the calls to cache instead, or the reason for neither."""
    try:
        samples.load_first()
        reason = samples.batches_differ()
        return TrialResult(None, [], reason) if reason else _found_for_long(samples, until, changing)
    except CacheError as e:
        return TrialResult(None, [], str(e))
    except Exception as e:  # the user's, for some random numbers
        return TrialResult(None, [], f"a sample that loaded once fails when loaded again: {one_line(e)}")


def _found_for_long(samples: TrialSamples, until: float, changing: Changing) -> TrialResult:
    """Finds what to cache. Prefers what does not depend on what has changed once, if it saves nearly as much."""
    saved_s = 0.0
    if changing.once:
        lasting = _found_without(samples, until, changing.often | changing.once)
        saved_s = _saved_s(lasting, samples)
        if saved_s >= NEARLY * samples.sample_s:
            return lasting
    found = _found_without(samples, until, changing.often)
    return lasting if saved_s > 0 and saved_s >= NEARLY * _saved_s(found, samples) else found


def _saved_s(found: TrialResult, samples: TrialSamples) -> float:
    """Seconds of a sample that a cache saves."""
    return samples.sample_s - found.cached_s if found.plan or found.memo else 0.0


def _found_without(samples: TrialSamples, until: float, changing: Set[str]) -> TrialResult:
    """Finds what to cache that does not depend on attributes that the script changes (``changing``)."""
    found = _find_cut(samples, until, changing)
    if found.plan is not None:  # on a busy machine, the first samples took too long
        samples.sample_s = min(samples.sample_s, found.plan.head_s + found.plan.tail_s)
    # Cached calls would hold samples a second time, beside the dataset's own growing cache.
    is_enough = found.plan is not None and (found.plan.own_caches or found.plan.tail_s <= MEMO_SHARE * samples.sample_s)
    return found if is_enough else _or_pure_calls(samples, found, changing)


def _files_of_modules(names: Iterable[str]) -> list[str]:
    """The source files of the user's modules."""
    modules = [module for module in map(sys.modules.get, sorted(names)) if module is not None]
    return [str(m.__file__) for m in modules if getattr(m, "__file__", None) and is_users_module(m)]


def _find_cut(samples: TrialSamples, until: float, changing: Set[str]) -> TrialResult:
    if samples.by_batch:
        return TrialResult(
            None, [], "the sampler does not ask for samples by number, so only results of calls can be cached"
        )
    called = samples.dataset.__getitem__
    name = f"{type(samples.dataset).__name__}.__getitem__"
    if not samples.draws:  # avoids parsing the source: 0.1 s for a file of 7,000 lines
        plan = Plan(WholeNode())
        if not verify(plan, samples, changing):
            return TrialResult(plan, rows_of(plan.root, name), "")
    search = PlanSearch(samples)
    root = search.find()
    reasons = search.reasons
    if root is None:
        return TrialResult(None, [], _joined(reasons) or f"{name} draws random numbers before anything else")
    candidates = itertools.chain([root], weaker_plans(root, called))
    looked_for_changes = False
    for _ in range(MOST_PLANS):
        candidate = next(candidates, None)
        if candidate is None:
            break
        plan = Plan(candidate)
        why = verify(plan, samples, changing)
        if not why:
            plan.shown = cut_of(candidate)
            return TrialResult(plan, rows_of(candidate, name), _joined(reasons))
        reasons.append(why)
        if time.monotonic() > until:
            reasons.append("the search took too long")
            break
        if why.startswith(CHANGES) and not looked_for_changes:
            looked_for_changes = True
            search = PlanSearch(samples, stop_at_changes=True)
            root = search.find()
            reasons += search.reasons
            if root is not None:
                candidates = itertools.chain([root], weaker_plans(root, called), candidates)
    return TrialResult(None, [], _joined(reasons))


def _or_pure_calls(samples: TrialSamples, found: TrialResult, changing: Set[str]) -> TrialResult:
    """Returns ``found``, or calls to cache instead of a first part if that leaves clearly less to do."""
    survey = Survey(samples, changing)
    memo = survey.run()
    plan = found.plan
    if memo is None:
        return found if plan is not None else found._replace(why_not=_joined([found.why_not, *survey.reasons]))
    if plan is not None and plan.tail_s + plan.read_s <= CLEARLY_LESS * memo.served_s + CLOCK_S:
        return found
    lines = [line.partition(" ") for line in memo.root.all_shown()]
    rows = [Row(where, name, True, "cached by its arguments") for where, _, name in lines]
    return found._replace(plan=None, memo=memo, rows=rows, why_not="")


def _joined(reasons: list[str]) -> str:
    """Joins reasons; of those that differ only in numbers ("seen was a dict of 2"), keeps the first."""
    first: dict[str, str] = {}
    for reason in filter(None, reasons):
        first.setdefault(re.sub(r"\d+", "", reason), reason)
    return "; ".join(first.values())
