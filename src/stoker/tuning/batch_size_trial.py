"""One trial of a batch size: in a process of its own held to a RAM budget, or on the accelerator with its out of memory
cleaned up."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import pickle
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from ..core import resources
from ..core.errors import UsageError
from ..core.options import parse_bytes
from ..core.terminal import human_bytes
from ..device.accelerator import accelerator
from ..loader.auto.tasks import SEED, keys_of
from ..sampling import seeding
from ..workers import native_threads
from ..workers.process_main import die_with_parent

REPEATS = 3  # batches in a trial, of other samples each; the first also pays for what is imported or read only once
PATIENCE = 8  # no further repeat in a trial that has taken this part of the time left
DEFAULT_SHARE = 4  # of the memory granted, as a budget; and no more than half of what is free
COPIES = 2  # samples and the batch made of them are in memory at once
M_MMAP_THRESHOLD, MMAP_THRESHOLD = -3, 128 << 10  # glibc's malloc.h; its own beginning
TICK_S = 1.0  # between two words about a trial that lasts
OUT_OF_MEMORY = re.compile(  # what torch, the C++ library, the kernel and a thread that gets no stack call it
    r"out of memory|not enough memory|(can't|cannot|unable to) allocate|bad_alloc|ALLOC_FAILED|can't start new thread",
    re.IGNORECASE,
)


class _ShortError(Exception):
    """An iterable dataset ended after ``args[0]`` samples."""


class Source:
    """Batches of any size of a loader's samples.

    Attributes:
        count: how many samples there are; None for an iterable dataset.
        doing: what is being done, for the words of an error.
    """

    def __init__(self, loader: Any) -> None:
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._keys: Any = None if isinstance(self._dataset, IterableDataset) else keys_of(loader)
        self.count = None if self._keys is None else len(self._keys)
        self.doing = ""

    def batch(self, n: int, repeat: int) -> Any:
        samples = self._samples(n, repeat)
        self.doing = "collate_fn"
        return self._collate(samples)

    def _samples(self, n: int, repeat: int) -> list[Any]:
        self.doing = "the dataset"
        if self.count is None:
            samples = list(itertools.islice(iter(self._dataset), n))
            if len(samples) < n:
                raise _ShortError(len(samples))
            return samples
        indices = [self._keys[i] for i in random.Random(SEED + repeat).sample(range(self.count), n)]
        many = getattr(self._dataset, "__getitems__", None)
        if many:
            return many(indices)  # type: ignore[no-any-return]
        samples = []
        for i in indices:
            self.doing = f"sample {i} of the dataset"
            samples.append(self._dataset[i])
        return samples


class Seen(NamedTuple):
    """How a trial went.

    Attributes:
        what: "fits", "out" (of memory), "failed", "late" or "short".
        words: of what failed.
        seconds: of one batch with its step.
        samples: of the dataset that is too short.
        peak: bytes beyond what was there before.
    """

    what: str
    words: str = ""
    seconds: float = 0.0
    samples: int = 0
    peak: int = 0


def _seen(source: Source, step: Callable[[Any], Any] | None, n: int, deadline: float, move: Any = None) -> Seen:
    """Makes the batches of a trial. An error becomes words here: its traceback would keep the batch."""
    patience = (deadline - time.monotonic()) / PATIENCE
    times: list[float] = []
    try:
        while not times or (len(times) < REPEATS and sum(times) + times[-1] < patience):
            began = time.perf_counter()
            batch = source.batch(n, len(times))
            source.doing = "step"
            if move is not None:
                batch = move(batch)
            if step is not None:
                step(batch)
            del batch
            if move is not None:
                move(None)
            times.append(time.perf_counter() - began)
    except _ShortError as e:
        return Seen("short", samples=e.args[0])
    except (Exception, SystemExit) as e:
        if _is_out_of_memory(e):
            return Seen("out", f"out of memory in {source.doing}", peak=_asked(e))
        return Seen("failed", f"{source.doing} raised {type(e).__name__}: {e}")
    return Seen("fits", seconds=statistics.median_low(times))


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
            return True
        if isinstance(error, (RuntimeError, OSError)) and OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _asked(error: BaseException) -> int:
    """Bytes that torch's CPU allocator was asked for in vain; 0 where the error does not say."""
    found = re.search(r"tried to allocate (\d+) bytes", str(error))
    return int(found[1]) if found else 0


