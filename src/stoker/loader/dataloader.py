"""DataLoader: torch's contract with a different engine behind ``_get_iterator``, plus ``num_workers="auto"``."""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.utils.data
from torch.utils.data import dataloader as torch_loader
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.sampler import Sampler

from ..core import resources
from ..core.errors import BudgetError, UsageError
from ..core.options import AutoWorkers, Workers, worker_word
from ..core.types import Batch, Index, JsonObject, Sample
from ..device.prefetch import ahead, checked
from ..workers.faults import validate
from ..workers.faults.policy import QUARANTINE
from ..workers.read_threads import check as read_threads_check
from . import engine
from .adopt import AHEAD
from .arguments import SHUFFLES, auto_workers, check_own, once
from .engine import get_iterator
from .loader_state import state_of
from .takeover import follow

T_co = TypeVar("T_co", covariant=True)
_TORCH_HAS_IN_ORDER = "in_order" in torch_loader.DataLoader.__init__.__code__.co_varnames  # torch >= 2.6


if TYPE_CHECKING:
    _TorchDataLoader = torch.utils.data.DataLoader[T_co]
else:
    _TorchDataLoader = torch.utils.data.DataLoader  # how many type parameters it has depends on torch's version


class DataLoader(_TorchDataLoader, Generic[T_co]):  # type: ignore[type-arg]
    """A drop-in replacement for ``torch.utils.data.DataLoader`` whose batches are copied less often.

    Arguments, checks, messages and defaults are torch's; so are order, types, strides, seeds and random augmentation,
    bit for bit. Each batch is a view of shared memory of its own: writable, and valid for as long as it is held.

    Args:
        dataset: map- or iterable-style dataset.
        num_workers: as torch's; or ``"auto"``: starts with a first guess, the cores granted divided among the ranks of
            the node (one for an iterable dataset, because only the dataset knows how to shard itself). The number
            changes during an epoch; with tiny batches it drops to 0. ``"auto"`` sets random state per task, so the
            number never changes a batch. The attribute reads as an int.
        shuffle: as torch's; or ``"feistel"``: a ``FeistelSampler``, for datasets so long that drawing torch's
            permutation takes seconds and gigabytes.
        worker_method: "process" (alias "multiprocessing"), "thread" or "ray". Threads share one dataset, start at once
            and pickle nothing; they pay off if code that releases the GIL makes the samples. ``get_worker_info().rng``
            has their random generators. "ray", or "ray:HOST:PORT", starts processes here and, on each other node of a
            Ray cluster, as many as it has cores (docs/cluster.md). It sets random state per task, so batches are the
            same wherever they are made.
        budget: memory for prefetched batches, and the same again for batches that the consumer keeps: bytes, ``"4GB"``,
            or a share of the memory granted (0.5). None: a quarter of the memory granted for each.
        device: where batches are when they are returned; copied ahead, in parallel with computation
            (``stoker.to_device``). "cpu" has no effect. Requires ``pin_memory="auto"`` or True to overlap.
        transform_on_device: called with each batch on the device, on the copy stream.
        on_error: what to do with a sample that cannot be loaded (docs/faults.md). "raise": as torch. "skip": leave it
            out of the batch. "replace": use another sample that the sampler might have drawn, chosen by seed. Or a
            function of its index and the exception that returns a replacement, or None to leave it out.
        refill: with "skip": repeat other samples of the batch in place of those left out.
        max_errors: how many samples may fail before that is an error: a count, or a share of the dataset as a float.
            None: 1 % of the dataset, at least 10.
        quarantine: file that lists failed samples, one line of JSON each; None: no file.
        on_worker_death: "restart": replace a worker that dies; no batch changes, and a sample that kills its worker
            every time is handled by ``on_error``. "raise": torch's error. None: "restart" for worker processes and
            map-style datasets, "raise" otherwise.
        sample_timeout: seconds that a sample may take before its worker is killed and replaced. The sample is reported
            with its worker's stack and handled by ``on_error``. For worker processes only.
        debug: run everything in this process, whatever the number of workers, so that breakpoints stop and tracebacks
            are plain. An error names its sample, and is raised whatever ``on_error`` says. Random augmentation draws
            different numbers.
        read_threads: threads with which each worker process loads samples of a batch concurrently, for remote storage;
            "auto": as many as pay off if samples mostly wait (docs/far-storage.md). Batches stay bitwise the same.
            None: one sample after the other, except that ``stoker.Staged`` decides as with "auto"; 1: always one after
            the other.
        task_seeds: set random state before each task from (base seed, epoch, task), as with ``num_workers="auto"``.
            Random augmentation is then independent of the number and kind of workers, and of where a run was resumed;
            also without workers. It reaches generators that a map-style dataset and the collate function hold. See
            ``state_dict``.
        snapshot_every_n_steps: a worker reports the state of a dataset with a ``state_dict()`` once per this many of
            its batches. 0 or None: never; resuming a run then reads samples again.
        prefetch_factor: prefetched batches per worker, as torch's; with ``num_workers="auto"`` and None up to 8 while
            batches are small, so that a slow sample does not stall the others.
        pin_memory: as torch's; or "auto": on if there is an accelerator with memory of its own (docs/gpu.md).
        batch_size, sampler, batch_sampler, collate_fn, drop_last, timeout (s), worker_init_fn,
            multiprocessing_context, generator, persistent_workers, pin_memory_device, in_order: torch's.

    Raises:
        ValueError, TypeError: torch's, for arguments that torch rejects.
        UsageError: an unknown value of ``shuffle``, ``worker_method`` or ``on_error``, an invalid ``budget`` or
            ``max_errors``, or arguments that exclude each other.
        BudgetError: when iterated, a batch larger than ``budget``.
        SampleError: when iterated, more samples failed than ``max_errors`` allows.
        WorkerDiedError: when iterated, a sample that kills workers, or too many deaths.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=3, num_workers=1)
        >>> [x.tolist() for (x,) in loader]
        [[0, 1, 2], [3, 4, 5]]
    """

    _stoker_own = True  # not inherited by loaders of torch's class that a framework builds from one of these

    def __class_getitem__(cls, parameters: object) -> object:
        """``DataLoader[Sample]``, and ``DataLoader[Sample, Batch]`` as torch writes it after 2.13."""
        given = parameters if isinstance(parameters, tuple) else (parameters,)
        return super().__class_getitem__(given[: len(cls.__parameters__)])  # type: ignore[misc,attr-defined]

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | str | None = None,
        sampler: Sampler[Index] | Iterable[Index] | None = None,
        batch_sampler: Sampler[list[Index]] | Iterable[list[Index]] | None = None,
        num_workers: int | str = 0,
        collate_fn: Callable[[list[Sample]], Batch] | None = None,
        pin_memory: bool | str = False,
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
        debug: bool = False,
        device: str | int | torch.device | None = None,
        transform_on_device: Callable[[Batch], Batch] | None = None,
        on_error: str | Callable[[Index, Exception], Sample] = "raise",
        refill: bool = False,
        max_errors: int | float | None = None,
        quarantine: str | os.PathLike[str] | None = QUARANTINE,
        on_worker_death: str | None = None,
        sample_timeout: float | None = None,
        read_threads: int | str | None = None,
        task_seeds: bool = False,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        self.worker_method = worker_word(worker_method)
        self.budget = budget
        self.debug = debug
        self.device = None if device is None else checked(device)
        self.transform_on_device = transform_on_device
        self.on_error = on_error
        self.refill = refill
        self.max_errors = max_errors
        self.quarantine = quarantine
        self.on_worker_death = on_worker_death
        self.sample_timeout = sample_timeout
        self.read_threads = read_threads
        self.task_seeds = task_seeds
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._ahead = AHEAD if prefetch_factor is None else 0
        self._shuffle = shuffle
        check_own(self, multiprocessing_context, shuffle, pin_memory)
        num_workers = auto_workers(num_workers, dataset)
        batch_size, torchs, sampler, batch_sampler = once(batch_size, shuffle, sampler, batch_sampler)
        super().__init__(
            dataset,
            batch_size,
            bool(torchs) if isinstance(torchs, str) else torchs,
            sampler,
            batch_sampler,
            num_workers,  # type: ignore[arg-type]
            collate_fn,
            False if pin_memory == "auto" else pin_memory,  # type: ignore[arg-type]
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if _TORCH_HAS_IN_ORDER else {}),
        )
        if not _TORCH_HAS_IN_ORDER:
            self.in_order = in_order
        if pin_memory == "auto":
            pinning = state_of(self).pinning
            pinning.auto = True
            self.pin_memory = pinning.decide()
        self._set_samplers(SHUFFLES.get(str(torchs)), sampler, batch_sampler)
        validate.check(self)
        read_threads_check(self)
        self.num_workers = self.num_workers  # again, to carry all settings that exist by now
        follow(OWN)

    def _set_samplers(self, own: Callable[..., Sampler[int]] | None, sampler: object, batch_sampler: object) -> None:
        """Replaces torch's sampler by stoker's, if there is one, and marks samplers made here for ``once``."""
        if own is not None:
            object.__setattr__(self, "sampler", own(self.dataset, generator=self.generator))
            if self.batch_sampler is not None:
                self.batch_sampler.sampler = self.sampler  # type: ignore[attr-defined]
        if sampler is None:
            self.sampler._stoker_default = True  # type: ignore[attr-defined]
        if batch_sampler is None and self.batch_sampler is not None:
            self.batch_sampler._stoker_default = True  # type: ignore[attr-defined]

    @property
    def num_workers(self) -> int:
        """The number of workers. It carries the settings to torch loaders that frameworks build from this one's
        attributes."""
        return self.__dict__["num_workers"]  # type: ignore[no-any-return]

    @num_workers.setter
    def num_workers(self, n: int) -> None:
        held = self.__dict__
        own = {name: held[name] for name in (*OWN, "_ahead") if name in held}
        if "pin_memory" in held and state_of(self).pinning.auto:
            own["pin_memory"] = "auto"
        held["num_workers"] = Workers.carrying(n, own, held.get("dataset")) if isinstance(n, int) else n

    @property
    def shuffle(self) -> bool | str | None:
        """The value passed to the constructor; the order itself is in ``sampler``."""
        return self._shuffle

    @property
    def decisions(self) -> list[str]:
        """Sentences about what "auto" has decided so far, and why; oldest first."""
        state = state_of(self)
        reasons = state.first_count_reason, str(state.pinning.choice or "")
        return [*filter(None, reasons), *state.metrics.decisions]

    def _get_iterator(self) -> Any:
        return get_iterator(self)

    def __iter__(self) -> Any:
        state = state_of(self)
        if state.leave_parent():
            self._iterator = state.unclaimed_iterator = None  # their workers are the parent's
        if state.restart_workers:
            state.saved_parts = 0
            state.unclaimed_iterator = None
        if state.unclaimed_iterator is not None:
            it, state.unclaimed_iterator = state.unclaimed_iterator, None
            return it
        if state.restart_workers or getattr(self._iterator, "ends_with_epoch", False):
            state.restart_workers = False
            if hasattr(self._iterator, "_shutdown_workers"):
                self._iterator._shutdown_workers()  # type: ignore[union-attr]
            self._iterator = None
        it = super().__iter__()
        return it if self.device is None else ahead(it, self.device, transform=self.transform_on_device)

    def state_dict(self) -> JsonObject:
        """Returns this loader's position in its run: a few kilobytes of plain values, for ``torch.save``, JSON or
        ``torch.distributed.checkpoint``. Follows the protocol of torchdata's ``StatefulDataLoader``.

        Only delivered batches count, not prefetched ones. If there is no iterator yet, creates one, which the next
        ``iter`` returns. A state taken at the last batch resumes with no batch left; one taken after the iterator has
        ended resumes with the next epoch.

        Asks a dataset or sampler with ``state_dict()`` and ``load_state_dict()`` for its own state. Other samplers are
        restarted and their first indices skipped; an iterable dataset without state is read again. ``docs/resume.md``
        describes what holds for another number of workers or ranks, and for random augmentation.

        Raises:
            StateError: the system is not Linux and the loader has worker processes.

        Example:
            >>> loader = DataLoader(range(8), batch_size=2)
            >>> batches = iter(loader)
            >>> next(batches).tolist()
            [0, 1]
            >>> saved = loader.state_dict()
            >>> loader = DataLoader(range(8), batch_size=2)
            >>> loader.load_state_dict(saved)
            >>> [batch.tolist() for batch in loader]
            [[2, 3], [4, 5], [6, 7]]
        """
        return engine.state_dict(self)

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """The next ``iter`` resumes where ``state_dict`` was taken; ``{}`` starts a new run.

        Unpickles nothing. A state that does not fit this loader is rejected here or by that ``iter``.

        Args:
            state_dict: from this or an earlier version of stoker, from one rank or all (``stoker.AllRanks``), and from
                a loader with the same dataset and order.

        Raises:
            StateError: not a state dict, one of a newer stoker, or one that lacks information for this number of ranks.
        """
        engine.load_state_dict(self, state_dict)

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers, for instance from a callback.

        With ``num_workers="auto"`` and a map-style dataset, takes effect from the next task on, even within an epoch;
        batches and their order do not change. Any thread may call it. ``"auto"`` leaves the number alone from then on.
        Otherwise it takes effect in the next epoch, because workers have torch's seeds, or parts of an iterable
        dataset, of their own.

        Args:
            num_workers: at least 1.

        Raises:
            UsageError: not a whole number, or less than 1.
            BudgetError: this machine lacks memory, descriptors or processes for so many.

        Example:
            >>> loader = DataLoader(range(8), num_workers="auto")
            >>> loader.resize(2)
            >>> int(loader.num_workers)
            2
        """
        asked = num_workers
        with contextlib.suppress(TypeError):
            num_workers = 0 if isinstance(asked, bool) else operator.index(asked)
        if type(num_workers) is not int or num_workers < 1:
            raise UsageError(f"resize() needs a positive integer, not {asked!r}")
        state = state_of(self)
        each = max(state.metrics.worker_pss.values(), default=resources.WORKER_BYTES)
        most, why = resources.workers_bound(each)
        if num_workers > most:
            raise BudgetError(f"resize({num_workers}): at most {most} workers fit here: {why}")
        if not isinstance(self.num_workers, AutoWorkers):
            if self.num_workers == 0 and self.prefetch_factor is None:
                self.prefetch_factor = 2
            self.num_workers = num_workers
            state.restart_workers = True
            return
        if self.prefetch_factor is None:
            self.prefetch_factor = 2 if state.place is None else state.place.prefetch
        self.num_workers = AutoWorkers(num_workers)
        state.place = None
        state.first_count_reason = f"resize({num_workers})"
        state.manual_workers = True
        if self._dataset_kind == _DatasetKind.Map:
            for it in list(state.iterators):
                it.resize(num_workers)
        else:
            state.restart_workers = True


# The arguments that torch's class does not have.
OWN = {
    name: p.default
    for name, p in inspect.signature(DataLoader.__init__).parameters.items()
    if name not in (*inspect.signature(torch_loader.DataLoader.__init__).parameters, "in_order")
}
