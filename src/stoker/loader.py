"""DataLoader: torch's contract with another engine behind ``_get_iterator``, plus ``num_workers="auto"``.

On systems other than Linux torch's own iterators stand behind the same class.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import dataloader as torch_loader
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.sampler import Sampler

from . import machine
from .errors import BudgetError, StokerWarning, UsageError
from .gather import Gather
from .metrics import LoaderMetrics
from .objects import big
from .options import AutoWorkers, Budget, Measured, parse_bytes
from .source import FeistelSampler, order

logger = logging.getLogger(__name__)
T_co = TypeVar("T_co", covariant=True)
LEASE_SHARE = 4  # the consumer may keep a quarter of the granted memory in slots; beyond that batches are copied out
FEISTEL = "feistel"
SUPPORTED = sys.platform == "linux"
AHEAD = 8  # tasks in flight per worker with "auto" for both; docs/notes/stragglers.md
METHODS = ("process", "thread", "auto")
BIG_BYTES = 64 << 20  # of Python objects in one container; what a worker may copy without being worth a word
WORKER_BYTES = 32 << 20  # what a forked worker takes before any has been weighed
if SUPPORTED:
    from .iterators import PoolIter
    from .workers.draws import Noticed
    from .workers.thread import refuse
_TORCH_HAS_IN_ORDER = "in_order" in torch_loader.DataLoader.__init__.__code__.co_varnames  # torch >= 2.6


class LoaderState:
    """What stoker keeps for one loader between its iterators; beside the loader, so it is neither copied nor pickled.

    Attributes:
        arenas: shared memory of the last workers, warm.
        metrics: the loader's numbers.
        measured: what ``num_workers="auto"`` measured, once it has (``tune.probe.Measured``).
        method: what ``worker_method="auto"`` measured, and why, once it has.
        noticed: draws from process-wide random generators in worker threads.
        iterators: those that are alive.
        controller: what changes the count of ``num_workers="auto"`` while an epoch runs.
        advised: its dataset has been looked through for lists that fork copies.
        hold: the count was set by ``resize`` and is not to be tuned.
        rebuild: ``resize`` wants other workers in the next epoch.
    """

    def __init__(self) -> None:
        self.arenas: list[Any] = []
        self.metrics = LoaderMetrics()
        self.measured: Any = None
        self.method: tuple[str, str] | None = None
        self.noticed = Noticed() if SUPPORTED else None
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self.controller: Any = None
        self.advised = False
        self.hold = self.rebuild = False


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


def budget(loader: Any = None) -> Budget:
    """What a loader's transport may take: a share of the memory that this process is granted, or what its user says."""
    granted = machine.memory_granted()
    asked = getattr(loader, "budget", None)
    if asked is None:
        return Budget(lease_bytes=granted // LEASE_SHARE, flight_bytes=granted // LEASE_SHARE)
    nbytes = parse_bytes(asked, granted)
    return Budget(lease_bytes=nbytes, flight_bytes=nbytes, strict=True)


def get_iterator(loader: Any) -> Any:
    """What stands behind ``_get_iterator``: torch's inline iterator for 0 workers, stoker's workers otherwise."""
    if loader.num_workers == 0 or not SUPPORTED:
        it: Any = _torch_get_iterator(loader)
        if loader.num_workers == 0:
            it._sampler_iter = order(it._index_sampler) or it._sampler_iter
            if Gather.fits(it._dataset, it._collate_fn, it._auto_collation):
                it._dataset_fetcher.fetch = Gather(it._dataset, it._dataset_fetcher.fetch)
        return it
    state = state_of(loader)
    limits = budget(loader)
    method = _method(loader, state, limits)
    if isinstance(loader.num_workers, AutoWorkers) and state.measured is None:
        from .tune import probe

        state.measured = probe.measure(loader, limits, method)
        loader.num_workers = AutoWorkers(state.measured.workers)
    if not isinstance(loader.num_workers, AutoWorkers):
        loader.check_worker_number_rationality()
    if method == "process" and not state.advised and isinstance(loader, DataLoader):
        state.advised = True
        _advise(loader.dataset)
    it = PoolIter(loader, limits, state.arenas, state.metrics, state.noticed if method == "thread" else None)
    state.iterators.add(it)
    if isinstance(loader.num_workers, AutoWorkers) and loader._dataset_kind == _DatasetKind.Map and not state.hold:
        it.tune(_tuner(loader, state))
    return it


def _advise(dataset: Any) -> None:
    """Names what each worker will copy bit by bit."""
    for found in big(dataset, BIG_BYTES):
        warnings.warn(
            f"{found.path} is {found.words}, about {found.nbytes >> 20:,} MB. Each worker process copies it page by "
            f"page as it reads, because a look at an object writes its reference count. {found.path} = "
            f"stoker.share({found.path}) keeps it in one buffer that all share.",
            StokerWarning,
            stacklevel=5,
        )


def _tuner(loader: Any, state: LoaderState) -> Callable[[int], int | None]:
    """What changes the count while an epoch runs."""
    from .tune.online import Controller

    def most() -> int:
        m = state.metrics
        cores = machine.cores_granted()
        busy = m.cpu_ns >= (m.fetch_ns + m.collate_ns + m.transport_ns) // 2
        each = max(m.worker_pss.values(), default=WORKER_BYTES)
        return min(cores if busy else 4 * cores, max(1, machine.workers_bound(each)[0]))

    if state.controller is None:
        state.controller = Controller(int(loader.num_workers), most, measured=bool(state.measured.rates))
    controller = state.controller
    controller.begin(0)
    ref = weakref.ref(loader)

    def step(waited_ns: int) -> int | None:
        decision = controller.step(waited_ns)
        loader = ref()
        if decision is None or loader is None or state.hold:
            return None
        logger.info("%s", decision.reason)
        state.metrics.decisions.append(decision.reason)
        loader.num_workers = AutoWorkers(decision.value)
        return int(decision.value)

    return step


def _method(loader: Any, state: LoaderState, limits: Budget) -> str:
    """The kind of workers; "auto" is measured once."""
    asked: str = getattr(loader, "worker_method", "process")
    if asked != "auto":
        return asked
    if state.method is None:
        from .tune.method import choose

        state.method = choose(loader, limits)
        logger.info("worker_method=%r: %s", *state.method)
    return state.method[0]


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
        worker_method: "process", "thread" or "auto". Threads share one dataset, start at once and pickle nothing; they
            pay where samples are made by code that releases the GIL. ``get_worker_info().rng`` has their random
            generators. "auto" measures both when the first iterator is made and says why in the log and in
            ``stoker run``'s report; it takes processes where threads would not be safe or reproducible.
        budget: memory for batches that are made ahead, and as much again for those that the consumer keeps: bytes,
            ``"4GB"``, or a share of the memory granted (0.5). None: a quarter of the memory granted for each.
        batch_size, sampler, batch_sampler, collate_fn, pin_memory, drop_last, timeout (s), worker_init_fn,
            multiprocessing_context, generator, prefetch_factor (batches per worker), persistent_workers,
            pin_memory_device, in_order: torch's.

    Raises:
        ValueError, TypeError: torch's, for what torch refuses.
        UsageError: another word for ``shuffle`` or ``worker_method``, a ``budget`` that is none, a dataset that says
            it is not thread-safe.
        BudgetError: when iterated, a batch larger than ``budget``.

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
        worker_method: str = "process",
        budget: int | float | str | None = None,
    ) -> None:
        if worker_method not in METHODS:
            raise UsageError(f"worker_method={worker_method!r}: one of {', '.join(map(repr, METHODS))}")
        if worker_method == "thread":
            if multiprocessing_context is not None:
                raise UsageError(f'worker_method="thread" has no use for {multiprocessing_context=}: leave one out')
            if not SUPPORTED:
                raise UsageError(f'worker_method="thread" is not there on {sys.platform} yet, only on Linux')
            refuse(dataset)
        if budget is not None:
            parse_bytes(budget, machine.memory_granted())
        self.worker_method, self.budget = worker_method, budget
        self._ahead = AHEAD if prefetch_factor is None else 0
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

    def __iter__(self) -> Any:
        state = state_of(self)
        if state.rebuild:
            state.rebuild = False
            if self._iterator is not None:
                self._iterator._shutdown_workers()  # type: ignore[attr-defined]
                self._iterator = None
        return super().__iter__()

    def resize(self, num_workers: int) -> None:
        """Another number of workers, for instance from a callback.

        With ``num_workers="auto"`` and a map-style dataset it holds from the next task on, in the middle of an epoch,
        and no batch changes, nor their order: random state belongs to the task, not to the worker. New workers start in
        the background, those that go finish their task. ``"auto"`` leaves the count alone from then on. Otherwise it
        holds from the next epoch on, because workers have seeds (torch's) or parts of an iterable dataset of their own.

        Args:
            num_workers: at least 1.

        Raises:
            UsageError: no whole number, or less than 1.
            BudgetError: more than this machine has memory, descriptors or processes for.

        Example:
            >>> loader = DataLoader(range(8), num_workers="auto")
            >>> loader.resize(2)
            >>> int(loader.num_workers)
            2
        """
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise UsageError(f"resize({num_workers!r}): the number of workers is a whole number, at least 1")
        state = state_of(self)
        each = max(state.metrics.worker_pss.values(), default=WORKER_BYTES)
        most, why = machine.workers_bound(each)
        if num_workers > most:
            raise BudgetError(f"resize({num_workers}): at most {most} workers fit here: {why}")
        if not isinstance(self.num_workers, AutoWorkers):
            if self.num_workers == 0 and self.prefetch_factor is None:
                self.prefetch_factor = 2
            self.num_workers, state.rebuild = num_workers, True
            return
        self.num_workers = AutoWorkers(num_workers)
        state.measured = Measured(num_workers, reason=f"resize({num_workers})")
        state.hold = True
        if self._dataset_kind == _DatasetKind.Map:
            for it in list(state.iterators):
                it.resize(num_workers)
        else:
            state.rebuild = True


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
