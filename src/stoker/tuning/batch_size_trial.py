"""One trial of a batch size on the accelerator: batches are made and stepped on, and out of memory is cleaned up."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from ..core import nested, resources
from ..core.errors import UsageError
from ..core.options import parse_bytes
from ..core.random_state import preserved
from ..core.terminal import human_bytes
from ..device.accelerator import accelerator
from ..loader.auto.tasks import SEED, keys_of

REPEATS = 3  # batches in a trial, of other samples each; the first also pays for what is imported or read only once
PATIENCE = 8  # no further repeat in a trial that has taken this part of the time left
COPIES = 2  # samples and the batch made of them are in memory at once
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
        what: "fits", "out" (of memory), "failed" or "short".
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


def _seen(
    source: Source, step: Callable[[Any], Any] | None, n: int, deadline: float, move: Callable[[Any], Any]
) -> Seen:
    """Makes the batches of a trial. An error becomes words here: its traceback would keep the batch."""
    patience = (deadline - time.monotonic()) / PATIENCE
    times: list[float] = []
    try:
        while not times or (len(times) < REPEATS and sum(times) + times[-1] < patience):
            began = time.perf_counter()
            batch = source.batch(n, len(times))
            source.doing = "step"
            batch = move(batch)
            if step is not None:
                step(batch)
            del batch
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
        self._host = (
            resources.memory_available() // 2
        )  # estimated before a batch is made, for no limit holds in this process
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

    def trial(self, source: Source, step: Any, n: int, deadline: float) -> Seen:
        if n * self._sample_bytes * COPIES > self._host:
            return Seen("out", f"making the batch would take more than {human_bytes(self._host)} of RAM")
        self._module.reset_peak_memory_stats()
        random_state = self._module.get_rng_state()
        with preserved():
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
        moved = nested.move(batch, self._device)
        self._sample_bytes = sum(t.nbytes for t in nested.tensors(moved)) / n
        return moved

    def _clear(self) -> None:
        gc.collect()
        self._module.empty_cache()
