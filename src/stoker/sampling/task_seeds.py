"""Task seeds for random generators held by the dataset, its transforms and the collate function.

Before each task, a worker seeds each generator from (base seed, epoch, task) and its path, as it does the process-wide
ones. So batches do not depend on the number of workers, and a resumed run has nothing to restore. Generators of
iterable datasets are not seeded, because all workers must agree on what such a dataset draws for its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..core.random_state import Generator, preserved
from .generators import AwaitedGenerator, Found, find_generators, path_number, seed_generator
from .seeding import seed_here, splitmix64, task_seed

T = TypeVar("T")
VAIN_WALKS = 32  # after this many walks without a new generator, only every sixteenth change triggers a walk
MAX_RERUNS = 64  # tasks that are run again because they made generators: some datasets make one for each sample


class ObjectSeeds:
    """The generators in objects of one process, or of one worker thread. ``shared`` returns those that other threads
    also use, which are not seeded."""

    def __init__(self, dataset: object, collate_fn: object, shared: Callable[[], Found] | None = None) -> None:
        self._roots = dataset, collate_fn
        self._shared = shared
        self._places: dict[str, int] = {}  # by path, the id of the generator last found there
        self._exchanged: set[str] = set()  # paths at which the generator was once replaced
        self._vain_walks = 0
        self._changes = 0
        self._reruns = 0
        self.generators: list[Generator] = []
        self._numbered: list[tuple[int, Generator]] = []
        self._walk()

    def _walk(self) -> bool:
        """Finds generators. Returns whether one is at a new path, or was replaced for the first time."""
        self._watch = AwaitedGenerator([], [], [])
        found = find_generators(*self._roots, watch=self._watch)
        if self._shared is not None and found:
            shared = {id(g) for _, g in self._shared()}
            found = [(path, g) for path, g in found if id(g) not in shared]
        for names, _, _ in self._watch.held:
            if names.get("_manual_random_state") is False:  # albumentations seeds itself from torch.initial_seed(),
                names["_manual_random_state"] = True  # only in workers, unless its state was set manually
        new = False
        for path, g in found:
            before = self._places.get(path)
            if before is None or (before != id(g) and path not in self._exchanged):
                new = True
                if before is not None:
                    self._exchanged.add(path)
            self._places[path] = id(g)
        self.generators = [g for _, g in found]
        self._numbered = [(path_number(path), g) for path, g in found]
        return new

    def seed(self, base_seed: int, epoch: int, task: int) -> None:
        if self._numbered:
            seed = task_seed(base_seed, epoch, task)
            for number, generator in self._numbered:
                seed_generator(generator, splitmix64(seed ^ number))

    def appeared(self) -> bool:
        """Whether the last task made or replaced generators, and so must be seeded and run again."""
        if not self._watch.changed():
            return False
        self._changes += 1
        if self._vain_walks > VAIN_WALKS and self._changes & 15:
            return False
        new = self._walk()
        self._vain_walks = 0 if new else self._vain_walks + 1
        self._reruns += new
        return new and self._reruns <= MAX_RERUNS


def run_here(own: ObjectSeeds | None, base_seed: int, epoch: int, task: int, run: Callable[[], T]) -> T:
    """Runs a task in the training process with the task's random state, and restores the script's."""
    place = base_seed, epoch, task
    out = _run_once(own, place, run)
    return _run_once(own, place, run) if own is not None and own.appeared() else out


def _run_once(own: ObjectSeeds | None, place: tuple[int, int, int], run: Callable[[], T]) -> T:
    with preserved(*(() if own is None else own.generators)):
        seed_here(*place)
        if own is not None:
            own.seed(*place)
        return run()
