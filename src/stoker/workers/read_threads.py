"""Loads several samples of a batch at once, with threads in one worker process, if loading mostly waits (far storage).

``ReadThreads`` is called with a batch's indices before they are loaded one by one, and returns the samples that it has
already loaded:

1. ``_measure``: loads the first samples as usual and times them. If they do not wait, it stops here.
2. ``_try``: loads the whole batch with threads. Samples that were loaded twice must be bit-identical, the dataset must
   be unchanged, and the threads must be faster.
3. ``_at_once``: loads each later batch with threads.

Threads must not advance any random state: if a batch drew random numbers, the state is restored and threads are no
longer used. A sample that fails is not returned, so it is loaded again in its turn and raises its error there.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.utils.data.dataloader import _DatasetKind

from ..core import processes
from ..core.compare import equal_bits
from ..core.errors import UsageError
from ..core.fingerprint import Fingerprint
from ..core.handles import held, iterator_in
from ..core.options import AutoWorkers
from ..core.random_state import RandomState
from ..core.types import Index, LoaderLike, Sample
from ..core.warn import warn_user
from ..sampling.generators import Found, find_generators
from . import native_threads
from .faults.guard import OnSampleStart
from .fetcher import is_asked_one_by_one, staged_in

MOST = 16  # threads: at 20 ms a request, a batch of 32 takes two rounds; more gain little and need more connections
PROBES = 4  # samples that are timed, except the first, which opens files and connections
LEAST_S = 1e-3  # minimum loading time of a sample: below that, handing it to a thread costs too much
BUSY = 0.3  # share of processor time above which a sample does not mostly wait
LEAST_GAIN = 1.25  # minimum speed-up of a batch over loading one sample after the other
AGAIN = 64  # batches until the first new measurement, and between comparisons of a sample
SLOW = 3  # after this many consecutive batches slower than one sample after the other, measure again
DRAWS = "loading a sample draws random numbers"
OTHER = "a sample differs when it is loaded in parallel with others"
OFF = "From now on samples are loaded one at a time."
REMEDY = "stoker.Staged reads several samples at once but draws random numbers in order"


class ReadThreads:
    """Loads samples of one dataset with threads, in a worker process."""

    def __init__(
        self,
        load: Callable[[Index], Sample],
        objects: Sequence[object],  # the dataset, and other objects that loading uses
        threads: int | None = None,  # None to decide by measuring, and only if loading is known to be safe
        same: Callable[[Sample, Sample], bool] = equal_bits,
        on_wait: OnSampleStart | None = None,  # called before each wait for a sample
    ) -> None:
        self._load = load
        self._objects = list(objects)
        self._threads = threads
        self._same = same
        self._on_wait = on_wait
        self._pool: ThreadPoolExecutor | None = None
        self._generators: Found | None = None
        self._skip, self._next_skip = 0, AGAIN  # batches until the next measurement
        self._batches = 0  # loaded with threads
        self._slow = 0  # consecutive slow batches among them
        self._usual_s = 0.0  # seconds to load one sample alone
        self.why_not = ""  # why samples are loaded one after the other; "" if that is not decided
        self._cpu_ns = 0  # processor time of the threads

    @property
    def count(self) -> int:
        """Number of threads that load samples now."""
        return 0 if self._pool is None else self._pool._max_workers

    def take_cpu_ns(self) -> int:
        """Returns the threads' processor time since the last call."""
        spent, self._cpu_ns = self._cpu_ns, 0
        return spent

    def __call__(self, indices: Sequence[Index]) -> dict[int, Sample]:
        """Returns samples of a batch by position. Leaves random states as if only the returned ones had been loaded, so
        the others can be loaded next."""
        if self.why_not or not isinstance(indices, (list, tuple)) or len(indices) < 2:
            return {}
        if self._pool is not None:
            return self._without_draws(lambda: self._at_once(indices))
        if self._skip:
            self._skip -= 1
            return {}
        return self._measure(indices)

    def _states(self) -> RandomState:
        if self._generators is None:
            self._generators = find_generators(*self._objects)
        return RandomState(self._generators)

    def _without_draws(self, make: Callable[[], dict[int, Sample]]) -> dict[int, Sample]:
        """Calls ``make`` and returns its samples, unless making them drew random numbers."""
        before = self._states()
        try:
            made = make()
        except Exception:  # raised again when the sample is loaded in its turn
            made = {}
        if before.moved():
            before.restore()
            self._end(DRAWS)
            return {}
        return made

    # -- deciding

    def _measure(self, indices: Sequence[Index]) -> dict[int, Sample]:
        before = self._states()
        try:
            made = {0: self._load(indices[0])}  # its draws come next anyway, and it may create generators
        except Exception:
            before.restore()
            return {}
        if before.moved():
            self._end(DRAWS)
            return made
        self._generators = None
        return made | self._without_draws(lambda: self._probe(indices))

    def _probe(self, indices: Sequence[Index]) -> dict[int, Sample]:
        """Loads a few samples and times them. If they mostly wait, loads all but the first with threads."""
        made: dict[int, Sample] = {}
        waits, works = [], []
        for k in range(1, min(PROBES, len(indices))):
            began, began_cpu = time.perf_counter(), time.process_time() + processes.core_wait_s()
            made[k] = self._load(indices[k])
            # The time of all threads, because fsspec has its own. Waiting for a core is not waiting for data.
            works.append(time.process_time() + processes.core_wait_s() - began_cpu)
            waits.append(time.perf_counter() - began)
        self._usual_s, work_s = (sorted(seconds)[len(seconds) // 2] for seconds in (waits, works))
        if self._threads is not None:
            return made | self._try(indices, made, self._threads)
        if self._usual_s < LEAST_S or work_s > BUSY * self._usual_s:
            self._pause()
            return made
        shared = next(filter(None, (find(x) for x in self._objects for find in (held, iterator_in))), "")
        if shared:
            self._end(f"{shared}, which threads would have to share")
            return made
        return made | self._try(indices, made, int(min(MOST, self._usual_s / max(work_s, self._usual_s / MOST))))

    def _try(self, indices: Sequence[Index], known: dict[int, Sample], threads: int) -> dict[int, Sample]:
        """Loads all samples but the first with threads, and compares them with those already loaded."""
        before = Fingerprint(self._objects)
        self._pool = ThreadPoolExecutor(threads, "stoker_read", _begin_thread, (torch.is_grad_enabled(),))
        began = time.perf_counter()
        try:
            made = self._at_once(indices, first=1)
            if self.why_not:
                return made
            took_s = (time.perf_counter() - began) / (len(indices) - 1)
            changes = before.changed(self._objects)
            same = all(k in made and self._same(sample, made[k]) for k, sample in known.items())
        except BaseException:
            self._stop()
            raise
        if not same:
            self._end(OTHER)
            return {}
        if changes and self._threads is None:
            self._end(f"loading samples changes the dataset: {changes[0].replace('dataset[0]', 'dataset')}")
            return {}
        if self._threads is None and took_s * LEAST_GAIN > self._usual_s:
            self._stop()
            self._pause()
        return made

    def _end(self, why: str) -> None:
        """Loads samples one after the other from now on."""
        self.why_not = why
        self._stop()
        info = torch.utils.data.get_worker_info()
        if self._threads is not None and (info is None or info.id == 0):
            remedy = f" {REMEDY}." if why == DRAWS else ""
            warn_user(f"read_threads={self._threads} has no effect: {why}.{remedy}")

    # -- loading

    def _pause(self) -> None:
        """Skips twice as many batches each time: measuring costs as much as a small batch."""
        self._skip, self._next_skip = self._next_skip, 2 * self._next_skip

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._slow = None, 0

    def _at_once(self, indices: Sequence[Index], first: int = 0) -> dict[int, Sample]:
        """Loads samples with threads; omits those that fail."""
        assert self._pool is not None
        began, began_cpu = time.perf_counter(), time.process_time_ns() - time.thread_time_ns()
        futures: dict[int, Future[Sample]] = {}
        with contextlib.suppress(RuntimeError):  # no more threads can be started (ulimit -u)
            for k in range(first, len(indices)):
                # Each runs in a copy of the caller's context: NumPy's error handling, any ``ContextVar``.
                futures[k] = self._pool.submit(contextvars.copy_context().run, self._load, indices[k])
        made = {}
        for k, future in futures.items():
            if self._on_wait is not None:
                self._on_wait(-1, 1)  # earlier samples are done, so a thread has started on this one by now
            if future.exception() is None:
                made[k] = future.result()
        self._cpu_ns += time.process_time_ns() - time.thread_time_ns() - began_cpu
        if len(futures) < len(indices) - first:
            self._end("no more threads can be started")
            return made
        self._batches += 1
        if self._batches % AGAIN == 0 and made:
            k = next(iter(made))
            if not self._same(self._load(indices[k]), made[k]):
                self._end(OTHER)
                warn_user(f"Sample {indices[k]} differs when it is loaded alone instead of by threads. {OFF}")
                return {}
        if 2 * len(made) < len(futures):  # a server may refuse that many requests: make them one by one
            self._stop()
            self._pause()
            return made
        is_slow = time.perf_counter() - began > self._usual_s * len(futures)
        self._slow = self._slow + 1 if is_slow else 0
        if self._slow == SLOW and self._threads is None:
            self._stop()
        return made


def check(loader: LoaderLike) -> None:
    """Checks a loader's ``read_threads=``. Raises UsageError, which says what to do instead."""
    asked = getattr(loader, "read_threads", None)
    if asked is None or asked == "auto":
        return
    if type(asked) is not int or asked < 1:
        raise UsageError(f'read_threads must be a positive integer, "auto" or None, not {asked!r}')
    if asked == 1 or getattr(loader, "debug", False):
        return
    if loader._dataset_kind != _DatasetKind.Map:
        raise UsageError(
            f"read_threads={asked} needs a map-style dataset: an iterable dataset yields one sample at a time"
        )
    if not loader._auto_collation:
        raise UsageError(
            f"read_threads={asked} loads the samples of a batch at once, but batch_size=None makes no batches"
        )
    if getattr(loader, "worker_method", "") == "thread":
        raise UsageError(
            f'read_threads={asked} needs worker processes; with worker_method="thread", use more workers instead'
        )
    if loader.num_workers == 0 and not isinstance(loader.num_workers, AutoWorkers):
        raise UsageError(f"read_threads={asked} needs worker processes. Set num_workers to 1 or more")
    dataset = loader.dataset
    if staged_in(dataset) is None and not is_asked_one_by_one(dataset, loader.collate_fn, True):
        raise UsageError(
            f"read_threads={asked}: a {type(dataset).__name__} makes whole batches, so there are no single samples to "
            "load in parallel"
        )


def _begin_thread(grad_enabled: bool) -> None:
    native_threads.cap_thread()
    torch.set_grad_enabled(grad_enabled)
