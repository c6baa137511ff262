"""The sampler's side of an epoch: yields its indices from the beginning or a saved position, and records what is needed
to find that position again.

A known sampler of torch or stoker is replayed from the random state in which it began, and skips indices. A sampler
with a ``state_dict()`` has its state restored. A distributed sampler is divided again if the number of ranks has
changed. Any other sampler is restarted in the random state in which it was started. None of this loads a sample.

The moments of an epoch, and what is captured at each::

    construct        nothing
    prepare()        torch is about to call iter(sampler)   _rng_before_iter   iterable datasets, unknown samplers
    begin()          torch has the sampler's iterator       _rng_after_iter    a known sampler draws its order from here
                                                            _state_at_start    a stateful sampler's own state
    first indices    the sampler has drawn its order        _rng_after_first
    each batch       its indices are handed out             _sampler_states    a stateful sampler's own state
    end, or save()   sampler_rng() and sampler_state() choose among these
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

from ..core.errors import StateError
from ..core.random_state import PROCESS_WIDE, RandomState, is_one_draw, preserved, set_from_text
from ..core.ranks import rank_and_ranks
from ..core.types import Index, JsonObject
from ..core.types import State as ObjectState
from .division import share_of_rest
from .order import END, TORCH_SAMPLERS, in_batches, order, with_first_drawn
from .stateful import is_stateful, load_into, pickled_state, read_state

if TYPE_CHECKING:
    from .state import State

OPAQUE_ORDERS = ("stateful", "distributed", "other")  # orders that only their sampler knows


class _Start(NamedTuple):
    """Where an iterator began: the task, and the number of indices that earlier tasks took from this sampler."""

    task: int
    samples: int


class _SamplerState(NamedTuple):
    """A stateful sampler's state after some tasks: pickled states of sampler and iterator, and whether it has ended."""

    tasks: int
    pickled: bytes
    ended: bool


