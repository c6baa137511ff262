"""``stoker.split``: finds which part of a dataset's samples is the same in every epoch, by running a few of them."""

from __future__ import annotations

import contextlib
import html
import re

from torch.utils.data import IterableDataset

from ..core.errors import UsageError
from ..core.types import Attributes, Index, MapDataset, Sample
from . import own_caches
from .change_watch import UNCHANGED, Changing
from .collated import Collated
from .inputs import Inputs
from .isolate import run_isolated
from .plan import CachedPart, Plan, PreparedState, globals_now, narrow
from .pure_calls import MemoPlan
from .source import parse_ahead
from .stages import Row
from .trial import TrialResult, find_plan
from .users_code import names_in

REMEDY = "Name the deterministic part instead: stoker.Staged(dataset, prepare=..., augment=...)"
LIMIT_S = 30.0  # for the trial


def map_style(dataset: object) -> None:
    """Raises UsageError for a dataset without access to samples by index."""
    if isinstance(dataset, IterableDataset) or not all(hasattr(dataset, n) for n in ("__getitem__", "__len__")):
        raise UsageError(f"{type(dataset).__name__} is not a map-style dataset: staging needs __getitem__ and __len__")


class Split:
    """A dataset in two parts; made by ``split``.

    Args:
        dataset: map-style.
        found: result of a trial; None: run one here.
        changing: attributes that the script changes, on which cached parts must not depend.

    Attributes:
        dataset: the whole.
        rows: the stages in order, each with the reason why it is cached or not.
        plan: how the two parts are made, and their cost; None if calls are cached instead.
        memo: the calls that are cached instead.
        exact: the sample is cached as it is: nothing in it is random.
        sample_s: seconds for a whole sample.
        opened: what loading the first sample creates. See ``Inputs.opened``.
        files: some of the files from which samples are read.
        why_not: why no more is cached; "" if everything is.

    Raises:
        UsageError: no part of a sample can be cached; the message says why.
    """

    def __init__(self, dataset: MapDataset, found: TrialResult | None = None, changing: Changing = UNCHANGED) -> None:
        map_style(dataset)
        name = "the collate function" if isinstance(dataset, Collated) else type(dataset).__name__
        if not len(dataset):
            raise UsageError(f"{name} is empty")
        self.dataset = dataset  # the whole
        if found is None:
            try:
                found = run_isolated(lambda: find_plan(dataset, LIMIT_S, changing), 2 * LIMIT_S)
            except UsageError as e:
                found = TrialResult(None, [], str(e))
        if found.plan is None and found.memo is None:
            raise UsageError(f"{name} cannot be split: {found.why_not}. {REMEDY}")
        self.plan: Plan | None = found.plan  # how the two parts are made, and their cost
        self.memo: MemoPlan | None = found.memo  # the calls that are cached instead
        self.rows: list[Row] = found.rows  # the stages in order, each with the reason why it is cached or not
        self.why_not = found.why_not  # why no more is cached; "" if everything is
        self.sample_s = found.sample_s  # seconds for a whole sample
        self.opened = found.opened or {}  # what loading the first sample creates
        self.has_no_effects = found.has_no_effects
        self.kinds = found.kinds  # of values that a copy does not restore in full, and that the trial has tried
        self.in_turn = found.in_turn  # samples must be made one after the other
        self.files, self.folders = found.files, found.folders
        parse_ahead(found.sources)  # once here instead of in each worker in each epoch
        self.exact = self.plan is not None and self.plan.exact

    def prepare(self, index: Index) -> PreparedState:
        """Makes the part of a sample to be cached. Raises Unplanned if it takes another branch than in the trial."""
        assert self.plan is not None
        return self.plan.head(self.dataset, index)

    def augment(self, state: PreparedState) -> Sample:
        """Runs the random part and returns the sample. May write to ``state``."""
        assert self.plan is not None
        return self.plan.tail(self.dataset, state)

    @property
    def reads(self) -> set[str] | None:
        """Names of attributes and globals that the cached part may read; None: any."""
        return (self.plan or self.memo).reads  # type: ignore[union-attr]

    @property
    def cut(self) -> str:
        """Which part of a sample is cached, as text. Lines in which functions begin do not count."""
        return "" if self.plan is None else re.sub(r"(\.py):\d+:", r"\1:", str(self.plan.root))

    def globals_now(self) -> Attributes:
        """Values of the global variables that the cached part reads."""
        return globals_now((self.plan or self.memo).globals)  # type: ignore[union-attr]

    def inputs(self, across_runs: bool = False, of_all: bool = False) -> Inputs:
        """Current values of what the cached part may read. ``of_all``: what any code of the dataset may read."""
        plan, held, skip = self.plan, self.globals_now(), set()
        if plan is not None:
            # Another thread may have replaced one of the dataset's own caches by an empty one.
            held |= own_caches.values(self.dataset, plan.own_caches)
            skip = plan.scratch | {"dataset[0]." + ".".join(path) for path in plan.own_caches}
        names = None if of_all else self.reads
        if not across_runs:
            return Inputs(self.dataset, names=names, skip=skip, held=held)
        part = CachedPart({}, set(skip))
        if plan is not None:
            found = Inputs(self.dataset, names=names, skip=skip, held=held, across_runs=True, digests=False)
            with contextlib.suppress(Exception):  # a function that cannot be cut here: all of it counts
                narrow(part, plan.root, self.dataset.__getitem__, "", found)

        def make(digests: bool) -> Inputs:
            return Inputs(self.dataset, names=names, held=held, across_runs=True, digests=digests, **part._asdict())

        while names is not None:  # a rare sample may call functions that no other does
            more = names.union(*(names_in(code)[1] for code in make(False).codes()))
            if more == names:
                break
            names = more
        return make(True)

    def __str__(self) -> str:
        cells = [("kept" if row.cached else "each time", row.where, row.name, row.why) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(f"{text:{n}}" for text, n in zip(row, widths, strict=True)).rstrip() for row in cells]
        lines += [f"not more, because: {self.why_not}"] if self.why_not else []
        return "\n".join([*lines, self._cost()])

    def _cost(self) -> str:
        """Describes the cost and savings of caching, as measured by the trial."""
        plan, memo, n = self.plan, self.memo, len(self.dataset)
        later_s = memo.served_s if memo is not None else plan.tail_s + plan.read_s if plan is not None else 0.0
        nbytes = n * (memo or plan).nbytes  # type: ignore[union-attr]
        times = f"{self.sample_s * 1e3:.3g} ms per sample, {later_s * 1e3:.3g} ms once cached"
        return f"about {nbytes / 1e6:,.3g} MB for {n:,} {'results of calls' if memo else 'samples'}; {times}"

    def __repr__(self) -> str:
        kept = sum(row.cached for row in self.rows)
        return f"<Split of {type(self.dataset).__name__}: {kept} of {len(self.rows)} stages are deterministic>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def split(dataset: MapDataset) -> Split:
    """Finds what is the same in every epoch, and what is random.

    A child process, which can change nothing here, makes a few samples. The dataset's code is cut before the first
    statement that draws random numbers, or inside a function or container of transforms that this statement calls. Both
    parts together must then give the same bits as the whole, with the first part run under other random states.

    Args:
        dataset: map-style.

    Returns:
        A ``Split``, which ``stoker.Staged(dataset)`` uses. ``print`` shows what is cached, where the cut lies, and why
        no more is cached.

    Raises:
        UsageError: nothing can be cached; the message says why, and what to do.

    Example:
        >>> import torch
        >>> class Photos(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, i):
        ...         x = torch.full((2,), i).float()
        ...         x = x.exp().log()
        ...         return x + torch.rand(2)
        >>> [row.cached for row in split(Photos()).rows]
        [True, False]
    """
    return Split(dataset)
