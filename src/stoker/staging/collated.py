"""A collate function that does work for each sample: turns a text into numbers, say.

It is staged as a dataset whose indices are lists of samples. Of such a dataset calls alone can be kept, by their
arguments (``memoize``): ``encode(text)`` of each text, whatever batch it is in.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator

from ..core.types import Batch, Index, Sample
from .callee import Call
from .samples import TrialSamples

WORTH_S = 100e-6  # that collating takes for each sample
WORTH_SHARE = 0.2  # of the time that making and collating it takes
BATCHES, SIZE = 6, 3  # of a trial: few samples, for each of their calls is looked at
LEAST = 3  # batches with which a trial is made
MOST_S = 2.0  # for making their samples


class Collated:
    """Batches of a collate function. ``samples``: of the dataset that they come from."""

    def __init__(self, collate_fn: Callable[[list[Sample]], Batch], samples: int) -> None:
        self.collate_fn = collate_fn
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    @property
    def __getitem__(self) -> Callable[[list[Sample]], Batch]:
        """Is the function: so its own calls are looked at, and not those of a function around it."""
        return self.collate_fn

    def _stoker_children(self) -> Iterator[tuple[str, object]]:
        yield ".collate_fn", self.collate_fn


class CollateSamples(TrialSamples):
    """Batches for the trial of a collate function; made of copies, for it may write to its samples."""

    def __init__(self, dataset: Collated, batches: list[list[Sample]]) -> None:
        super().__init__(dataset, batches)
        self.by_batch = True

    def make(self, i: Index) -> Batch:
        return super().make(copy.deepcopy(i))

    def call(self, i: Index) -> Call:
        return super().call(copy.deepcopy(i))


def collate_samples(samples: TrialSamples, collate_fn: Callable[[list[Sample]], Batch]) -> CollateSamples | None:
    """Batches for the trial of a collate function; None where it takes too little time. Sets ``collate_s``."""
    made: list[Sample] = []
    until = time.monotonic() + MOST_S
    for i in [*samples.loaded, *samples.fresh]:
        with contextlib.suppress(Exception):  # the user's
            made.append(samples.make(i))
        if len(made) == SIZE and not _is_worth(samples, collate_fn, made):
            return None
        if len(made) == BATCHES * SIZE or time.monotonic() > until:
            break
    batches = [made[k : k + SIZE] for k in range(0, len(made) - SIZE + 1, SIZE)]
    return CollateSamples(Collated(collate_fn, len(samples.dataset)), batches) if len(batches) >= LEAST else None


def _is_worth(samples: TrialSamples, collate_fn: Callable[[list[Sample]], Batch], batch: list[Sample]) -> bool:
    """Whether collating is a notable part of making batches."""
    for _ in range(2):
        copied = copy.deepcopy(batch)
        began = time.perf_counter()
        collate_fn(copied)
        samples.collate_s = min(samples.collate_s, (time.perf_counter() - began) / SIZE)
    return samples.collate_s > max(WORTH_S, WORTH_SHARE * (samples.sample_s + samples.collate_s))
