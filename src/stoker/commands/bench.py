"""How fast a loader is as it stands: an empty loop over its batches, without and with the copy to the accelerator.

The loader that is handed in is not iterated, a copy of it is. Random state moves as iterating moves it, and no further.
"""

from __future__ import annotations

import dataclasses
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..core import resources
from ..core.errors import StokerError, UsageError
from ..device.accelerator import accelerator, synchronize
from ..loader.dataloader import DataLoader as Own
from ..loader.describe import count, settings_of
from ..loader.engine import get_iterator, torch_get_iterator
from ..loader.variant import variant
from ..staging.install import active
from .bench_result import Bench, Rates

BATCHES = 100
BUDGET_S = 60.0
SAY_S = 0.25  # between two words of progress
FLATTERED = 4  # what lay ready when the clock began is a quarter of what was measured: worth a note
WORDS = 300  # of an error that is not ours


def measure(
    loader: DataLoader[Any],
    batches: int = BATCHES,
    step_s: float = 0.0,
    budget_s: float = BUDGET_S,
    name: str = "the loader",
    progress: Callable[[str], None] | None = None,
) -> Bench:
    """Runs ``loader`` as it is, without a model, and says how fast it is.

    Args:
        loader: torch's or stoker's, with its own engine and settings.
        batches: how many are measured, beside the first; epoch after epoch where one is shorter.
        step_s: seconds to wait after each batch, in place of a model.
        budget_s: seconds after which no further batch is asked for; with an accelerator, for both runs together.
        name: what errors and the result call it.
        progress: called with a line of text, at most every quarter second, between two batches.

    Raises:
        UsageError: there is no batch, or an argument is wrong.
        StokerError: a sample or a worker failed; the workers are gone.

    Example:
        >>> found = measure(DataLoader(range(100), batch_size=10), batches=5)
        >>> found.loader.batches, found.loader.samples, found.loader.nbytes
        (5, 50, 400)
    """
    if batches < 1:
        raise UsageError(f"batches={batches}: at least 1")
    if not (0 <= step_s < math.inf and 0 < budget_s < math.inf):
        raise UsageError(f"step_s={step_s}, budget_s={budget_s}: seconds")
    device = accelerator()
    devices = [None] if device is None else [None, device]
    runs = []
    notes: list[str] = []
    for place in devices:
        twin = variant(loader)
        words = f"copying to {place}: " if place is not None else ""
        runs.append(_loop(twin, batches, step_s, budget_s / len(devices), name, place, progress, words))
        for note in _notes(twin, runs[-1], batches):
            if words + note not in notes:
                notes.append(words + note)
    return Bench(
        name,
        {**settings_of(twin), "engine": _engine(twin)},
        step_s,
        runs[0],
        runs[1] if device is not None else None,
        None if device is None else str(device),
        tuple(notes),
        resources.read().as_dict(),
    )


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors of a batch: in mappings, sequences and dataclasses, however deep."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes, bytearray, range)):
        for value in batch:
            yield from tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for f in dataclasses.fields(batch):
            yield from tensors(getattr(batch, f.name))


