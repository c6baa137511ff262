"""Loads the samples of a batch one by one inside a worker: finds those that fail, and replaces or skips them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ...core.dataset_tree import file_of
from ...core.errors import SampleError, StokerError
from ...core.types import Batch, Index, Sample
from .policy import NOTHING, Failure, OnError, Partial, called, plain, summary

OnSampleStart: TypeAlias = Callable[[int, int], None]
"""Called with the position in the task of the next sample to load, and 1. Or with -1 and the number of samples that are
loaded at once next; 0 if no sample is loaded after this."""
Ahead: TypeAlias = Callable[[Sequence[Index]], dict[int, Sample]]
"""Loads samples of a batch with threads. Returns by position those that are already loaded."""
MAX_REPLACEMENTS = 32  # samples that are tried as a replacement for one


class FetchParts(NamedTuple):
    """The parts of making a dataset's batches."""

    dataset: object  # for the names of its files
    batched: bool  # a task is a list of indices
    whole: Callable[[Index], Batch] | None  # makes a batch at once; None to use ``one`` and ``finish``
    one: Callable[[Index], Sample]  # loads the sample with this index
    finish: Callable[[list[Sample]], Batch]  # makes a batch from samples
    # called for samples of a batch before ``one`` loads the others; None if there is none
    ahead: Ahead | None = None


class Guard:
    """Makes batches from ``parts``, at once if the dataset can (``__getitems__``, a gather, a cache). If that fails,
    and the policy is not "raise", makes it again sample by sample. A failed sample's replacement depends on the base
    seed, the epoch and the task, not on the worker."""

    def __init__(self, parts: FetchParts, policy: OnError, on_sample_start: OnSampleStart | None = None) -> None:
        self.parts = parts
        self.policy = policy
        self.on_sample_start = on_sample_start or (lambda sample, samples: None)
        self._seed: tuple[int, ...] = (0, 0, 0)
        self._reseed: Callable[[], None] | None = None

    def begin(
        self, base_seed: int, epoch: int, task: int, reseed: Callable[[], None] | None = None, others: int = 0
    ) -> None:
        """Prepares the next task. The numbers seed the choice of replacements. ``others``: how often one took too long.
        ``reseed`` restores the random state of the task's beginning; None if that is unknown."""
        self._seed, self._reseed = (base_seed, epoch, task, others)[: 4 if others else 3], reseed

    def __call__(self, indices: Index, bad: Mapping[int, Failure] | None = None) -> Batch:
        """Makes a task's batch; a ``Partial`` if samples failed and were skipped or replaced. ``bad``: by position,
        samples that are not tried; None on the first try."""
        whole, error = self.parts.whole, None
        made: dict[int, Sample] = {}
        if self.parts.ahead is not None and bad is None:
            self.on_sample_start(-1, len(indices))
            made = self.parts.ahead(indices)
        if whole is not None and not bad:
            self.on_sample_start(-1, len(indices))
            try:
                return whole(indices)
            except Exception as e:
                if self.policy.action == "raise" or isinstance(e, StokerError):
                    raise
                error = e
            if self._reseed is not None:
                self._reseed()
        samples, failures = self._load(list(indices) if self.parts.batched else [indices], bad or {}, made)
        if not failures:
            if error is not None:
                raise error  # no single sample caused it
            return self.parts.finish(samples)
        return Partial(self.parts.finish(samples) if samples else NOTHING, failures)

    def probe(self, indices: Index, bad: Mapping[int, Failure]) -> None:
        """Loads each sample alone, except those known to be bad, and drops it."""
        for k, index in enumerate(list(indices) if self.parts.batched else [indices]):
            if k not in bad:
                self.on_sample_start(k, 1)
                with contextlib.suppress(Exception):
                    self.parts.one(index)

    def _load(
        self, indices: Sequence[Index], bad: Mapping[int, Failure], made: Mapping[int, Sample]
    ) -> tuple[list[Sample], list[Failure]]:
        """Returns the samples and the failures. ``made``: samples that are already loaded."""
        out: list[Sample] = []
        failures: list[Failure] = []
        holes: list[int] = []  # positions in ``out`` for replacements
        for k, index in enumerate(indices):
            self.on_sample_start(k, 1)
            try:
                if k in bad:
                    raise SampleError(bad[k].error)
                sample = made[k] if k in made else self.parts.one(index)
            except Exception as e:
                if self.policy.action == "raise" or (isinstance(e, StokerError) and k not in bad):
                    raise
                failures.append(bad[k] if k in bad else self._failure(index, e))
                if self.policy.call is not None:
                    sample = self.policy.call(index, e)
                    if sample is None:
                        continue
                elif self.policy.refill or self.policy.action == "replace":
                    holes.append(len(out))
                    sample = None
                else:
                    continue
            out.append(sample)
        filled = self._replace(out, holes, failures)
        self.on_sample_start(-1, 0)
        return filled, failures

    def _failure(self, index: Index, e: Exception) -> Failure:
        return Failure(plain(index), file_of(self.parts.dataset, index), summary(e))

    def _replace(self, out: list[Sample], holes: list[int], failures: list[Failure]) -> list[Sample]:
        """Fills the holes with replacements and returns the samples."""
        if not holes:
            return out
        draw = random.Random(":".join(map(str, self._seed)))
        among = self.policy.among
        if among is None:  # repeat samples of the same batch
            good = sorted(set(range(len(out))) - set(holes))
            for k in holes:
                out[k] = out[draw.choice(good)] if good else None
            return out if good else []
        for k in holes:
            out[k] = self._draw(draw, among, failures)
        return out

    def _draw(self, draw: random.Random, among: Sequence[Index], failures: list[Failure]) -> Sample:
        first = failures[-1]
        for _ in range(MAX_REPLACEMENTS):
            index = among[draw.randrange(len(among))]
            self.on_sample_start(-1, 1)
            try:
                return self.parts.one(index)
            except StokerError:
                raise
            except Exception as e:
                failures.append(self._failure(index, e))
        raise SampleError(
            f"{called(first.index, first.file)} failed, and so did {MAX_REPLACEMENTS} replacements; the last one with "
            f"{failures[-1].error}",
            failures,
        )
