"""Where an epoch is: the sampler's place, and what was delivered. It outlives the iterator and holds no worker."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data.graph_settings
from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _DatasetKind

from ..core.errors import StateError
from .replay import END, Sampling, over
from .rng import SavedGlobalRng, packed
from .stateful import alike, noted, put, read

if TYPE_CHECKING:
    from .state import Part, State


class Cursor(Sampling):
    """One epoch after another of one iterator.

    Args:
        index_sampler, generator, saved, shadow: as for ``Sampling``.

    Attributes:
        one_dataset: workers share it.
        lives_on, base_seed, shared_seed, epoch: as in ``State``, and so are those of ``Sampling``.
        ahead: tasks after ``next`` that are delivered.
        counts: batches delivered by each worker of an iterable dataset.
        turn: whose batch of an iterable dataset comes next.
        told: by worker, how many batches it had made, -1 for those of the epoch before, and the dataset's state then,
            pickled.
        finished: the epoch is over.
        shown: where the consumer is, if somebody between it and the iterator took more (``mark``); else None.
    """

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        saved: State | None = None,
        shadow: SavedGlobalRng | None = None,
    ) -> None:
        super().__init__(index_sampler, generator, saved, shadow)
        self.one_dataset = False
        self.lives_on = False
        self.base_seed, self.shared_seed, self.epoch = 0, None, -1
        self.len_called: int | None = None
        self.counts: list[int] = []
        self.told: dict[int, tuple[int, bytes | None]] = {}
        self.shown: Cursor | None = None
        self.turn, self.finished = 0, False
        self.ahead: set[int] = set()

    def prepare(self) -> None:
        """torch is about to call ``iter`` on the sampler."""
        self.shown = None
        self.next = self.turn = 0
        self.ahead = set()
        self.finished = False
        super().prepare()
        self.counts = [0] * len(self.counts)
        if self.kind == "map":
            return  # who asks by index has no beginning: what was told last still holds
        self.told = {w: (-1, raw) for w, (_, raw) in self.told.items() if raw is not None}

    # -- an iterator begins

    def adopt(self, it: Any) -> None:
        """Takes torch's seeds from its iterator; or gives it those of the saved run, and a datapipe the shared one."""
        self.kind = "iterable" if it._dataset_kind == _DatasetKind.Iterable else "map"
        if self.saved is not None:
            it._base_seed, it._shared_seed = self.saved.base_seed, self.saved.shared_seed
            if isinstance(it._dataset, IterDataPipe) and it._shared_seed is not None:
                shared = torch.Generator()
                shared.manual_seed(it._shared_seed)
                it._dataset = torch.utils.data.graph_settings.apply_random_seed(it._dataset, shared)
        self.base_seed, self.shared_seed = int(it._base_seed), it._shared_seed

    def parts(self, there: int) -> tuple[Part, ...]:
        """The saved run's parts, one for each of ``there``.

        Raises:
            StateError: the state is another kind of loader's, or its parts cannot be divided so.
        """
        s = self.saved
        assert s is not None
        self._check(s)
        if over(s):
            return ()
        if not s.parts or len(s.parts) == there:
            return s.parts
        if s.kind == "iterable":
            raise StateError(
                f"the state dict is of an iterable dataset in {len(s.parts)} parts, one a worker, and the main process "
                "has one: num_workers=1 or more"
            )
        if not all(alike(p.state, s.parts[0].state) for p in s.parts):
            raise StateError(
                f"the state dict has the states of {len(s.parts)} workers' datasets, which differ, and now there are "
                f"{there}: num_workers={len(s.parts)}"
            )
        return s.parts[:1] * there

    # -- an epoch begins

    def begin(self, theirs: Iterator[Any]) -> Iterator[Any]:
        """The indices of an epoch.

        Args:
            theirs: what torch got from the sampler.
        """
        saved, self.saved = self.saved, None
        if saved is not None:
            return self._resume(saved)
        return self._begin(theirs)

    def _resume(self, s: State) -> Iterator[Any]:
        self._check(s)
        self.next, self.ahead = s.next, set(s.ahead)
        self.turn, self.len_called = s.turn, s.len_called
        if s.kind == "iterable":
            self.told = {w: (p.at, None if p.state is None else pickle.dumps(p.state)) for w, p in enumerate(s.parts)}
            self.counts = [p.count for p in s.parts]
        else:
            self.told = {w: (0, None if p.state is None else pickle.dumps(p.state)) for w, p in enumerate(s.parts)}
        return self._go_on(s)

    def go_to_end(self) -> None:
        """Leaves the sampler as it was at the end of the saved epoch."""
        s, self.saved = self.saved, None
        assert s is not None
        self._check(s)
        if self._endless:
            return
        if next(self._resume(s), END) is not END and s.sampler_state is not None:
            put(self._sampler, s.sampler_state["sampler"], "sampler")  # its end is the next one's beginning

    # -- and is followed

    def take(self, indices: Iterator[Any]) -> Any:
        """The indices of the next task, where each is done when it is asked for.

        Raises:
            StopIteration: the epoch is over.
        """
        try:
            found = next(indices)
            while self.next in self.ahead:  # delivered before the run was taken up again
                self.next += 1
                found = next(indices)
        except StopIteration:
            self.finished = True
            raise
        return found

    def pass_over(self, task: int) -> None:
        """A task is delivered before one that is due."""
        if len(self.ahead) > 1024:
            self.ahead = {t for t in self.ahead if t >= self.next}
        self.ahead.add(task)

    def end(self, task: int) -> None:
        """The epoch is over; this task would have been the next."""
        self.next, self.finished = task, True

    def tell(self, worker: int, at: int, state: bytes | None) -> None:
        """What a worker says beside a batch that is delivered now."""
        if state is not None:
            self.told[0 if self.one_dataset else worker] = at, state

    def mark(self) -> Cursor:
        """Where it is now, which later batches do not change."""
        if self.shown is not None:
            return self.shown
        here = copy.copy(self)
        here.ahead, here.counts, here.told = set(self.ahead), list(self.counts), dict(self.told)
        here._given = deque(self._given)
        if self.live is not None:
            here.live = functools.partial(read, noted(self.live))
        return here

    # -- and is written down

    def save(self) -> State:
        """Where it is now."""
        from .state import State  # for those who save

        if self.shown is not None:
            return self.shown.save()
        task, taken_before = self._from
        due, ahead = self._place()
        ranks = self._ranks()
        world = None if ranks is None else (self._base, ranks, int(self._sampler.epoch))
        sampler_state = self._sampler_state()
        how = self._word() if sampler_state is None else "stateful"
        rng = self._sampler_rng(how)
        fresh = self._first is None and how == "other"
        draws = self._generator is None or "torch" in rng or fresh  # from torch's global generator
        return State(
            kind=self.kind,
            epoch=max(0, self.epoch),
            next=due,
            ahead=ahead,
            samples=taken_before + (due - task) * (self._size or 1),
            finished=self.finished,
            lives_on=self.lives_on,
            workers=self.workers,
            task_seeds=self.task_seeds,
            base_seed=self.base_seed,
            shared_seed=self.shared_seed,
            length=self._length(),
            sampler=how,
            sampler_rng=rng,
            sampler_state=sampler_state,
            world=world,
            generator=None if self._generator is None else packed(self._generator.get_state()),
            torch_rng=packed(self.shadow.now()) if draws else None,
            turn=self.turn,
            parts=self._parts(),
            len_called=self.len_called,
            batch_size=self._size,
        )

    def _place(self) -> tuple[int, tuple[int, ...]]:
        """The first task that is not delivered, and those after it that are. Whoever saves may be another thread than
        the one that takes batches."""
        due, ahead = -1, set[int]()
        while due != self.next:
            due = self.next
            ahead = set(self.ahead)
        while due in ahead:
            due += 1
        return due, tuple(sorted(t for t in ahead if t > due))

    def _parts(self) -> tuple[Part, ...]:
        from .state import Part

        live = None if self.live is None else self.live()
        if self.kind == "iterable":
            counts = self.counts or [self.next]
            if not self.workers:
                return (Part(self.next, self.next if live is not None else 0, live),)
            found = [(c, *self.told.get(w, (0, None))) for w, c in enumerate(counts)]
            return tuple(Part(c, min(at, c), read(raw)) for c, at, raw in found)
        if live is not None:
            return (Part(0, 0, live),)
        if not self.told:
            return ()
        if self.one_dataset:
            raw = self.told.get(0, (0, None))[1]
            return () if raw is None else (Part(0, 0, read(raw)),)
        raws = [self.told.get(w, (0, None))[1] for w in range(self.workers)]
        return tuple(Part(0, 0, read(raw)) for raw in raws)
