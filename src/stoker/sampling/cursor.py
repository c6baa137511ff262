"""The position in an epoch: the sampler's, and the tasks delivered. Outlives the iterator and holds no worker."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data.graph_settings
from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..core.errors import StateError
from ..core.random_state import to_text
from ..core.types import Index
from .order import END
from .replay import SamplerReplay
from .stateful import alike, load_into, pickled_state, read_state

if TYPE_CHECKING:
    from .state import State, WorkerPart

MAX_DELIVERED_EARLY = 1024  # task numbers kept before those already passed are dropped


class Cursor(SamplerReplay):
    """The position of one iterator, epoch after epoch. Takes the arguments of ``SamplerReplay``."""

    def __init__(self, index_sampler: Any, generator: torch.Generator | None, saved: State | None = None) -> None:
        super().__init__(index_sampler, generator, saved)
        self.one_dataset = False  # all workers share one dataset
        # lives_on, base_seed, shared_seed, epoch, turn: as in ``State``
        self.lives_on = False
        self.base_seed = 0
        self.shared_seed: int | None = None
        self.epoch = -1
        # batches delivered by each worker of an iterable dataset; empty for other datasets
        self.delivered_by: list[int] = []
        # by worker, how many batches it had made (-1: at the end of the epoch before), and the dataset's pickled state
        self.worker_states: dict[int, tuple[int, bytes | None]] = {}
        # the training loop's position (``copy_position``), if something between it and the iterator has taken batches
        # ahead; else None
        self.shown: Cursor | None = None
        self.turn = 0
        self.finished = False  # the epoch is over
        self.division: tuple[int, int] | None = None  # as in ``State``; None: divided as in a new run
        self._parts_of: tuple[tuple[int, int], ...] | None = None  # shard and base seed of each part, if resumed
        self.delivered_early: set[int] = set()  # delivered tasks after ``next``
        # states of the sampler's generator, each with the number of tasks drawn when it entered that state
        self._draws: deque[tuple[int, torch.Tensor]] = deque()

    def prepare(self) -> None:
        """Prepares for torch's call of ``iter`` on the sampler."""
        self.undo_draws_ahead()
        super().prepare()
        self.shown = None
        self.next = 0
        self.turn = 0
        self.finished = False
        self.delivered_early = set()
        self.delivered_by = [0] * len(self.delivered_by)
        if self.kind == "map":
            return  # a map-style dataset has no beginning: its last state still holds
        self.worker_states = {w: (-1, raw) for w, (_, raw) in self.worker_states.items() if raw is not None}

    # -- an iterator begins

    def adopt_seeds(self, it: _BaseDataLoaderIter) -> None:
        """Takes torch's seeds from its iterator; gives a resumed iterator those of the saved run."""
        self.kind = "iterable" if it._dataset_kind == _DatasetKind.Iterable else "map"
        if self.saved is not None:
            it._base_seed = self.saved.base_seed
            it._shared_seed = self.saved.shared_seed
            if isinstance(it._dataset, IterDataPipe) and it._shared_seed is not None:
                shared = torch.Generator()
                shared.manual_seed(it._shared_seed)
                it._dataset = torch.utils.data.graph_settings.apply_random_seed(it._dataset, shared)
        self.base_seed = int(it._base_seed)
        self.shared_seed = it._shared_seed

    def saved_parts(self, n: int) -> tuple[WorkerPart, ...]:
        """Returns the saved run's parts, one for each of ``n``; empty if it has none. Raises StateError if the state is
        from another kind of loader, or its parts cannot be divided among ``n``."""
        s = self.saved
        assert s is not None
        self._check(s)
        if s.division is not None and (s.rank, s.ranks) != (self.rank, self.ranks):
            raise StateError(
                f"this process was rank {s.rank} of {s.ranks} when it loaded the state dict and is now rank "
                f"{self.rank} of {self.ranks}. Call init_process_group() before load_state_dict()"
            )
        if s.is_over:
            return ()
        if not s.parts or len(s.parts) == n:
            return s.parts
        if s.kind == "iterable":
            raise StateError(
                f"the state dict was saved with an iterable dataset in {len(s.parts)} parts, one per worker, but the "
                "main process can only read one. Set num_workers to 1 or more"
            )
        if not all(alike(p.state, s.parts[0].state) for p in s.parts):
            raise StateError(
                f"the state dict has different dataset states for {len(s.parts)} workers, but this loader has {n}. "
                f"Set num_workers={len(s.parts)}"
            )
        return s.parts[:1] * n

    # -- an epoch begins

    def begin(self, torch_iterator: Iterator[Index]) -> Iterator[Index]:
        """Returns the indices of an epoch; ``torch_iterator`` is the iterator that torch got from the sampler."""
        saved, self.saved = self.saved, None
        if saved is not None:
            indices = self._resume(saved)
        else:
            self._rng_after_iter = None if self._known and self._shuffled_length() < 0 else self._capture_rng()
            indices = self._iterate(torch_iterator)
        generator = self._sampler_generator
        # With torch's seeds, the number of batches drawn ahead affects the next epoch, as it does in torch.
        return indices if generator is None or not self.task_seeds else self._note_draws(indices, generator)

    def _resume(self, s: State) -> Iterator[Index]:
        self._check(s)
        self.next = s.next
        self.delivered_early = set(s.ahead)
        self.turn = s.turn
        self.worker_states = {}
        self.division = s.division
        self._parts_of = None
        if s.division is not None:
            self._parts_of = tuple((int(p.shard or 0), int(p.base_seed or 0)) for p in s.parts)
        iterable = s.kind == "iterable"
        for worker, part in enumerate(s.parts):
            pickled = None if part.state is None else pickle.dumps(part.state)
            self.worker_states[worker] = part.at if iterable else 0, pickled
        if iterable:
            self.delivered_by = [p.count for p in s.parts]
        return self._resume_order(s)

    def go_to_end(self) -> None:
        """Puts the sampler into its state at the end of the saved epoch."""
        s, self.saved = self.saved, None
        assert s is not None
        self._check(s)
        if self._endless:
            return
        if next(self._resume(s), END) is not END and s.sampler_state is not None:
            load_into(self._sampler, s.sampler_state["sampler"], "sampler")  # its end is the next epoch's beginning

    # -- and is followed

    def _note_draws(self, indices: Iterator[Index], generator: torch.Generator) -> Iterator[Index]:
        """Yields the same indices, and records the tasks at which the sampler's generator moves: 4 us per task."""
        self._draws = draws = deque([(self._start.task, generator.get_state())])
        for tasks, found in enumerate(itertools.chain(indices, [END]), self._start.task + 1):
            state = generator.get_state()
            if not torch.equal(state, draws[-1][1]):
                while len(draws) > 1 and draws[1][0] <= (self.shown or self).next:
                    draws.popleft()
                draws.append((tasks, state))
            if found is END:
                return
            yield found

    def undo_draws_ahead(self) -> None:
        """Rewinds the sampler's generator before another epoch, if this one was left early.

        The generator returns to its state at the last delivered batch, because how far workers are ahead is chance. If
        other code has moved it, it stays.
        """
        draws, self._draws = self._draws, deque()
        position, generator = self.shown or self, self._sampler_generator
        if position.finished or generator is None or not draws or not torch.equal(generator.get_state(), draws[-1][1]):
            return
        generator.set_state(next(state for tasks, state in reversed(draws) if tasks <= position.next))

    def take(self, indices: Iterator[Index]) -> Index:
        """Returns the indices of the next task. Raises StopIteration when the epoch is over."""
        try:
            found = next(indices)
            while self.next in self.delivered_early:  # delivered before the run was resumed
                self.next += 1
                found = next(indices)
        except StopIteration:
            self.finished = True
            raise
        return found

    def deliver_early(self, task: int) -> None:
        """Records that a task is delivered before an earlier one."""
        if len(self.delivered_early) > MAX_DELIVERED_EARLY:
            self.delivered_early = {t for t in self.delivered_early if t >= self.next}
        self.delivered_early.add(task)

    def record_worker_state(self, worker: int, batches: int, pickled: bytes | None) -> None:
        """Records the dataset state that a worker sent with the batch being delivered."""
        if pickled is not None:
            self.worker_states[0 if self.one_dataset else worker] = batches, pickled

    def copy_position(self) -> Cursor:
        """Returns a copy of the present position, which later batches do not change."""
        if self.shown is not None:
            return self.shown
        position = copy.copy(self)
        position.delivered_early = set(self.delivered_early)
        position.delivered_by = list(self.delivered_by)
        position.worker_states = dict(self.worker_states)
        position._sampler_states = deque(self._sampler_states)
        if self.live_state is not None:
            position.live_state = functools.partial(read_state, pickled_state(self.live_state))
        return position

    # -- and is written down

    def save(self) -> State:
        from .state import State  # imported late: not every run is saved

        if self.shown is not None:
            return self.shown.save()
        due, early = self._position()
        ranks = self._ranks()
        world = None if ranks is None else (self._samples_before_split, ranks, int(self._sampler.epoch))
        sampler_state = self._sampler_state()
        order_name = self._order_name() if sampler_state is None else "stateful"
        rng = self._sampler_rng(order_name)
        not_drawn_yet = self._rng_after_first is None and order_name == "other"
        from_global = self._generator is None or "torch" in rng or not_drawn_yet
        return State(
            kind=self.kind,
            epoch=max(0, self.epoch),
            next=due,
            ahead=early,
            samples=self._start.samples + (due - self._start.task) * (self.batch_size or 1),
            finished=self.finished,
            lives_on=self.lives_on,
            workers=self.workers,
            task_seeds=self.task_seeds,
            base_seed=self.base_seed,
            shared_seed=self.shared_seed,
            length=self._shuffled_length(),
            sampler=order_name,
            sampler_rng=rng,
            sampler_state=sampler_state,
            world=world,
            generator=None if self._generator is None else _generator_text(self._generator),
            torch_rng=_generator_text(torch.default_generator) if from_global else None,
            turn=self.turn,
            parts=self._parts(),
            batch_size=self.batch_size,
            rank=self.rank,
            ranks=self.ranks,
            division=self.division or (self.ranks, self.workers) if self.kind == "iterable" else None,
        )

    def _position(self) -> tuple[int, tuple[int, ...]]:
        """Returns the first undelivered task, and the delivered ones after it. Another thread may take batches
        meanwhile."""
        due, early = -1, set[int]()
        while due != self.next:
            due = self.next
            early = set(self.delivered_early)
        while due in early:
            due += 1
        return due, tuple(sorted(t for t in early if t > due))

    def _parts(self) -> tuple[WorkerPart, ...]:
        from .state import WorkerPart

        live = None if self.live_state is None else self.live_state()
        if self.kind == "iterable":
            if not self.workers:
                found = [(self.next, self.next if live is not None else 0, live)]
            else:
                noted = [self.worker_states.get(w, (0, None)) for w in range(len(self.delivered_by))]
                found = [
                    (n, min(at, n), read_state(raw)) for n, (at, raw) in zip(self.delivered_by, noted, strict=True)
                ]
            return tuple(WorkerPart(*part, *of) for part, of in zip(found, self._shards(), strict=False))
        if live is not None:
            return (WorkerPart(0, 0, live),)
        if not self.worker_states:
            return ()
        states = [self.worker_states.get(w, (0, None))[1] for w in range(1 if self.one_dataset else self.workers)]
        if self.one_dataset and states == [None]:
            return ()
        return tuple(WorkerPart(0, 0, read_state(raw)) for raw in states)

    def _shards(self) -> tuple[tuple[int, int], ...]:
        """Returns shard and base seed of each part here."""
        if self._parts_of is not None:
            return self._parts_of
        return tuple((i * self.ranks + self.rank, self.base_seed) for i in range(max(1, self.workers)))


def _generator_text(generator: torch.Generator) -> str:
    return to_text(generator.get_state().numpy().tobytes())
