"""The stages inside a worker: fetch the samples of a task, collate them, and say what each cost.

Fetching itself is torch's own (``_DatasetKind.create_fetcher``), so ``__getitems__``, ``drop_last`` and every error
of a dataset are what they are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from .collate import SlotCollate


class Stages:
    """fetch, then collate, for one worker and one epoch.

    Args:
        kind: torch's ``_DatasetKind``.
        dataset: map- or iterable-style; an iterable one is started here.
        auto_collation: whether a task is a list of indices.
        collate: collate function, wrapped so that it writes to a slot and is timed.
        drop_last: torch's.
    """

    def __init__(self, kind: int, dataset: Any, auto_collation: bool, collate: SlotCollate, drop_last: bool) -> None:
        self._collate = collate
        self._fetcher = _DatasetKind.create_fetcher(kind, dataset, auto_collation, collate, drop_last)
        self._fetch: Callable[[Any], Any] = self._fetcher.fetch
        self.fetch_ns = 0
        self.collate_ns = 0

    def run(self, indices: Any) -> Any:
        """One batch. Leaves the nanoseconds of both stages in ``fetch_ns`` and ``collate_ns``."""
        self._collate.spent_ns = 0
        began = time.perf_counter_ns()
        try:
            return self._fetch(indices)
        finally:
            self.collate_ns = self._collate.spent_ns
            self.fetch_ns = time.perf_counter_ns() - began - self.collate_ns
