"""Task seeds for random generators that the dataset, its transforms and the collate function hold.

A worker's generators in objects are seeded before each task from (base seed, epoch, task) and the path of each, as the
process-wide ones are. So batches do not depend on how many workers there are, and a resumed run has nothing to restore.
Of iterable datasets none is seeded: all workers have to agree on what such a dataset draws for its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .generators import Found, Watch, find_generators, get_state, path_number, seed_generator, set_state
from .seeding import seed_here, splitmix64, task_seed, unchanged

IDLE = 32  # walks that found nothing new; then only each sixteenth change is looked at
AGAIN = 64  # tasks that are run again for generators they made: a dataset that makes one for each sample makes them all


class ObjectSeeds:
    """The generators in objects of one process, or of one worker thread.

    Args:
        dataset, collate_fn: where they are looked for.
        shared: tells those that other threads use, too, which are left alone.
    """

    def __init__(self, dataset: Any, collate_fn: Any, shared: Callable[[], Found] | None = None) -> None:
        self._roots, self._shared = (dataset, collate_fn), shared
        self._places: dict[str, int] = {}  # path, and the id of the generator that was there
        self._exchanged: set[str] = set()
        self._idle = self._changes = self._again = 0
        self._found: Found = []
        self._numbered: list[tuple[int, Any]] = []
        self._walk()

    def _walk(self) -> bool:
        """Looks for generators. Returns whether there are some at new places, or another one where one was."""
        self._watch = Watch([], [], [])
        found = find_generators(*self._roots, watch=self._watch)
        if self._shared is not None and found:
            shared = {id(g) for _, g in self._shared()}
            found = [(path, g) for path, g in found if id(g) not in shared]
        for names, _, _ in self._watch.held:
            if names.get("_manual_random_state") is False:  # albumentations: it seeds itself by torch.initial_seed(),
                names["_manual_random_state"] = True  # in workers alone, unless its state was set by hand
        new = False
        for path, g in found:
            before = self._places.get(path)
            if before is None or (before != id(g) and path not in self._exchanged):
                new = True
                if before is not None:
                    self._exchanged.add(path)
            self._places[path] = id(g)
        self._found, self._numbered = found, [(path_number(path), g) for path, g in found]
        return new

    def seed(self, base_seed: int, epoch: int, task: int) -> None:
        """Seeds them for one task."""
        if self._numbered:
            seed = task_seed(base_seed, epoch, task)
            for number, generator in self._numbered:
                seed_generator(generator, splitmix64(seed ^ number))

    def appeared(self) -> bool:
        """To be asked after each task: whether it has made generators, or exchanged one for the first time. They had a
        state of their own, so the task is to be seeded and run again."""
        if not self._watch.changed():
            return False
        self._changes += 1
        if self._idle > IDLE and self._changes & 15:
            return False
        new = self._walk()
        self._idle = 0 if new else self._idle + 1
        self._again += new
        return new and self._again <= AGAIN

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Puts them back as they were, whatever is drawn inside."""
        states = [(g, get_state(g)) for _, g in self._found]
        try:
            yield
        finally:
            for g, state in states:
                set_state(g, state)


def run_here(own: ObjectSeeds | None, base_seed: int, epoch: int, task: int, run: Callable[[], Any]) -> Any:
    """Runs a task in the script's own process, with its random state. That of the script is the same afterwards."""
    place = base_seed, epoch, task
    if own is None:
        with unchanged():
            seed_here(*place)
            return run()
    out = _run_once(own, place, run)
    return _run_once(own, place, run) if own.appeared() else out


def _run_once(own: ObjectSeeds, place: tuple[int, int, int], run: Callable[[], Any]) -> Any:
    with unchanged(), own.unchanged():
        seed_here(*place)
        own.seed(*place)
        return run()