class Ram:
    """Trials in throw-away processes that may grow by the budget and no further: RLIMIT_DATA of setrlimit(2) counts a
    process' private writable memory, so an allocation past it fails instead of taking the machine down."""

    name = "cpu"

    def __init__(self, budget: int | float | str | None) -> None:
        if not _status():
            raise UsageError("a batch size for a RAM budget is found on Linux only, where a process can be held to it")
        granted, free = resources.memory_granted(), resources.memory_available()
        default = min(granted // DEFAULT_SHARE, free // 2)
        self.budget = max(1, default) if budget is None else parse_bytes(budget, granted)
        if self.budget > free:
            raise UsageError(f"a budget of {human_bytes(self.budget)}, but only {human_bytes(free)} of RAM are free")

    def trial(self, source: Source, step: Any, n: int, deadline: float, tick: Callable[[], Any]) -> Seen:
        context = torch.multiprocessing.get_context()
        known = context.get_start_method() != "forkserver" and threading.current_thread() is threading.main_thread()
        ours, theirs = context.Pipe(duplex=False)
        args = (theirs, source, step, n, self.budget, deadline - time.monotonic(), os.getpid() if known else 0)
        process = context.Process(target=_child, args=args, daemon=True)
        try:
            try:
                process.start()
            except (AttributeError, TypeError, pickle.PicklingError) as e:
                raise UsageError(f"the dataset, collate_fn or step cannot be sent to a process: {e}") from e
            theirs.close()
            while not ours.poll(max(0.0, min(TICK_S, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return Seen("late")
                tick()
            return ours.recv()  # type: ignore[no-any-return]
        except EOFError:
            process.join()
            code = process.exitcode
            if code is None:  # somebody else has reaped it
                return Seen("failed", "the trial's process ended, nobody knows how")
            if code >= 0:
                return Seen("failed", f"the trial's process ended by itself, with exit code {code}")
            return Seen("out", f"the trial's process was ended by signal {-code} ({signal.strsignal(-code)})")
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
            with contextlib.suppress(ValueError):  # somebody else has reaped it, and it seems to run
                process.close()
            ours.close()
            theirs.close()


def _status() -> dict[str, int]:
    """Bytes by name, of proc(5)'s status of this process."""
    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    except OSError:
        return {}
    return {f[0][:-1]: int(f[1]) << 10 for f in lines if len(f) == 3 and f[2] == "kB"}


def _child(pipe: Any, source: Source, step: Any, n: int, budget: int, seconds: float, parent: int) -> None:
    """A trial's process: grows by at most ``budget`` bytes, and says what it saw."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too
    native_threads.cap_process()  # after a fork the parent's thread pools have no threads left to wait for
    die_with_parent(parent)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, AttributeError):  # what malloc kept of the parent's would be used without growing
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        # A fixed threshold (mallopt(3)): the one that grows by what was freed keeps a large block of the batch before,
        # or does not, by the order in which things are freed, and one size would fit today and not tomorrow.
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    with contextlib.suppress(OSError):  # the peak begins here; a fork's does anyway
        Path("/proc/self/clear_refs").write_text("5")
    before = _status()
    most = before["VmData"] + budget
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    seen = _seen(source, step, n, time.monotonic() + seconds)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    after = _status()
    files = max(0, after["RssFile"] - before["RssFile"])  # code and mapped files: the kernel can drop these
    pipe.send(seen._replace(peak=max(0, after["VmHWM"] - before["VmHWM"] - files) + seen.peak))
    os._exit(0)


def counted() -> tuple[Any, torch.device] | None:
    """torch's module for the accelerator and the current device; None where there is none whose memory it can count."""
    device = accelerator()
    if device is None or device.type not in ("cuda", "xpu"):
        return None
    module = getattr(torch, device.type)
    return module, torch.device(device.type, module.current_device())


class Accelerator:
    """Trials in this process, on the device.

    Args:
        module: ``torch.cuda``, or what is like it.
        device: where batches go.
        budget: of its memory; None for all that is free.
    """

    def __init__(self, module: Any, device: torch.device, budget: int | float | str | None) -> None:
        self._module, self._device = module, device
        self._host = resources.memory_available() // 2  # no limit holds in this process, so what is to come is reckoned
        self._sample_bytes = 0.0
        self._clear()
        self._start = int(module.memory_allocated())
        free, total = module.mem_get_info()
        room = int(free + module.memory_reserved() - self._start)
        self.budget = room if budget is None else parse_bytes(budget, total)
        self.name = f"{device} ({module.get_device_name()})"
        if self.budget > room:
            raise UsageError(
                f"a budget of {human_bytes(self.budget)}, but only {human_bytes(room)} of {device} are free"
            )

    def trial(self, source: Source, step: Any, n: int, deadline: float, tick: Callable[[], Any]) -> Seen:
        if n * self._sample_bytes * COPIES > self._host:
            return Seen("out", f"making the batch would take more than {human_bytes(self._host)} of RAM")
        self._module.reset_peak_memory_stats()
        random_state = self._module.get_rng_state()
        with seeding.unchanged():
            seen = _seen(source, step, n, deadline, lambda batch: self._move(batch, n))
        with contextlib.suppress(RuntimeError):  # short of memory still
            self._module.set_rng_state(random_state)
        peak = int(self._module.max_memory_allocated()) - self._start
        self._clear()
        return seen._replace(peak=peak)

    def _move(self, batch: Any, n: int) -> Any:
        """The batch on the device; ``None`` waits for what runs there."""
        if batch is None:
            self._module.synchronize()
            return None
        nbytes = 0

        def to(thing: Any) -> Any:
            nonlocal nbytes
            if isinstance(thing, dict):
                return {k: to(v) for k, v in thing.items()}
            if isinstance(thing, (list, tuple)):
                moved = [to(v) for v in thing]
                return type(thing)(*moved) if hasattr(thing, "_fields") else type(thing)(moved)
            nbytes += getattr(thing, "nbytes", 0) if isinstance(thing, torch.Tensor) else 0
            return thing.to(self._device) if hasattr(thing, "to") else thing

        moved = to(batch)
        self._sample_bytes = nbytes / n
        return moved

    def _clear(self) -> None:
        gc.collect()
        self._module.empty_cache()
