"""One trial of a batch size on the accelerator: batches are made and stepped on, and out of memory is cleaned up."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from ..core import nested, resources
from ..core.errors import UsageError
from ..core.random_state import preserved
from ..core.terminal import human_bytes
from ..core.types import Batch, LoaderLike, Sample
from ..device.accelerator import accelerator
from ..loader.auto.tasks import SEED, keys_of

REPEATS = 3  # batches in a trial, of other samples each; the first also pays for what is imported or read only once
PATIENCE = 8  # no further repeat in a trial that has taken this part of the time left
COPIES = 2  # samples and the batch made of them are in RAM at once
HOST_SHARE = 2  # which may take half of the RAM that is free
OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|allocate memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE)

Step = Callable[[Batch], object]


@dataclass(frozen=True)
class Trial:
    """One batch size that was tried.

    Attributes:
        batch_size: samples in the batch.
        fits: within the budget less the margin.
        peak_bytes: the most memory it took beyond what was there before; of what does not fit, what is known.
        samples_per_s: making the batch and the step, in one process; None where it does not fit.
        why: why it does not fit, "" where it does.
    """

    batch_size: int
    fits: bool
    peak_bytes: int
    samples_per_s: float | None
    why: str


class Source:
    """Batches of any size of a loader's samples."""

    def __init__(self, loader: LoaderLike) -> None:
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        self._keys = keys_of(loader)
        self.count = len(self._keys)
        self.doing = ""

    def batch(self, n: int, repeat: int) -> Batch:
        """``n`` samples, other ones in each ``repeat``."""
        samples = self._samples(n, repeat)
        self.doing = "collate_fn"
        return self._collate(samples)

    def _samples(self, n: int, repeat: int) -> list[Sample]:
        self.doing = "the dataset"
        indices = [self._keys[i] for i in random.Random(SEED + repeat).sample(range(self.count), n)]
        if getattr(self._dataset, "__getitems__", None):
            return list(self._dataset.__getitems__(indices))
        samples = []
        for i in indices:
            self.doing = f"sample {i} of the dataset"
            samples.append(self._dataset[i])
        return samples


def counted() -> tuple[ModuleType, torch.device] | None:
    """torch's module for the accelerator and the current device; None where there is none whose memory it can count."""
    device = accelerator()
    if device is None or device.type not in ("cuda", "xpu"):
        return None
    module: ModuleType = getattr(torch, device.type)
    return module, torch.device(device.type, module.current_device())


class Accelerator:
    """Trials in this process, on the device."""

    def __init__(self, module: ModuleType, device: torch.device, margin: float) -> None:
        self._module, self._device = module, device
        self._host = resources.memory_available() // HOST_SHARE
        self._sample_bytes = 0.0
        self._clear()
        self._start = int(module.memory_allocated())
        self.budget = int(module.mem_get_info()[0] + module.memory_reserved() - self._start)
        self.allowed = int(self.budget * (1 - margin))
        self.name = f"{device} ({module.get_device_name()})"

    def trial(self, source: Source, step: Step | None, n: int, deadline: float) -> Trial:
        """Makes batches of ``n`` samples and steps on them.

        Raises:
            UsageError: the dataset, ``collate_fn`` or ``step`` raised.
        """
        if n * self._sample_bytes * COPIES > self._host:
            return Trial(n, False, 0, None, f"making the batch would take more than {human_bytes(self._host)} of RAM")
        self._module.reset_peak_memory_stats()
        random_state = self._module.get_rng_state()
        seconds, why, failed = 1e-9, "", ""
        try:
            with preserved():
                seconds = self._seconds(source, step, n, deadline)
        except (Exception, SystemExit) as e:  # becomes words here: its traceback would keep the batch in memory
            why = f"out of memory in {source.doing}" if _is_out_of_memory(e) else ""
            failed = "" if why else f"batch size {n:,}: {source.doing} raised {type(e).__name__}: {e}"
        with contextlib.suppress(RuntimeError):  # there may still be no memory for it
            self._module.set_rng_state(random_state)
        peak = int(self._module.max_memory_allocated()) - self._start
        self._clear()
        if failed:
            raise UsageError(failed)
        why = why or (f"it takes {human_bytes(peak)}" if peak > self.allowed else "")
        return Trial(n, not why, peak, None if why else n / max(seconds, 1e-9), why)

    def _seconds(self, source: Source, step: Step | None, n: int, deadline: float) -> float:
        """Of one batch with its step, the median."""
        patience = (deadline - time.monotonic()) / PATIENCE
        times: list[float] = []
        while not times or (len(times) < REPEATS and sum(times) + times[-1] < patience):
            began = time.perf_counter()
            batch = source.batch(n, len(times))
            source.doing = "step"
            batch = nested.move(batch, self._device)
            self._sample_bytes = sum(t.nbytes for t in nested.tensors(batch)) / n
            if step is not None:
                step(batch)
            del batch
            self._module.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median_low(times)

    def _clear(self) -> None:
        gc.collect()
        self._module.empty_cache()


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
            return True
        if isinstance(error, (RuntimeError, OSError)) and OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
