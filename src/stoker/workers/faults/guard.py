"""Samples one by one inside a worker: which of them failed, and what stands in its place."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ...core.dataset_tree import file_of
from ...core.errors import SampleError, StokerError
from .policy import NOTHING, Failure, OnError, Partial, plain, words_of
from .sample_name import called

Mark: TypeAlias = Callable[[int, int], None]
TRIES = 32  # samples that are tried in the place of one


class Parts(NamedTuple):
    """How a dataset's batches are made, in parts.

    Attributes:
        dataset: for the names of its files.
        batched: a task is a list of indices.
        whole: makes a batch at once; None where that is nothing but ``one`` and ``finish``.
        one: loads the sample of an index.
        finish: makes a batch of samples.
    """

    dataset: Any
    batched: bool
    whole: Callable[[Any], Any] | None
    one: Callable[[Any], Any]
    finish: Callable[[list[Any]], Any]


class Guard:
    """Makes batches as ``parts`` says, under a policy.

    Whole batches stay whole (``__getitems__``, a gather, a cache) until one fails: then it is begun anew, sample by
    sample. What takes a failed sample's place depends on the base seed, the epoch and the task, never on the worker.

    Args:
        parts: of the dataset.
        policy: what to do.
        mark: is told the position of the sample that is about to be loaded and 1; or -1 and how many samples are about
            to be loaded at once, 0 where none is loaded any more.
    """

    def __init__(self, parts: Parts, policy: OnError, mark: Mark | None = None) -> None:
        self.parts, self.policy, self.mark = parts, policy, mark or (lambda position, samples: None)
        self._seed: tuple[int, ...] = (0, 0, 0)
        self._reseed: Callable[[], None] | None = None

    def begin(
        self, base_seed: int, epoch: int, task: int, reseed: Callable[[], None] | None = None, others: int = 0
    ) -> None:
        """The task that comes next.

        Args:
            base_seed, epoch, task: what replacements are drawn from.
            reseed: puts the random state back to where the task began, where that is known.
            others: how often what was drawn as a replacement took too long.
        """
        self._seed, self._reseed = (base_seed, epoch, task, others)[: 4 if others else 3], reseed

    def __call__(self, indices: Any, bad: Mapping[int, Failure] | None = None) -> Any:
        """A batch; a ``Partial`` where samples failed and the policy says how to go on.

        Args:
            indices: of the task.
            bad: by position, samples that are not to be tried.
        """
        whole, error = self.parts.whole, None
        if whole is not None and not bad:
            self.mark(-1, len(indices))
            try:
                return whole(indices)
            except Exception as e:
                if self.policy.action == "raise" or isinstance(e, StokerError):
                    raise
                error = e
            if self._reseed is not None:
                self._reseed()
        samples, failures = self._load(list(indices) if self.parts.batched else [indices], bad or {})
        if not failures:
            if error is not None:
                raise error  # no sample's
            return self.parts.finish(samples)
        return Partial(self.parts.finish(samples) if samples else NOTHING, failures)

    def probe(self, indices: Any, bad: Mapping[int, Failure]) -> None:
        """Loads each sample that is not known to be bad alone, and lets it go."""
        for k, index in enumerate(list(indices) if self.parts.batched else [indices]):
            if k not in bad:
                self.mark(k, 1)
                with contextlib.suppress(Exception):
                    self.parts.one(index)

    def _load(self, indices: Sequence[Any], bad: Mapping[int, Failure]) -> tuple[list[Any], list[Failure]]:
        """Samples in their places, and what failed."""
        out: list[Any] = []
        failures: list[Failure] = []
        holes: list[int] = []  # places in ``out`` that others are to take
        for k, index in enumerate(indices):
            self.mark(k, 1)
            try:
                if k in bad:
                    raise SampleError(bad[k].error)
                sample = self.parts.one(index)
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
        filled = self._filled(out, holes, failures)
        self.mark(-1, 0)
        return filled, failures

    def _failure(self, index: Any, e: Exception) -> Failure:
        return Failure(plain(index), file_of(self.parts.dataset, index), words_of(e))

    def _filled(self, out: list[Any], holes: list[int], failures: list[Failure]) -> list[Any]:
        if not holes:
            return out
        draw = random.Random(":".join(map(str, self._seed)))
        among = self.policy.among
        if among is None:  # of the same batch
            good = sorted(set(range(len(out))) - set(holes))
            for k in holes:
                out[k] = out[draw.choice(good)] if good else None
            return out if good else []
        for k in holes:
            out[k] = self._another(draw, among, failures)
        return out

    def _another(self, draw: random.Random, among: Sequence[Any], failures: list[Failure]) -> Any:
        first = failures[-1]
        for _ in range(TRIES):
            index = among[draw.randrange(len(among))]
            self.mark(-1, 1)
            try:
                return self.parts.one(index)
            except StokerError:
                raise
            except Exception as e:
                failures.append(self._failure(index, e))
        raise SampleError(
            f"{called(first.index, first.file)} failed, and so did {TRIES} others that were tried in its place; the "
            f"last of them: {failures[-1].error}",
            failures,
        )
