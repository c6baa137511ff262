"""``stoker.split``: which part of a dataset's samples is the same in every epoch, found by running a few of them."""

from __future__ import annotations

import html
from collections.abc import Collection

from torch.utils.data import IterableDataset

from ..core.errors import UsageError
from ..core.types import Attributes, Index, MapDataset, Sample
from . import own_caches
from .inputs import Inputs
from .isolate import run_isolated
from .plan import Plan, PreparedState, globals_now
from .pure_calls import MemoPlan
from .source import parse_ahead
from .stages import Row
from .trial import TrialResult, find_plan

REMEDY = "Name the deterministic part instead: stoker.Staged(dataset, prepare=..., augment=...)"
LIMIT_S = 30.0  # for the trial


def map_style(dataset: object) -> None:
    """Refuses a dataset whose samples cannot be asked for by index. Raises UsageError: it is one."""
    if isinstance(dataset, IterableDataset) or not all(hasattr(dataset, n) for n in ("__getitem__", "__len__")):
        raise UsageError(
            f"{type(dataset).__name__} has no samples to ask for by index: staging wants a map-style dataset, with "
            "__getitem__ and __len__"
        )


class Split:
    """A dataset in two parts; made by ``split``.

    Args:
        dataset: map-style.
        found: by a trial; None: it is made here.
        changing: attributes that the script changes in each epoch: what is kept must not depend on them.

    Attributes:
        dataset: the whole.
        rows: the stages in order, each with the reason why it is kept or not.
        plan: how the two parts are made, and what they cost; None where calls are kept instead.
        memo: which calls are kept instead.
        exact: a sample is kept as it is: nothing in it is random.
        sample_s: seconds that a sample takes as a whole.
        opened: attributes that loading the first sample makes, as ``Staged`` names them.
        files: some of those that samples are read from.
        why_not: why not more is kept; "" where everything is.

    Raises:
        UsageError: no part of a sample can be kept; the message says why.
    """

    def __init__(self, dataset: MapDataset, found: TrialResult | None = None, changing: Collection[str] = ()) -> None:
        map_style(dataset)
        if not len(dataset):
            raise UsageError(f"{type(dataset).__name__} is empty")
        self.dataset = dataset  # the whole
        if found is None:
            try:
                found = run_isolated(lambda: find_plan(dataset, LIMIT_S, changing), 2 * LIMIT_S)
            except UsageError as e:
                found = TrialResult(None, [], str(e))
        if found.plan is None and found.memo is None:
            raise UsageError(f"{type(dataset).__name__} cannot be split: {found.why_not}. {REMEDY}")
        # how the two parts are made, and what they cost; None where calls are kept instead
        self.plan: Plan | None = found.plan
        self.memo: MemoPlan | None = found.memo  # which calls are kept instead
        self.rows: list[Row] = found.rows  # the stages in order, each with the reason why it is kept or not
        self.why_not = found.why_not  # why not more is kept; "" where everything is
        self.sample_s = found.sample_s  # seconds that a sample takes as a whole
        self.opened = found.opened or {}  # what loading the first sample makes
        self.has_no_effects = found.has_no_effects
        self.may_write = found.may_write
        self.files, self.folders = found.files, found.folders
        parse_ahead(found.sources)  # here, and not in each worker of each epoch
        self.exact = self.plan is not None and self.plan.exact

    def prepare(self, index: Index) -> PreparedState:
        """What is to be kept of a sample. Raises Unplanned: it takes another branch than those of the trial."""
        assert self.plan is not None
        return self.plan.head(self.dataset, index)

    def augment(self, state: PreparedState) -> Sample:
        """Runs the random part; returns the sample. It may write to ``state``."""
        assert self.plan is not None
        return self.plan.tail(self.dataset, state)

    @property
    def reads(self) -> set[str] | None:
        """Names of attributes and globals that the kept part may read; None: any."""
        return (self.plan or self.memo).reads  # type: ignore[union-attr]

    def globals_now(self) -> Attributes:
        """The values of the global variables that the kept part reads."""
        return globals_now((self.plan or self.memo).globals)  # type: ignore[union-attr]

    def inputs(self, across_runs: bool = False, of_all: bool = False) -> Inputs:
        """What the kept part may read, now. ``of_all``: what any code of the dataset may read."""
        plan, held, skip = self.plan, self.globals_now(), set()
        if plan is not None:
            # Another thread may have put an empty one in the place of a cache that the dataset keeps itself.
            held |= own_caches.values(self.dataset, plan.own_caches)
            skip = plan.scratch | {"dataset[0]." + ".".join(path) for path in plan.own_caches}
        names = None if of_all else self.reads
        return Inputs(self.dataset, names=names, skip=skip, held=held, across_runs=across_runs)

    def __str__(self) -> str:
        cells = [("kept" if row.cached else "each time", row.where, row.name, row.why) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(f"{text:{n}}" for text, n in zip(row, widths, strict=True)).rstrip() for row in cells]
        lines += [f"not more: {self.why_not}"] if self.why_not else []
        return "\n".join([*lines, self._cost()])

    def _cost(self) -> str:
        """What keeping it takes and saves, as far as the trial has measured."""
        plan, memo, n = self.plan, self.memo, len(self.dataset)
        later_s = memo.served_s if memo is not None else plan.tail_s + plan.read_s if plan is not None else 0.0
        nbytes = n * (memo or plan).nbytes  # type: ignore[union-attr]
        times = f"{self.sample_s * 1e3:.3g} ms for a sample, {later_s * 1e3:.3g} ms once it is kept"
        return f"about {nbytes / 1e6:,.3g} MB for {n:,} {'results of calls' if memo else 'samples'}; {times}"

    def __repr__(self) -> str:
        kept = sum(row.cached for row in self.rows)
        return f"<Split of {type(self.dataset).__name__}: {kept} of {len(self.rows)} stages are deterministic>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def split(dataset: MapDataset) -> Split:
    """Finds what is the same in every epoch, and what is random.

    A child process, which can change nothing here, makes a few samples. The dataset's code is cut before the first
    statement that draws random numbers, or inside a function or container of transforms that this statement calls.
    Then both parts together must give what the whole gives, bit by bit, with the first part run under other random
    states.

    Args:
        dataset: map-style.

    Returns:
        A ``Split``, which ``stoker.Staged(dataset)`` uses. ``print`` shows what is kept, where the cut lies, and why
        not more is kept.

    Raises:
        UsageError: nothing can be kept; the message says why, and what to do.

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