class SamplerReplay:
    """A loader's sampler, epoch after epoch. ``Cursor`` adds what was delivered. ``saved``: where to resume."""

    def __init__(self, index_sampler: Any, generator: torch.Generator | None, saved: State | None = None) -> None:
        self._index_sampler = index_sampler
        self._generator = generator
        # whether torch makes the batches, from any sampler
        self._batched = type(index_sampler) is BatchSampler and BatchSampler.__iter__ is TORCH_SAMPLERS[BatchSampler]
        self._sampler = index_sampler.sampler if self._batched else index_sampler
        self.batch_size: int | None = index_sampler.batch_size if self._batched else None
        self._endless = isinstance(self._sampler, _InfiniteConstantSampler)  # for an iterable dataset
        self._known = not self._endless and order(index_sampler) is not None
        self.saved = saved  # None once it is resumed
        # kind, workers, task_seeds: of the loader, as in ``State``
        self.kind: Literal["map", "iterable"] = "map"
        self.workers = 0
        self.task_seeds = False
        # rank, ranks: of this process; ``ranks`` is the sampler's number of replicas, if it has one
        self.rank, self.ranks = rank_and_ranks()
        replicas = getattr(self._sampler, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 0 and not isinstance(replicas, bool):
            self.ranks = replicas
        # returns the state of a dataset in this process; None if there is none
        self.live_state: Callable[[], ObjectState] | None = None
        self.next = 0  # the first task that is not delivered
        self._forget_epoch()

    def _forget_epoch(self) -> None:
        self._start = _Start(0, 0)
        self._samples_before_split = 0  # for a distributed sampler: samples that all ranks took before this division
        self._rng_before_iter: RandomState | None = None
        self._rng_after_iter: RandomState | None = None
        self._drawn_in_iter: list[str] | None = None  # generators that moved between these two
        self._rng_after_first: RandomState | None = None
        self._state_at_start: bytes | None = None
        self._sampler_states: deque[_SamplerState] = deque()

    @property
    def _sampler_generator(self) -> torch.Generator | None:
        own = getattr(self._sampler, "generator", None)
        return own if isinstance(own, torch.Generator) else None

    def _capture_rng(self) -> RandomState:
        """Captures the generators that the sampler may draw from."""
        own = self._sampler_generator
        others = [] if own is None else [("generator", own)]
        if self._known:
            return RandomState(others, ("torch",) if own is None else ())
        return RandomState(others, PROCESS_WIDE)

    def preserve_rng(self) -> AbstractContextManager[None]:
        """Wraps torch's constructor of an iterator, which draws seeds. A resumed iterator already has its seeds, so it
        must not move any generator."""
        if self.saved is not None:
            return preserved(self._generator, self._sampler_generator)
        return nullcontext()

    def prepare(self) -> None:
        """Prepares for torch's call of ``iter`` on the sampler."""
        self._forget_epoch()
        if self._endless or not (self._known or self._batched):
            self._rng_before_iter = self._capture_rng()

    def restore_rng_before(self, saved: State) -> None:
        """Restores the random state from before an iterable dataset began in the training process."""
        self._rng_before_iter = None
        if "before" in saved.sampler_rng:
            RandomState.from_texts(saved.sampler_rng["before"], None).restore_saved()
            self._rng_before_iter = self._capture_rng()

    def restore_process_rng(self, saved: State) -> None:
        """Restores the random state with which an epoch over an iterable dataset began in the training process."""
        texts = {k: v for k, v in saved.sampler_rng.items() if k not in ("before", "generator")}
        RandomState.from_texts(texts, None).restore_saved()

    # -- an epoch begins

    def _iterate(self, torch_iterator: Iterator[Index]) -> Iterator[Index]:
        if self._endless:
            return torch_iterator
        known = order(self._index_sampler) if self._known else None
        if known is not None:
            return known
        if is_stateful(self._sampler):
            self._state_at_start = pickled_state(self._sampler.state_dict)
        return self._follow(None if self._batched else torch_iterator, 0)

    def _follow(self, iterator: Iterator[Index] | None, skip: int, last: int = 1) -> Iterator[Index]:
        """Yields a sampler's indices, batched as torch does, and records what is needed at each task. ``iterator``: the
        sampler's; None to begin it with the first task. ``skip``: number of indices to leave out, which may exceed the
        end by part of the last batch. ``last``: the most indices that the last batch may have had."""
        own = iter(self._sampler) if iterator is None else iterator
        size = int(self.batch_size or 1)
        there = max(0, skip - max(size, last) + 1)
        if there and next(itertools.islice(own, there - 1, None), END) is END:
            raise _beyond(skip, f"fewer than {there:,}")
        next(itertools.islice(own, skip - there, skip - there), None)
        stateful = is_stateful(own) or is_stateful(self._sampler)
        given = in_batches(own, size, self._index_sampler.drop_last) if self._batched else own
        for tasks, indices in enumerate(given, self._start.task + 1):
            if self._rng_after_first is None:
                self._rng_after_first = self._capture_rng()
            if stateful:
                self._note_sampler_state(tasks, own, self._batched and len(indices) < size)
            yield indices

    def _note_sampler_state(self, tasks: int, iterator: Iterator[Index], ended: bool) -> None:
        """Records the sampler's state after it gave the indices of ``tasks`` tasks. Keeps only the newest of the states
        up to the last delivered task."""
        while len(self._sampler_states) > 1 and self._sampler_states[1].tasks <= self.next:
            self._sampler_states.popleft()
        objects: tuple[object, ...] = self._sampler, iterator
        pickled = pickled_state(lambda: [x.state_dict() if is_stateful(x) else None for x in objects])
        self._sampler_states.append(_SamplerState(tasks, pickled, ended))

    # -- or is resumed

    def _resume_order(self, s: State) -> Iterator[Index]:
        self._start = _Start(s.next, s.samples)
        if s.generator is not None and self._generator is not None:
            set_from_text(self._generator, s.generator)
        if self._endless:
            with preserved():
                self.restore_process_rng(s)
                self._rng_after_iter = self._capture_rng()
            return iter(()) if s.is_over else iter(self._index_sampler)
        # Without workers, the order is drawn with the first batch. Before that, the draw must move the generator.
        drawn = bool(s.workers or s.next or s.finished)
        with preserved() if drawn or (self._known and not s.torch_rng_restored) else nullcontext():
            if not self._known:
                return with_first_drawn(self._restart_sampler(s))
            RandomState.from_texts(s.sampler_rng, self._sampler_generator).restore_saved()
            self._rng_after_iter = self._capture_rng()
            indices = order(self._index_sampler, s.samples)
            assert indices is not None
            return with_first_drawn(indices)

    def _restart_sampler(self, s: State) -> Iterator[Index]:
        """Resumes an order that only its sampler knows."""
        if s.world is not None:
            divided = self._divide_among_ranks(s)
            if divided is not None:
                return divided
        state = s.sampler_state
        if state is not None:
            load_into(self._sampler, state["sampler"], "sampler")
        iterator = self._restart_iterator(s)
        if state is not None:
            load_into(iterator, state["iterator"], "sampler's iterator")
            states = [state["sampler"], state["iterator"]]
            self._sampler_states.append(_SamplerState(state["given"], pickle.dumps(states), state["ended"]))
            self._state_at_start = None if s.next else pickle.dumps(state["sampler"])
        tasks = 0 if state is None else state["given"]
        if state is not None and state["ended"] and tasks == s.next:
            # The sampler has reached its end, and may already be at the next epoch's beginning.
            assert iterator is not None
            if next(iterator, END) is not END:
                load_into(self._sampler, state["sampler"], "sampler")
            return iter(())
        skip = s.next - tasks
        if self._batched:
            skip = s.samples if state is None else skip * (s.batch_size or 1)
        indices = self._follow(iterator, skip, s.batch_size or 1)
        if state is None or s.next > 0:
            return indices
        # At the beginning of an epoch, some samplers are still in the state of the last one's end, and stop at once.
        first = next(indices, END)
        return self._iterate(iter(self._sampler)) if first is END else itertools.chain([first], indices)

    def _restart_iterator(self, s: State) -> Iterator[Index] | None:
        """Calls ``iter(sampler)`` in the random state in which it was first called; None if ``_follow`` calls it."""
        before = s.sampler_rng.get("before", {})
        own = self._sampler_generator
        with preserved() if before else nullcontext():
            RandomState.from_texts({**s.sampler_rng, **before}, own).restore_saved()
            self._rng_before_iter = None if self._batched else self._capture_rng()
            iterator = None if self._batched and s.sampler_state is None else iter(self._sampler)
        RandomState.from_texts(s.sampler_rng, own).restore_saved()
        self._rng_after_iter = self._capture_rng()
        return iterator

    def _divide_among_ranks(self, s: State) -> Iterator[Index] | None:
        """Returns the rest of a distributed epoch for the present ranks; None if their number has never changed."""
        assert s.world is not None
        taken, ranks, epoch = s.world
        sampler = self._sampler
        if sampler.epoch != epoch and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        skip = s.samples
        if sampler.num_replicas != ranks:
            if s.ahead or not (self._batched or s.batch_size is None):
                raise StateError("batches were delivered out of order, so resuming needs the same number of ranks")
            taken += s.samples * ranks
            skip = 0
            self._start = _Start(s.next, 0)
        elif not taken:
            return None
        self._samples_before_split = taken
        texts = {**s.sampler_rng, **s.sampler_rng.get("before", {})}
        RandomState.from_texts(texts, self._sampler_generator).restore_saved()
        self._rng_after_iter = self._capture_rng()
        mine = share_of_rest(sampler, taken)
        self._rng_after_first = self._capture_rng()
        return self._follow(iter(mine), skip, s.batch_size or 1)

    def _check(self, s: State) -> None:
        """Raises StateError if the state is from a different loader."""
        if s.kind != self.kind:
            raise StateError(
                f"the state dict was saved with a dataset that is {s.kind}-style; this loader's dataset is "
                f"{self.kind}-style"
            )
        if (s.batch_size is None) != (self.batch_size is None) or (self._endless and s.batch_size != self.batch_size):
            raise StateError(
                f"the state dict has batch_size={s.batch_size}; this loader has batch_size={self.batch_size}"
            )
        if not self._endless:
            self._check_order(s)

    def _check_order(self, s: State) -> None:
        name = self._order_name()
        if s.ahead and s.batch_size != self.batch_size:
            raise StateError(
                "the state dict was saved after batches were delivered out of order, so this loader must have the "
                f"same batch_size: {s.batch_size}, not {self.batch_size}"
            )
        if s.sampler != name and (self._known or s.sampler not in OPAQUE_ORDERS):
            raise StateError(f"the state dict was saved with order {s.sampler}; this loader's order is {name}")
        if (s.world is None) != (self._ranks() is None):
            raise StateError(
                f"the state dict has world={s.world}, which does not fit this loader's sampler, "
                f"{type(self._sampler).__name__}"
            )
        if s.ranks not in (0, self.ranks) and s.world is None and s.next and not s.finished:
            raise StateError(
                f"the state dict was saved by {s.ranks} ranks and there are {self.ranks} now, but "
                f"{type(self._sampler).__name__} does not say how ranks divide the samples. Use a DistributedSampler; "
                "if each rank reads all samples, give it num_replicas=1, rank=0"
            )
        if self._known:
            there = len(self._sampler)
            if s.samples >= there + (s.batch_size or 1):
                raise _beyond(s.samples, f"{there:,}")
        self._check_draws(s)

    def _check_draws(self, s: State) -> None:
        length = self._shuffled_length()
        if length != s.length:
            raise StateError(
                f"the state dict was saved with {s.length:,} samples in random order; this loader has {length:,}, so "
                "its order differs"
            )
        source = "torch" if self._sampler_generator is None else "generator"
        if self._known and length >= 0 and set(s.sampler_rng) != {source}:
            saved_source = "one generator" if source == "torch" else "torch's global generator"
            raise StateError(
                f"the state dict's order was drawn from {saved_source}; this sampler draws from a different one"
            )
        if s.sampler_state is not None and not (is_stateful(self._sampler) or s.sampler_state["sampler"] is None):
            raise StateError(
                f"the state dict has a sampler state, but {type(self._sampler).__name__} has no load_state_dict()"
            )

    def _order_name(self) -> str:
        """Returns the order's name, with what it depends on besides its data."""
        if self._endless:
            return "endless"
        sampler = self._sampler
        if not self._known:
            return "other" if self._ranks() is None else "distributed"
        name = type(sampler).__name__
        every = self._shuffled_length() in (-1, getattr(sampler, "num_samples", -1))
        return name if every else f"{name} {sampler.num_samples}"

    def _ranks(self) -> int | None:
        sampler = self._sampler
        return sampler.num_replicas if isinstance(sampler, DistributedSampler) else None

    def _shuffled_length(self) -> int:
        """Returns the number of shuffled samples; -1 if the order does not depend on it."""
        if not self._known or not hasattr(self._sampler, "generator"):
            return -1
        return len(self._sampler.data_source)

    # -- and is written down

    def _sampler_state(self) -> dict[str, ObjectState] | None:
        """Returns a stateful sampler's own state after the last delivered task for which one was recorded."""
        states = [state for state in self._sampler_states if state.tasks <= self.next]
        if states:
            sampler, iterator = read_state(states[-1].pickled)
            return {"given": states[-1].tasks, "sampler": sampler, "iterator": iterator, "ended": states[-1].ended}
        at_start = read_state(self._state_at_start)
        return None if at_start is None else {"given": 0, "sampler": at_start, "iterator": None, "ended": False}

    def _sampler_rng(self, order_name: str) -> JsonObject:
        """Returns the random state from which the order was drawn, as texts; under "before", the state before
        ``iter(sampler)``."""
        after = self._rng_after_iter
        if after is None or order_name == "stateful":
            return {}
        if self._known:
            return {} if self._shuffled_length() < 0 else after.to_texts(after.values)
        if self._endless:
            if self.workers or self.live_state is not None:
                return {}  # this process need not reread the dataset from the beginning
            texts = {} if self.task_seeds else after.to_texts(after.moved(self._capture_rng()))
        elif self._rng_after_first is not None:
            texts = after.to_texts(after.moved(self._rng_after_first))
        else:  # the process-wide generators are still as they are now
            texts = after.to_texts(["generator"] if "generator" in after.values else [])
        if self._rng_before_iter is not None:
            if self._drawn_in_iter is None:  # once per epoch, because some scripts save after each step
                self._drawn_in_iter = self._moved_in_iter(self._rng_before_iter, after)
            if self._drawn_in_iter:
                texts["before"] = self._rng_before_iter.to_texts(self._drawn_in_iter)
        return texts

    def _moved_in_iter(self, before: RandomState, after: RandomState) -> list[str]:
        moved = before.moved(after)
        if "torch" in moved and self._generator is None and not self.workers and is_one_draw(before, after):
            moved.remove("torch")  # moved by the draw of torch's base seed, not by the sampler
        return moved


def _beyond(skip: int, there: str) -> StateError:
    return StateError(
        f"the state dict is at index {skip:,} of its sampler, but this loader's sampler has {there} indices"
    )
