"""DataLoader: torch's contract with another engine behind ``_get_iterator``, plus ``num_workers="auto"``.

On systems other than Linux torch's own iterators stand behind the same class.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import dataloader as torch_loader
from torch.utils.data.sampler import Sampler

from . import machine
from .errors import UsageError
from .gather import Gather
from .metrics import LoaderMetrics
from .options import AutoWorkers, Budget
from .source import FeistelSampler, order

T_co = TypeVar("T_co", covariant=True)
LEASE_SHARE = 4  # the consumer may keep a quarter of the granted memory in slots; beyond that batches are copied out
FEISTEL = "feistel"
SUPPORTED = sys.platform == "linux"
if SUPPORTED:
    from .iterators import ProcessIter
_TORCH_HAS_IN_ORDER = "in_order" in torch_loader.DataLoader.__init__.__code__.co_varnames  # torch >= 2.6


class LoaderState:
    """What stoker keeps for one loader between its iterators; beside the loader, so it is neither copied nor pickled.

    Attributes:
        arenas: shared memory of the last workers, warm.
        metrics: the loader's numbers.
        measured: what ``num_workers="auto"`` measured, once it has (``tune.probe.Measured``).
    """

    def __init__(self) -> None:
        self.arenas: list[Any] = []
        self.metrics = LoaderMetrics()
        self.measured: Any = None


_states: weakref.WeakKeyDictionary[Any, LoaderState] = weakref.WeakKeyDictionary()


def state_of(loader: Any) -> LoaderState:
    """The state of any loader, torch's own included."""
    try:
        state = _states.get(loader)
        if state is None:
            state = _states[loader] = LoaderState()
    except TypeError:  # a subclass that compares by value cannot be hashed
        state = loader.__dict__.setdefault("_stoker_state", LoaderState())
    return state


def budget() -> Budget:
    """The transport's budget: a share of the memory that this process is granted."""
    return Budget(lease_bytes=machine.memory_granted() // LEASE_SHARE)


def get_iterator(loader: Any) -> Any:
    """What stands behind ``_get_iterator``: torch's inline iterator for 0 workers, stoker's processes otherwise."""
    if loader.num_workers == 0 or not SUPPORTED:
        it: Any = _torch_get_iterator(loader)
        if loader.num_workers == 0:
            it._sampler_iter = order(it._index_sampler) or it._sampler_iter
            if Gather.fits(it._dataset, it._collate_fn, it._auto_collation):
                it._dataset_fetcher.fetch = Gather(it._dataset, it._dataset_fetcher.fetch)
        return it
    state = state_of(loader)
    if isinstance(loader.num_workers, AutoWorkers) and state.measured is None:
        from .tune import probe

        state.measured = probe.measure(loader, budget())
        loader.num_workers = AutoWorkers(state.measured.workers)
    if not isinstance(loader.num_workers, AutoWorkers):
        loader.check_worker_number_rationality()
    return ProcessIter(loader, budget(), state.arenas, state.metrics)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in for ``torch.utils.data.DataLoader`` whose batches cross fewer copies.

    Every argument, check, message and default is torch's; so are order, types, strides, seeds and random augmentation,
    to the bit. Batches are views on shared memory that is theirs alone: writable, and alive as long as they are held.

    Args:
        dataset: map- or iterable-style dataset.
        num_workers: as torch's; or ``"auto"``: measured when the first iterator is made (map-style datasets with one of
            torch's samplers), else a first guess: as many as cores are granted, and one for an iterable dataset, which
            only itself knows how to shard. With ``"auto"`` random state is set per task, so the count cannot change a
            batch. The attribute reads as an int, before measuring as the first guess.
        shuffle: as torch's; or ``"feistel"``: a ``FeistelSampler``, for datasets so long that torch's order, drawn as a
            whole, takes seconds and gigabytes.
        batch_size, sampler, batch_sampler, collate_fn, pin_memory, drop_last, timeout (s), worker_init_fn,
            multiprocessing_context, generator, prefetch_factor (batches per worker), persistent_workers,
            pin_memory_device, in_order: torch's.

    Raises:
        ValueError, TypeError: torch's, for what torch refuses.
        UsageError: another word for ``shuffle``.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=3, num_workers=1)
        >>> [x.tolist() for (x,) in loader]
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | str | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | str = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        if isinstance(num_workers, str) and num_workers == "auto":
            num_workers = AutoWorkers(first_guess(dataset))
        if isinstance(shuffle, str) and shuffle != FEISTEL:
            raise UsageError(f'shuffle takes True, False, None or "{FEISTEL}", not {shuffle!r}')
        batch_size, asked, sampler, batch_sampler = _once(batch_size, shuffle, sampler, batch_sampler)
        self._shuffle = shuffle
        newer = {"in_order": in_order} if _TORCH_HAS_IN_ORDER else {}
        super().__init__(
            dataset,
            batch_size,
            bool(asked) if isinstance(asked, str) else asked,
            sampler,
            batch_sampler,
            num_workers,  # type: ignore[arg-type]
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **newer,
        )
        if not _TORCH_HAS_IN_ORDER:
            self.in_order = in_order
        if asked == FEISTEL:
            # torch has made its own sampler, with all its checks; nobody has asked it for an index yet.
            object.__setattr__(self, "sampler", FeistelSampler(dataset, generator))  # type: ignore[arg-type]
            if self.batch_sampler is not None:
                self.batch_sampler.sampler = self.sampler  # type: ignore[attr-defined]
        if sampler is None:
            self.sampler._stoker_default = True  # type: ignore[attr-defined]
        if batch_sampler is None and self.batch_sampler is not None:
            self.batch_sampler._stoker_default = True  # type: ignore[attr-defined]

    @property
    def shuffle(self) -> bool | str | None:
        """What was asked for; the order itself is in ``sampler``."""
        return self._shuffle

    def _get_iterator(self) -> Any:
        return get_iterator(self)