class _Batches:
    """A loader's batches, one epoch after the other. Leaving the ``with`` ends its workers."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        self._loader, self._name = loader, name
        self._iterator: Any = None
        self.epochs = self.delivered = 0

    def __enter__(self) -> _Batches:
        return self

    def __exit__(self, *_: object) -> None:
        for end in ("_shutdown_workers", "close"):  # a subclass may iterate with a generator
            if hasattr(self._iterator, end):
                getattr(self._iterator, end)()
        self._iterator = self._loader._iterator = None

    def next(self) -> Any:
        """The next batch, of the next epoch where this one is over.

        Raises:
            StopIteration: an epoch without a batch.
        """
        try:
            return self._next()
        except (StopIteration, UsageError):
            raise
        except (Exception, SystemExit) as e:
            after = f"after {self.delivered:,} batches" if self.delivered else "before the first batch"
            raise StokerError(f"{self._name} failed {after}: {_said(e)}") from e

    def _next(self) -> Any:
        fresh = self._iterator is None
        while True:
            if fresh:
                self._iterator = iter(self._loader)
            try:
                batch = next(self._iterator)
            except StopIteration:
                if fresh:
                    raise
                fresh = True
                continue
            self.epochs += fresh
            self.delivered += 1
            return batch


def _said(e: BaseException) -> str:
    """An error in one line; of one that came from a worker, its own last line instead of two tracebacks."""
    if isinstance(e, (EOFError, ConnectionResetError)):  # what torch's queue says of a pipe without another end
        return f"a worker exited unexpectedly ({type(e).__name__})"
    text = str(e).strip()
    words = text.splitlines()[-1] if "Traceback (most recent call last)" in text else f"{type(e).__name__}: {text}"
    return " ".join(words.split())[:WORDS]


def _loop(
    loader: DataLoader[Any],
    n: int,
    step_s: float,
    budget_s: float,
    name: str,
    device: Any,
    progress: Callable[[str], None] | None,
    words: str,
) -> Rates:
    clock = time.perf_counter
    size = loader.batch_size or 1
    waits = array("d")
    samples = nbytes = 0
    stepped = 0.0
    moved: list[torch.Tensor] = []  # kept until the next batch is there, as a model keeps it

    def consume(batch: Any) -> None:
        nonlocal samples, nbytes, stepped, moved
        found = list(tensors(batch))
        samples += count(batch, size)
        nbytes += sum(_nbytes(t) for t in found)
        if device is not None:
            moved = [t.to(device, non_blocking=True) for t in found]
        if step_s:
            began = clock()
            time.sleep(step_s)  # a model's step, to the loader: the process does nothing
            stepped += clock() - began

    if device is not None:
        torch.zeros(1).to(device)  # starts the device's context, which is no loader's time
        synchronize()
    if progress is not None:
        progress(f"{words}the first batch")
    with _Batches(loader, name) as batches:
        called = clock()
        try:
            batch = batches.next()
        except StopIteration:
            why = ": drop_last leaves a batch out that is not full" if loader.drop_last else ""
            raise UsageError(f"{name} is empty, it gave no batch{why}") from None
        first_s = clock() - called
        consume(batch)
        if device is not None:
            synchronize()
        samples, nbytes, stepped = 0, 0, 0.0
        began = said = asked = clock()
        ended = ""
        while len(waits) < n:
            if asked - called >= budget_s:
                ended = f"{budget_s:g} s were over (--budget-s)"
                break
            try:
                batch = batches.next()
            except StopIteration:
                ended = "another epoch gave no batch"
                break
            waits.append(clock() - asked)
            consume(batch)
            asked = clock()
            if progress is not None and asked - said >= SAY_S:
                said = asked
                progress(f"{words}batch {len(waits):,} of {n:,}, {len(waits) / (asked - began):,.1f} a second")
        if device is not None:
            synchronize()
            asked = clock()
        del batch, moved
    ranked = sorted(waits)
    p50, p95, p99 = (ranked[math.ceil(p * len(ranked)) - 1] if ranked else None for p in (0.5, 0.95, 0.99))
    return Rates(
        first_batch_s=first_s,
        batches=len(waits),
        samples=samples,
        nbytes=nbytes,
        seconds=asked - began,
        epochs=batches.epochs,
        wait_s=sum(waits),
        step_s=stepped,
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        ended=ended,
    )


def _nbytes(t: torch.Tensor) -> int:
    try:
        return t.nbytes
    except RuntimeError:  # sparse: its values
        return int(t._nnz()) * t.element_size()


def _engine(loader: DataLoader[Any]) -> str:
    behind = getattr(loader._get_iterator, "__func__", None)
    if behind is torch_get_iterator:
        return "torch"
    own = isinstance(loader, Own) or active()
    return "stoker" if own or behind is get_iterator else "torch"


def _notes(loader: DataLoader[Any], seen: Rates, n: int) -> Iterator[str]:
    """What somebody who reads the numbers should know of them."""
    if seen.ended:
        yield f"{seen.batches:,} of {n:,} batches were measured: {seen.ended}"
    if seen.epochs > 1:
        yield f"an epoch is shorter than that: {seen.epochs:,} were begun, and the waits between them count"
    ahead = int(loader.num_workers) * (loader.prefetch_factor or 0)
    if seen.batches and ahead * FLATTERED > seen.batches:
        yield f"up to {ahead:,} of these {seen.batches:,} batches lay ready when the clock began: a larger -n says more"
    if not seen.nbytes and seen.batches:
        yield "there is no tensor in the batches, so no bytes to count"
    if _engine(loader) == "torch" and getattr(loader, "worker_method", "process") != "process":
        yield "torch's workers are processes: worker_method is stoker's"
