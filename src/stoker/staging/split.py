"""``split``: which part of a dataset's samples is the same in every epoch, found by running a few of them."""

from __future__ import annotations

import html
from typing import Any

from torch.utils.data import IterableDataset

from ..core.errors import UsageError
from .isolate import run_isolated
from .plan import Plan, globals_now
from .pure_calls import MemoPlan
from .stages import Row
from .trial import Found, find_plan

REMEDY = "Name the deterministic part instead: stoker.Staged(dataset, prepare=..., augment=...)"
LIMIT_S = 30.0  # for the trial


def map_style(dataset: Any) -> None:
    """Raises ``UsageError`` for what has no samples to ask for by index."""
    if isinstance(dataset, IterableDataset) or not all(hasattr(dataset, n) for n in ("__getitem__", "__len__")):
        raise UsageError(
            f"{type(dataset).__name__} has no samples to ask for by index: staging wants a map-style dataset, with "
            "__getitem__ and __len__"
        )


class Split:
    """A dataset in two parts; made by ``split``.

    Attributes:
        dataset: the whole.
        rows: the stages in order, each with why it is kept or not.
        plan: how the two parts are made, and what they cost; None where calls are kept instead.
        memo: which calls are kept instead.
        exact: a sample is kept as it is: nothing in it is random.
        sample_s: seconds that a sample takes as a whole.
        why_not: why not more is kept; "" where nothing stands in the way.

    Raises:
        UsageError: no part of a sample can be kept; the message says why.
    """

    def __init__(self, dataset: Any, found: Found | None = None) -> None:
        map_style(dataset)
        if not len(dataset):
            raise UsageError(f"{type(dataset).__name__} is empty")
        self.dataset = dataset
        if found is None:
            try:
                found = run_isolated(lambda: find_plan(dataset, LIMIT_S), 2 * LIMIT_S)
            except UsageError as e:
                found = Found(None, [], str(e))
        if found.plan is None and found.memo is None:
            raise UsageError(f"{type(dataset).__name__} cannot be split: {found.why_not}. {REMEDY}")
        self.plan: Plan | None = found.plan
        self.memo: MemoPlan | None = found.memo
        self.rows: list[Row] = found.rows
        self.why_not = found.why_not
        self.sample_s = found.sample_s
        self.exact = self.plan is not None and self.plan.exact

    def prepare(self, index: Any) -> Any:
        """The deterministic part: what is to be kept of a sample.

        Raises:
            Unplanned: this sample takes a way that no trial has seen.
        """
        assert self.plan is not None
        return self.plan.head(self.dataset, index)

    def augment(self, state: Any) -> Any:
        """The random part, and the sample whole. It may write to ``state``."""
        assert self.plan is not None
        return self.plan.tail(self.dataset, state)

    @property
    def reads(self) -> set[str] | None:
        """Names of attributes and globals that the kept part may read; None: any."""
        return (self.plan or self.memo).reads  # type: ignore[union-attr]

    def globals_now(self) -> dict[str, Any]:
        """The values of the global variables that the kept part reads."""
        return globals_now((self.plan or self.memo).globals)  # type: ignore[union-attr]

    def __str__(self) -> str:
        wide = [
            max((len(column) for column in columns), default=0) for columns in zip(*map(_shown, self.rows), strict=True)
        ]
        lines = ["  ".join(f"{text:{n}}" for text, n in zip(_shown(row), wide, strict=True)) for row in self.rows]
        return "\n".join([*(line.rstrip() for line in lines), *([f"not more: {self.why_not}"] if self.why_not else [])])

    def __repr__(self) -> str:
        kept = sum(row.cached for row in self.rows)
        return f"<Split of {type(self.dataset).__name__}: {kept} of {len(self.rows)} stages are deterministic>"

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in _shown(row)) + "</tr>" for row in self.rows
        )
        table = f"<table><tr><th></th><th>where</th><th>stage</th><th>why</th></tr>{rows}</table>"
        return f"{table}<p>not more: {html.escape(self.why_not)}</p>" if self.why_not else table


def _shown(row: Row) -> tuple[str, str, str, str]:
    return "kept" if row.cached else "each time", row.where, row.name, row.why


def split(dataset: Any) -> Split:
    """Finds what is the same in every epoch, and what is random.

    A few samples are run in a child process, which can change nothing here. The dataset's code is cut at the first
    statement that draws random numbers, and inside that statement in a function or container of transforms that it
    calls. Then both parts together must give what the whole gives, bit by bit, with the first part run under other
    random states.

    Args:
        dataset: map-style.

    Returns:
        A ``Split``. Printed, it says what is kept, where the cut lies, and why not more is kept.
        ``stoker.Staged(dataset)`` uses it.

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
