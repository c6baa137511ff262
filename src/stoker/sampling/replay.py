"""The sampler's side of an epoch: its indices, from the beginning or from where a saved run was, and what has to be
written down to find that place again.

A sampler is put back by beginning it again in the random state in which it began, and leaving out indices, never by
loading samples; one with a state of its own (``state_dict()``) gets that back; a distributed one is dealt anew if there
are more or fewer ranks.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

from ..core.errors import StateError
from .order import _KNOWN, order
from .rng import Draws, SavedGlobalRng, restore, set_random, still
from .stateful import is_stateful, noted, put, read

if TYPE_CHECKING:
    from .state import State

END = object()
OTHERS = ("stateful", "distributed", "other")  # orders that only their sampler knows


class Sampling:
    """A loader's sampler, one epoch after another. ``Cursor`` adds what was delivered of it.

    Args:
        index_sampler: the loader's.
        generator: the loader's.
        saved: where to go on; None begins at the beginning.
        shadow: of torch's global generator, from which epochs may be drawn.

    Attributes:
        saved: the same, until it is gone on.
        kind, workers, task_seeds: of the loader, as in ``State``.
        next: the first task that is not delivered.
        live: asked for the state of a dataset in this process.
    """

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        saved: State | None = None,
        shadow: SavedGlobalRng | None = None,
    ) -> None:
        self._index_sampler, self._generator = index_sampler, generator
        self._batched = type(index_sampler) is BatchSampler and BatchSampler.__iter__ is _KNOWN[BatchSampler]
        self._sampler = index_sampler.sampler if self._batched else index_sampler
        self._size = index_sampler.batch_size if self._batched else None
        self._endless = isinstance(self._sampler, _InfiniteConstantSampler)
        self._known = not self._endless and order(index_sampler) is not None
        self.saved = saved
        self.shadow = SavedGlobalRng() if shadow is None else shadow
        self.kind, self.workers, self.task_seeds = "map", 0, False
        self.live: Callable[[], Any] | None = None
        self.next = 0
        self._forget()

    def _forget(self) -> None:
        """Whatever was of the last epoch."""
        self._from = (0, 0)  # task, and indices taken before it
        self._base = 0  # of a distributed sampler: samples that all ranks took before this split
        self._before: Draws | None = None
        self._after: Draws | None = None
        self._first: Draws | None = None
        self._opening: bytes | None = None
        self._given: deque[tuple[int, bytes, bool]] = deque()

    @property
    def _own(self) -> torch.Generator | None:
        own = getattr(self._sampler, "generator", None)
        return own if isinstance(own, torch.Generator) else None

    def _draws(self) -> Draws:
        return Draws(self._own, whole=not self._known)

    @property
    def batch_size(self) -> int | None:
        """Where torch's own batches are made; else None."""
        return self._size

    def quiet(self, again: bool = False) -> AbstractContextManager[None]:
        """Around what torch draws for a new iterator: a resumed one draws nothing, for it has what was drawn, and
        neither does one that takes another's place (``again``)."""
        return still(self._generator, self._own) if again or self.saved is not None else nullcontext()

    def prepare(self) -> None:
        """torch is about to call ``iter`` on the sampler."""
        self._forget()
        if not (self._known or self._endless or self._batched):
            self._before = self._draws()

    def set_random(self, saved: State) -> None:
        """Random state as it was when an epoch over an iterable dataset began in the main process."""
        set_random({k: v for k, v in saved.sampler_rng.items() if k not in ("before", "generator")}, None)

    # -- an epoch begins

    def _begin(self, theirs: Iterator[Any]) -> Iterator[Any]:
        self._after = None if self._known and self._length() < 0 else self._draws()
        found = self._started(theirs)
        return _with_its_draws(found) if self.shadow.over_now else found

    def _started(self, theirs: Iterator[Any], skip: int = 0) -> Iterator[Any]:
        if self._endless:
            return theirs
        known = order(self._index_sampler, skip) if self._known else None
        if known is not None:
            return known
        if is_stateful(self._sampler):
            self._opening = noted(self._sampler.state_dict)
        return self._batches(skip) if self._batched else self._single(theirs, skip)

    def _batches(self, skip: int, inner: Any = None) -> Iterator[list[Any]]:
        """torch's batches, over a sampler whose iterator can be asked for its state."""
        size, drop_last = int(self._size or 1), self._index_sampler.drop_last
        inner = iter(self._sampler) if inner is None else inner
        next(itertools.islice(inner, skip, skip), None)
        stateful = is_stateful(inner) or is_stateful(self._sampler)
        given = self._from[0]
        first = True
        while True:
            batch = [*itertools.islice(inner, size)]
            if not batch or (drop_last and len(batch) < size):
                return
            if first:
                self._first, first = self._draws(), False
            if stateful:
                given += 1
                self._note(given, inner, len(batch) < size)
            yield batch

    def _single(self, theirs: Iterator[Any], skip: int) -> Iterator[Any]:
        """What a sampler gives that makes its batches itself, or gives one index at a time."""
        next(itertools.islice(theirs, skip, skip), None)
        stateful = is_stateful(theirs) or is_stateful(self._sampler)
        given = self._from[0]
        first = next(theirs, END)
        if first is END:
            return
        self._first = self._draws()
        if not stateful:
            yield first
            yield from theirs
            return
        while first is not END:
            given += 1
            self._note(given, theirs)
            yield first
            first = next(theirs, END)

    def _note(self, given: int, inner: Any, ended: bool = False) -> None:
        while len(self._given) > 1 and self._given[1][0] <= self.next:
            self._given.popleft()
        self._given.append((given, noted(lambda: self._states(inner)), ended))

    def _states(self, inner: Any) -> Any:
        return [x.state_dict() if is_stateful(x) else None for x in (self._sampler, inner)]

    # -- or goes on

    def _go_on(self, s: State) -> Iterator[Any]:
        self._from = (s.next, s.samples)
        if s.generator is not None and self._generator is not None:
            restore(self._generator, s.generator)
        if self._endless:
            with still():
                self.set_random(s)
                self._after = self._draws()
            return iter(()) if over(s) else iter(self._index_sampler)
        begun = s.workers or s.next or s.finished  # else the sampler has drawn nothing yet, and is about to, for good
        with still() if begun else self.shadow.over():
            if not self._known:
                return _with_its_draws(self._again(s))
            set_random(s.sampler_rng, self._own)
            self._after = self._draws()
            found = order(self._index_sampler, s.samples)
            assert found is not None
            return _with_its_draws(found)

    def _again(self, s: State) -> Iterator[Any]:
        """An order that only its sampler knows."""
        if s.world is not None:
            dealt = self._deal(s)
            if dealt is not None:
                return dealt
        state = s.sampler_state
        if state is not None:
            put(self._sampler, state["sampler"], "sampler")
        after = {k: v for k, v in s.sampler_rng.items() if k != "before"}
        before: Any = s.sampler_rng.get("before")
        with still() if before else nullcontext():
            set_random({**after, **(before or {})}, self._own)
            self._before = None if self._batched else self._draws()
            theirs = None if self._batched and state is None else iter(self._sampler)
        set_random(after, self._own)
        self._after = self._draws()
        if state is not None:
            put(theirs, state["iterator"], "sampler's iterator")
            states = [state["sampler"], state["iterator"]]
            self._given.append((state["given"], pickle.dumps(states), state["ended"]))
            self._opening = None if s.next else pickle.dumps(state["sampler"])
        given = 0 if state is None else state["given"]
        if state is not None and state["ended"] and given == s.next:
            # The sampler has seen its own end, and may be at the next epoch's beginning.
            assert theirs is not None
            if next(theirs, END) is not END:
                put(self._sampler, state["sampler"], "sampler")
            return iter(())
        if self._batched:
            skip = s.samples if state is None else (s.next - given) * (s.batch_size or 1)
            head = self._batches(skip, theirs)
        else:
            assert theirs is not None
            head = self._single(theirs, s.next - given)
        if state is None or s.next > 0:
            return head
        # At the beginning of an epoch some samplers hold the state of the last one's end: they stop at once.
        first = next(head, END)
        return self._started(iter(self._sampler)) if first is END else itertools.chain([first], head)

    def _deal(self, s: State) -> Iterator[Any] | None:
        """What is left of a distributed epoch, dealt to the ranks there are now; None where nothing changes."""
        assert s.world is not None
        base, ranks, epoch = s.world
        sampler = self._sampler
        if sampler.epoch != epoch and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        skip = s.samples
        if sampler.num_replicas != ranks:
            if s.ahead or not (self._batched or s.batch_size is None):
                raise StateError("batches were delivered out of order: only the same number of ranks can go on")
            base, skip = base + s.samples * ranks, 0
            self._from = (s.next, 0)
        elif not base:
            return None
        self._base = base
        whole = copy.copy(sampler)
        n = len(sampler.dataset)
        whole.num_replicas, whole.rank, whole.num_samples, whole.total_size = 1, 0, n, n
        left = list(whole)[base:]
        if sampler.drop_last:
            left = left[: len(left) // sampler.num_replicas * sampler.num_replicas]
        elif left:
            pad = -len(left) % sampler.num_replicas
            left += (left * (pad // len(left) + 1))[:pad]
        mine = iter(left[sampler.rank :: sampler.num_replicas])
        return self._batches(skip, mine) if self._batched else self._single(mine, skip)

    def _check(self, s: State) -> None:
        """Raises for a state that is another loader's."""
        if s.kind != self.kind:
            raise StateError(f"the state dict is of a dataset that is {s.kind}, this loader's is {self.kind}")
        if (s.batch_size is None) != (self._size is None):
            raise StateError(f"the state dict has batch_size={s.batch_size}, this loader {self._size}")
        if self._endless:
            if s.batch_size != self._size:
                raise StateError(f"the state dict has batch_size={s.batch_size}, this loader {self._size}")
            return
        if s.ahead and s.batch_size != self._size:
            raise StateError(
                f"the state dict has batch_size={s.batch_size} and batches that were delivered out of order, so this "
                f"loader needs that batch_size, too, not {self._size}"
            )
        if s.sampler != self._word() and (self._known or s.sampler not in OTHERS):
            raise StateError(f"the state dict is of the order {s.sampler}, this loader's is {self._word()}")
        if (s.world is None) != (self._ranks() is None):
            raise StateError(f"the state dict's world is {s.world}, and the sampler is {type(self._sampler).__name__}")
        if self._length() != s.length:
            raise StateError(
                f"the state dict is of {s.length:,} samples in random order, this loader has {self._length():,}: "
                "another order"
            )
        if (
            self._known
            and self._length() >= 0
            and set(s.sampler_rng) != {"torch" if self._own is None else "generator"}
        ):
            words = "one generator" if self._own is None else "torch's global generator"
            raise StateError(f"the state dict's order was drawn from {words}, this sampler draws from another")
        if s.sampler_state is not None and not (is_stateful(self._sampler) or s.sampler_state["sampler"] is None):
            raise StateError(f"the state dict has a sampler's state, and {type(self._sampler).__name__} takes none")

    def _word(self) -> str:
        """The order by name, and what it depends on beside its data."""
        if self._endless:
            return "endless"
        sampler = self._sampler
        if not self._known:
            return "other" if self._ranks() is None else "distributed"
        on = [getattr(sampler, name) for name in ("chunk_size", "resident") if hasattr(sampler, name)]
        if not on and self._length() not in (-1, getattr(sampler, "num_samples", -1)):
            on = [sampler.num_samples]
        return type(sampler).__name__ + "".join(f" {x}" for x in on)

    def _ranks(self) -> int | None:
        sampler = self._sampler
        return sampler.num_replicas if isinstance(sampler, DistributedSampler) else None

    def _length(self) -> int:
        """Of what is shuffled; -1 where the order does not depend on it."""
        if not self._known or not hasattr(self._sampler, "generator"):
            return -1
        return len(self._sampler.data_source)

    # -- and is written down

    def _sampler_state(self) -> Any:
        found = [note for note in self._given if note[0] <= self.next]
        if not found:
            opening = read(self._opening)
            if opening is None:
                return None
            return {"given": 0, "sampler": opening, "iterator": None, "ended": False}
        given, note, ended = found[-1]
        sampler, iterator = read(note)
        return {"given": given, "sampler": sampler, "iterator": iterator, "ended": ended}

    def _sampler_rng(self, how: str) -> dict[str, Any]:
        after = self._after
        if after is None or how == "stateful":
            return {}
        if self._known:
            if self._length() < 0:
                return {}
            name = "torch" if self._own is None else "generator"
            return {name: after.texts()[name]}
        if self._endless:
            # The dataset's own draws, where it has to be read again from the beginning.
            return {} if self.workers or self.task_seeds or self.live is not None else after.texts(self._draws())
        texts: dict[str, Any] = after.texts(self._first)
        if self._first is None:
            texts = {k: v for k, v in texts.items() if k == "generator"}  # the global one's is still as it is now
        if self._before is not None:
            moved = self._before.texts(after)
            if "torch" in moved and self._generator is None and not self.workers and _one_draw(self._before, after):
                del moved["torch"]  # by torch's base seed, not by the sampler
            if moved:
                texts["before"] = moved
        return texts


def over(s: State) -> bool:
    """Whether an iterable dataset has nothing left, and nothing to be told either."""
    return s.kind == "iterable" and s.finished and not any(p.state for p in s.parts)


def _with_its_draws(found: Iterator[Any]) -> Iterator[Any]:
    """The same indices, with whatever is drawn for the first of them drawn now."""
    head = next(found, END)
    return iter(()) if head is END else itertools.chain([head], found)


def _one_draw(before: Draws, after: Draws) -> bool:
    if before.torch is None or after.torch is None:
        return False
    generator = torch.Generator()
    generator.set_state(before.torch)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return bool(torch.equal(generator.get_state(), after.torch))
