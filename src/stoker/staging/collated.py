"""Caching for collate functions that do work for each sample, such as tokenizing a text.

A collate function is staged as a dataset whose indices are lists of samples. Only its calls can be cached, by their
arguments (``memoize``): ``encode(text)`` for each text, whatever batch it is in.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator

from ..core.types import Batch, Index, Sample
from .callee import Call
from .samples import TrialSamples

WORTH_S = 100e-6  # minimum collate time per sample
WORTH_SHARE = 0.2  # minimum share of the time for making and collating a sample
BATCHES, SIZE = 6, 3  # for a trial: few samples, because each of their calls is inspected
LEAST = 3  # minimum batches for a trial
MOST_S = 2.0  # for making their samples


class Collated:
    """Batches of a collate function as a dataset. ``samples``: length of the dataset behind them."""

    def __init__(self, collate_fn: Callable[[list[Sample]], Batch], samples: int) -> None:
        self.collate_fn = collate_fn
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    @property
    def __getitem__(self) -> Callable[[list[Sample]], Batch]:
        """Returns the function itself, so that a trial inspects its calls and not those of a wrapper."""
        return self.collate_fn

    def _stoker_children(self) -> Iterator[tuple[str, object]]:
        yield ".collate_fn", self.collate_fn


class CollateSamples(TrialSamples):
    """Batches for the trial of a collate function, made from copies because it may write to its samples."""

    def __init__(self, dataset: Collated, batches: list[list[Sample]]) -> None:
        super().__init__(dataset, batches)
        self.by_batch = True

    def make(self, i: Index) -> Batch:
        return super().make(copy.deepcopy(i))

    def call(self, i: Index) -> Call:
        return super().call(copy.deepcopy(i))


def collate_samples(samples: TrialSamples, collate_fn: Callable[[list[Sample]], Batch]) -> CollateSamples | None:
    """Makes batches for the trial of a collate function, None if it takes little time; sets ``samples.collate_s``."""
    made: list[Sample] = []
    until = time.monotonic() + MOST_S
    for i in [*samples.loaded, *samples.fresh]:
        with contextlib.suppress(Exception):  # the user's errors
            made.append(samples.make(i))
        if len(made) == SIZE and not _is_worth(samples, collate_fn, made):
            return None
        if len(made) == BATCHES * SIZE or time.monotonic() > until:
            break
    batches = [made[k : k + SIZE] for k in range(0, len(made) - SIZE + 1, SIZE)]
    return CollateSamples(Collated(collate_fn, len(samples.dataset)), batches) if len(batches) >= LEAST else None


def _is_worth(samples: TrialSamples, collate_fn: Callable[[list[Sample]], Batch], batch: list[Sample]) -> bool:
    """Whether collating takes a notable part of the time for making batches."""
    for _ in range(2):
        copied = copy.deepcopy(batch)
        began = time.perf_counter()
        collate_fn(copied)
        samples.collate_s = min(samples.collate_s, (time.perf_counter() - began) / SIZE)
    return samples.collate_s > max(WORTH_S, WORTH_SHARE * (samples.sample_s + samples.collate_s))
