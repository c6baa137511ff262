"""``Staged``: a dataset whose deterministic part is done once and kept, and whose random part is done every time."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..cache.folder import root
from ..cache.leaves import CacheError, foreign, take
from ..cache.store import Account
from ..cache.tiers import Tiers
from ..errors import StokerWarning, UsageError
from ..gather import Select
from ..objects import Look
from . import device
from .border import Split, Unjudged, map_style
from .chance import States
from .reach import reach
from .stores import budgets, new_store

TIERS = ("auto", "ram", "compressed", "disk", "device", None)
CHECK_S = 1.0  # between two looks, at least, at whether the dataset or prepare were changed
CHECK_SHARE = 500  # and so seldom that they take 0.2 % of the time


class Staged(Dataset[Any]):
    """A map-style dataset whose deterministic part is kept in memory that all workers share.

    The first epoch runs at the speed it would have had and fills the cache, from all workers of any kind; later ones
    take what is there. What is in stays in. With ``stoker.DataLoader`` a batch whose samples are all there, of one
    shape and without ``augment``, is one gather.

    Args:
        dataset: map-style; or a list of paths.
        prepare: deterministic, ``prepare(dataset[i])`` or ``prepare(path)``: what it returns is kept. Tensors, arrays,
            PIL images, numbers and strings in tuples, lists and dicts; anything else is kept pickled.
        augment: random, ``augment(prepared)``, run every time. Neither given: ``split`` finds both.
        augment_batch: random, ``augment_batch(batch)``, run once on each batch after it was collated; wants
            ``stoker.DataLoader``.
        cache: "ram": shared memory of this run. "compressed": the same, samples compressed without loss. "disk": mapped
            files, which the next run finds again. "auto": memory, compressed where the set does not fit otherwise and
            that is measured to pay; behind it, where ``cache_dir`` or ``$STOKER_CACHE`` is given, the disk. "device":
            "ram" until all samples are in; from the next epoch on ``stoker.DataLoader`` makes batches on the
            accelerator, if they are of one shape, nothing is augmented sample by sample, and half of its free memory is
            enough. None: no cache.
        cache_budget: bytes, ``"4GB"``, or a share of the memory granted, for the memory, or for the disk with
            ``cache="disk"``; None: half of what is free.
        cache_dir: where caches on disk lie; None: ``$STOKER_CACHE``, else ``stoker/staged`` among the user's caches.
        cache_key: whatever else the samples depend on, in words; another word begins another cache on disk.
        cache_content: source files are known by their content, not by size and time.

    Raises:
        UsageError: a dataset without a length, no border found, another word for ``cache``, a budget that is none.

    Example:
        >>> squares = Staged(list(range(8)), prepare=lambda i: torch.tensor(i * i))
        >>> [int(squares[i]) for i in range(4)], squares.account.filled
        ([0, 1, 4, 9], 4)
    """

    def __init__(
        self,
        dataset: Any,
        prepare: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
        *,
        augment_batch: Callable[[Any], Any] | None = None,
        cache: str | None = "auto",
        cache_budget: int | float | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_key: str = "",
        cache_content: bool = False,
    ) -> None:
        if cache not in TIERS:
            raise UsageError(f"cache={cache!r}: one of {', '.join(map(repr, TIERS))}")
        paths = isinstance(dataset, (list, tuple)) and bool(dataset) and isinstance(dataset[0], (str, os.PathLike))
        if paths and prepare is None:
            raise UsageError("Staged of paths wants prepare=: what to make of a path")
        map_style(dataset)
        self.dataset = dataset
        self.border: Split | None = None
        self._said = (prepare, augment)
        self.augment_batch = augment_batch
        self.cache = cache
        self._disk = None if cache_dir is None and "STOKER_CACHE" not in os.environ else Path(cache_dir or root())
        if cache == "disk":
            self._disk = self._disk or root()
        elif cache != "auto":
            self._disk = None
        self._budgets = budgets(cache_budget, cache, self._disk)
        self._owned: tuple[int, list[Any]] = (0, [])
        self._keyed = cache_key, cache_content
        self._store: Tiers | None = None
        self._there: device.Columns | None = None
        if cache == "device" and device.accelerator() is None:
            warnings.warn('cache="device": there is no accelerator, so it is "ram".', StokerWarning, stacklevel=2)
        self._ready()

    def _ready(self) -> None:
        """Looks at the dataset as it is now; nothing is kept yet."""
        prepare, augment = self._said
        if prepare is None:
            if augment is not None:
                prepare = _as_it_is
            else:
                self.border = Split(self.dataset)
                if self.cache != "compressed" and any(self._budgets):
                    self.border.fit(sum(self._budgets))
        if self.border is not None:
            self._prepare: Callable[[Any], Any] = self.border.prepare
            self._augment: Callable[[Any], Any] | None = None if self.border.exact else self.border.augment
        else:
            assert prepare is not None
            made = prepare
            self._prepare, self._augment = lambda i: made(self.dataset[i]), augment
        self.samples = len(self.dataset)
        self._look = Look((self.dataset, *self._said))
        self._next_look, self._fits = 0.0, True  # whoever is forked looks when it begins
        self._store, self._there = new_store(self), None

    def _key(self) -> tuple[dict[str, Any], list[list[Any]]]:
        """What the samples depend on, and the files they are made from."""
        from .key import key_of

        return key_of(self._walked[0], self._walked, self.samples, *self._keyed)

    @property
    def _walked(self) -> list[Any]:
        """What is done for a sample before anything random: the dataset, and ``prepare`` where there is one."""
        base = self.dataset if self.border is None else self.border._base
        return [base] if self._said[0] is None else [base, self._said[0]]

    # -- a dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if self.augment_batch is not None and torch.utils.data.get_worker_info() is not None:
            self._no_batch()
        return self._samples([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        if self.augment_batch is not None:
            self._no_batch()
        return self._samples(indices)

    def _no_batch(self) -> None:
        raise UsageError(
            "augment_batch is run once on each batch, and nobody does that here: it wants stoker.DataLoader (or "
            "stoker.install()) with a batch size, over this dataset or Subsets of it"
        )

    def __getattr__(self, name: str) -> Any:
        # .classes, .targets and whatever else scripts ask of their dataset
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __repr__(self) -> str:
        return f"<Staged {type(self.dataset).__name__}: {self.report}>"

    def _looked(self) -> Iterator[tuple[str, Any]]:
        """What a look at it takes in. See ``objects``."""
        yield from zip((".dataset", ".prepare", ".augment"), (self.dataset, *self._said), strict=True)
        yield ".augment_batch", self.augment_batch

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if get_spawning_popen() is None:
            state["_store"] = None  # its memory belongs to this run and its workers
        for made in ("_prepare", "_augment", "_look"):
            state.pop(made)
        state["_owned"], state["_there"] = (0, []), None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        store, border = self._store, self.border
        prepare, augment = self._said
        if border is not None:
            self._prepare, self._augment = border.prepare, None if border.exact else border.augment
        else:
            made = prepare or _as_it_is
            self._prepare, self._augment = lambda i: made(self.dataset[i]), augment
        self._look = Look((self.dataset, *self._said))
        self._next_look, self._fits = 0.0, True
        self._store = store if store is not None else new_store(self)

    # -- what people ask it

    @property
    def account(self) -> Account:
        """What is kept, in numbers."""
        if self._store is None:
            return Account(self.samples, 0, 0, 0, 0, 0.0, "no cache")
        return self._store.account

    @property
    def report(self) -> str:
        """What is kept, in words."""
        words = "no cache" if self._store is None else self._store.describe()
        there = self._there
        return words if there is None else f"{words}; {there.describe()}"

    # -- serving

    def _begin(self) -> None:
        """An epoch begins, in the parent: a dataset or transform that was changed since begins a new cache."""
        changes = self._changes()
        if not changes and len(self.dataset) == self.samples:
            return
        words = _plainly(changes) or "its length changed"
        warnings.warn(f"What was kept of the dataset is let go: {words}.", StokerWarning, stacklevel=4)
        self._ready()

    def _changes(self) -> list[str]:
        return self._look.changed((self.dataset, *self._said), added=True)

    def _current(self) -> Tiers | None:
        """The store, if it may be used here and now."""
        store = self._store
        if store is None or not store.usable:
            return None
        if time.monotonic() > self._next_look:
            began = time.monotonic()
            changes = self._changes()
            if changes and self._fits:
                words = "The dataset is another than the one that was kept, so nothing of it is served"
                warnings.warn(f"{words}: {_plainly(changes)}.", StokerWarning, stacklevel=6)
            self._fits = not changes
            now = time.monotonic()
            self._next_look = now + max(CHECK_S, CHECK_SHARE * (now - began))
        return store if self._fits else None  # else not what it was filled with; the next epoch begins a new one

    def _samples(self, indices: Sequence[Any]) -> list[Any]:
        """Samples, the random part included."""
        store = self._current()
        where = self.where(store, indices) if store is not None else None
        if store is None or where is None:
            return [self._whole(i) for i in indices]
        fresh = self._fresh(store, indices, where)
        if fresh is None:
            return [self._whole(i) for i in indices]
        at = where.tolist()
        prepared = [fresh[k] if k in fresh else store.read(at[k]) for k in range(len(at))]
        augment = self._augment
        return prepared if augment is None else [augment(x) for x in prepared]

    def where(self, store: Tiers, indices: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """Where the samples of a batch lie in the store; None for indices that are no numbers."""
        try:
            numbers = np.array(indices)
        except ValueError:
            return None
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            return None
        numbers = np.where(numbers < 0, numbers + self.samples, numbers)
        if (numbers < 0).any() or (numbers >= self.samples).any():
            return None  # the dataset knows what it says to that
        return store.where(numbers)

    def _whole(self, index: Any) -> Any:
        """A sample without the cache."""
        try:
            prepared = self._prepare(index)
        except Unjudged:
            return self.dataset[index]
        return prepared if self._augment is None else self._augment(prepared)

    def _fresh(self, store: Tiers, indices: Sequence[Any], where: np.ndarray[Any, Any]) -> dict[int, Any] | None:
        """Prepares what is not there and lets it in. By position; None when prepare turned out to be random."""
        misses = np.flatnonzero(where == 0).tolist()
        if not misses:
            return {}
        watched = _watched()
        states = States(self._generators()) if watched else None
        out: dict[int, Any] = {}
        kept: dict[int, Any] = {}
        spent = 0
        for k in misses:
            began = time.perf_counter_ns()
            try:
                out[k] = self._prepare(indices[k])
            except Unjudged:
                out[k] = self.dataset[indices[k]]  # then nothing is random, and a sample is kept whole or not at all
                continue
            spent += time.perf_counter_ns() - began
            try:
                words, leaves = take(out[k], dense=self._augment is None)
                what = foreign(words) if self.cache == "disk" else None
                if what is not None:
                    raise CacheError(
                        f"a sample has a {what}, which a file does not keep: tensors, arrays, pictures, numbers, words"
                    )
                kept[int(indices[k]) % self.samples] = words, leaves
            except CacheError as e:
                self._tell(store, str(e))
        if states is not None and self._moved(states, indices, misses):
            return None
        store.admit(kept, spent)
        return out

    def _moved(self, states: States, indices: Sequence[Any], misses: list[int]) -> bool:
        """Whether ``prepare`` draws: then nothing that it made is kept, and the batch begins anew."""
        moved = states.moved()
        if not moved:
            return False
        states.restore()
        for k in misses:  # again, for another thread may have drawn
            self._prepare(indices[k])
        again = states.moved()
        states.restore()
        if not again:
            return False
        assert self._store is not None
        self._tell(self._store, f"prepare draws from {moved} random generator, so its results are not the same twice")
        return True

    def _tell(self, store: Tiers, reason: str) -> None:
        if store.shut(reason):
            warnings.warn(f"Nothing is kept of the dataset: {reason}.", StokerWarning, stacklevel=6)

    def _generators(self) -> list[Any]:
        if self._owned[0] != os.getpid():
            self._owned = os.getpid(), [g for part in self._walked for g in reach(part).generators.values()]
        return self._owned[1]

    def _on_device(self, plain: bool) -> Select | None:
        """What makes batches on the accelerator, once everything is in; asked when an epoch begins, in the parent."""
        return device.select(self, plain) if self.cache == "device" else None

    def _is_there(self, select: Select) -> bool:
        """Whether this is what makes batches on the accelerator."""
        return self._there is not None and select == self._there.select

    def _stoker_batches(self, collate: Callable[[Any], Any], select: Any, plain: bool) -> Callable[[Any], Any]:
        """What makes batches of indices for stoker's loader. See ``serve.Batches``."""
        from .serve import Batches

        return Batches(self, collate, select, plain)


def _plainly(changes: list[str]) -> str:
    return "; ".join(c.removeprefix("dataset[0]").removeprefix(".") for c in changes[:3])


def _as_it_is(sample: Any) -> Any:
    return sample


def _watched() -> bool:
    """Whether this thread is the only one that may draw from the process' generators meanwhile."""
    info = torch.utils.data.get_worker_info()
    return getattr(info, "worker_method", "process") != "thread"