def _once(batch_size: int | None, shuffle: Any, sampler: Any, batch_sampler: Any) -> tuple[Any, Any, Any, Any]:
    """The arguments that decide the order, each said once.

    A loader that is built again from another one's attributes gets the samplers which that one made beside the
    arguments it made them from. Only those are taken out; what a user contradicts stays torch's error.
    """
    if getattr(batch_sampler, "_stoker_default", False) and batch_sampler.sampler is sampler:
        batch_sampler = None
    if getattr(sampler, "_stoker_default", False):
        shuffle = None
        if batch_sampler is not None:
            sampler, batch_size = None, 1 if batch_size is None else batch_size
        elif isinstance(sampler, torch_loader._InfiniteConstantSampler):
            sampler = None
    return batch_size, shuffle, sampler, batch_sampler


def first_guess(dataset: Any) -> int:
    """Workers before anything was measured: one a core granted; one for an iterable dataset, which may not shard."""
    return 1 if isinstance(dataset, torch.utils.data.IterableDataset) else machine.cores_granted()


_torch_get_iterator = torch_loader.DataLoader._get_iterator
_installs = 0
_install_lock = threading.Lock()


def install() -> None:
    """Puts stoker's engine behind ``torch.utils.data.DataLoader`` itself, for code that makes its own loaders.

    Loaders that exist already are included from their next iterator on. Settings are left as they are. Calls nest:
    each wants its ``uninstall``.
    """
    global _installs
    with _install_lock:
        _installs += 1
        torch_loader.DataLoader._get_iterator = get_iterator  # type: ignore[method-assign, assignment]


def uninstall() -> None:
    """Takes one ``install`` back. Iterators that exist go on with the engine they have. Without an install: nothing."""
    global _installs
    with _install_lock:
        _installs = max(0, _installs - 1)
        if not _installs:
            torch_loader.DataLoader._get_iterator = _torch_get_iterator  # type: ignore[method-assign]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """``install`` for the length of a ``with`` block.

    Example:
        >>> with installed():
        ...     batches = list(torch.utils.data.DataLoader(range(4), num_workers=1))
    """
    install()
    try:
        yield
    finally:
        uninstall()
