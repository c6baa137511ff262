"""``stoker bench`` and ``stoker.bench.measure``: how fast a loader is as it stands.

An empty loop runs over its batches; with an accelerator a second loop copies each batch to it. A copy of the loader is
iterated, not the loader itself. Random state moves as iterating moves it, and no further.
"""

from __future__ import annotations

import math
import signal
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import click
import torch
from torch.utils.data import DataLoader

from ..core import output, processes, resources
from ..core.errors import StokerError, UsageError
from ..core.nested import tensors
from ..core.options import worker_word
from ..core.progress import Progress
from ..core.types import Batch, LoaderLike
from ..device.accelerator import accelerator, synchronize
from ..loader.dataloader import DataLoader as StokerDataLoader
from ..loader.describe import count, settings_of
from ..loader.engine import get_iterator, torch_get_iterator
from ..loader.variant import ENGINES, as_loader, find, variant
from ..staging.install import active
from . import arguments
from .bench_result import Bench, Rates

BATCHES = 100
TIME_LIMIT_S = 60.0
PROGRESS_S = 0.25  # between two texts of progress
READY_SHARE = 0.25  # a note says so if more than this part of the batches may have been ready before the clock began
MAX_ERROR = 300  # characters of an error
WORKER_DIED = ("exited unexpectedly", "killed by signal")  # torch's texts


@click.command("bench")
@arguments.target
@click.option(
    "-n",
    "batches",
    type=arguments.COUNT,
    metavar="N",
    default=BATCHES,
    show_default=True,
    help="Batches after the first to measure.",
)
@click.option(
    "--step",
    "step_ms",
    type=click.FloatRange(0, 1e6),
    default=0.0,
    metavar="MS",
    help="Sleep after each batch, in place of a model.",
)
@click.option("--engine", type=click.Choice(ENGINES), help="In place of the loader's own.")
@click.option("--num-workers", type=click.IntRange(min=0), metavar="N", help="In place of the loader's own.")
@click.option("--batch-size", type=arguments.COUNT, metavar="N", help="In place of the loader's own; 32 for a dataset.")
@arguments.time_limit(TIME_LIMIT_S)
@arguments.json_file
def command(
    target: str,
    batches: int,
    step_ms: float,
    engine: str | None,
    num_workers: int | None,
    batch_size: int | None,
    time_limit: float,
    json_path: Path | None,
) -> int:
    """Measure how fast a data loader is, without a model.

    TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name. A Dataset
    gets stoker's loader, shuffled, without workers.

    \b
    Examples:
      stoker bench train.py:make_loader
      stoker bench train.py:make_loader --engine torch --num-workers 4 -n 500
      stoker bench train.py:make_loader --step 20 --json bench.json
    """
    loader = variant(as_loader(find(target), name=target), num_workers, batch_size, engine)
    try:
        with Progress(target, time_limit) as progress:
            found = measure(loader, batches, step_ms / 1e3, time_limit, target, progress)
    except StokerError as e:
        return arguments.fail(e)
    output.give(found.as_dict(), json_path, lambda: print(found))
    return 0


def measure(
    loader: DataLoader[Batch],
    batches: int = BATCHES,
    step_s: float = 0.0,
    budget_s: float = TIME_LIMIT_S,
    name: str = "the loader",
    progress: Callable[[str], None] | None = None,
) -> Bench:
    """Runs ``loader`` as it is, without a model, and says how fast it is.

    Args:
        loader: torch's or stoker's, with its own engine and settings.
        batches: how many are measured after the first one; epoch after epoch if an epoch is shorter.
        step_s: seconds to wait after each batch, in place of a model.
        budget_s: seconds after which no further batch is requested; with an accelerator, for both runs together.
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
    rates: list[Rates] = []
    notes: list[str] = []
    for destination in devices:
        copy = variant(loader)
        prefix = f"copying to {destination}: " if destination is not None else ""
        plan = _Plan(name, batches, step_s, budget_s / len(devices), destination, progress or (lambda _: None), prefix)
        rates.append(_run(copy, plan))
        for note in _notes(copy, rates[-1], batches):
            if prefix + note not in notes:
                notes.append(prefix + note)
    return Bench(
        name,
        {**settings_of(copy), "engine": _engine(copy)},
        step_s,
        rates[0],
        rates[1] if device is not None else None,
        None if device is None else str(device),
        tuple(notes),
        resources.read().as_dict(),
    )


@dataclass(frozen=True)
class _Plan:
    """One run over a loader: see the arguments of ``measure``.

    Attributes:
        device: where batches are copied; None if they are not.
        prefix: of each text of progress.
    """

    name: str
    batches: int
    step_s: float
    time_limit_s: float
    device: torch.device | None
    progress: Callable[[str], None]
    prefix: str


def _run(loader: DataLoader[Batch], plan: _Plan) -> Rates:
    """Runs the loop. Each failure of the loader becomes one sentence.

    torch notices the death of a worker in a handler of SIGCHLD, which may raise between any two instructions until the
    iterator has been shut down; hence errors are translated here, after that.
    """
    batches = _Batches(loader)
    try:
        with batches:
            return _loop(batches, loader, plan)
    except StopIteration:
        reason = ": drop_last leaves out a batch that is not full" if loader.drop_last else ""
        raise UsageError(f"{plan.name} is empty, it gave no batch{reason}") from None
    except UsageError:
        raise
    except (Exception, SystemExit) as e:
        after = f"after {batches.delivered:,} batches" if batches.delivered else "before the first batch"
        raise StokerError(f"{plan.name} failed {after}: {_reason(e, batches)}") from e


class _Batches:
    """A loader's batches, one epoch after the other. Leaving the ``with`` ends its workers.

    Attributes:
        epochs: how many had a batch.
        delivered: batches so far.
    """

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self._loader: Any = loader
        self._iterator: Any = None
        self.epochs = 0
        self.delivered = 0
        self._workers: list[BaseProcess] = []

    def __enter__(self) -> _Batches:
        return self

    def __exit__(self, *_: object) -> None:
        iterator = self._iterator
        self._workers = [w for w in getattr(iterator, "_workers", ()) if isinstance(w, BaseProcess)]
        with ExitStack() as stack:  # from the last to the first; each step is taken, whatever the others raise
            stack.callback(self._forget)
            stack.callback(processes.join, self._workers)
            for method in ("close", "_shutdown_workers"):  # a subclass may iterate with a generator
                if hasattr(iterator, method):
                    stack.callback(getattr(iterator, method))

    def _forget(self) -> None:
        self._iterator = self._loader._iterator = None

    @property
    def has_workers(self) -> bool:
        """Whether worker processes were used; known after the ``with``."""
        return bool(self._workers)

    @property
    def exit_codes(self) -> list[int]:
        """Those of workers that ended on their own account, other than 0; known after the ``with``."""
        return [w.exitcode for w in self._workers if w.exitcode and w.exitcode != -signal.SIGTERM]

    def next(self) -> Batch:
        """The next batch; that of the next epoch if this one is over.

        Raises:
            StopIteration: an epoch without a batch.
        """
        new_epoch = self._iterator is None
        while True:
            if new_epoch:
                self._iterator = iter(self._loader)
            try:
                batch = next(self._iterator)
            except StopIteration:
                if new_epoch:
                    raise
                new_epoch = True
                continue
            self.epochs += new_epoch
            self.delivered += 1
            return batch


def _reason(error: BaseException, batches: _Batches) -> str:
    """An error in one line.

    An error that came from a worker has two tracebacks in its text; its last line says what happened. When a worker
    dies, what torch's queue raises is accidental: ``EOFError``, ``ConnectionResetError`` and others, with or without
    the error that names the death.
    """
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    else:
        text = f"{type(error).__name__}: {text}"
        cause: BaseException | None = error
        while cause is not None and not any(words in str(cause) for words in WORKER_DIED):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            text = f"{type(cause).__name__}: {cause}"
        elif batches.exit_codes or (batches.has_workers and isinstance(error, (EOFError, ConnectionError))):
            codes = "".join(f"exit code {code}, " for code in batches.exit_codes[:1])
            text = f"a worker exited unexpectedly ({codes}{text})"
    return " ".join(text.split())[:MAX_ERROR]


class _Consumer:
    """Takes the place of a training loop: counts each batch, copies it to the device, and sleeps for the step."""

    def __init__(self, batch_size: int, plan: _Plan) -> None:
        self._batch_size = batch_size
        self._plan = plan
        self._moved: list[torch.Tensor] = []  # lives until the next batch is there, as in a training loop
        self.reset()

    def reset(self) -> None:
        """Forgets what was counted."""
        self.samples = 0
        self.nbytes = 0
        self.step_s = 0.0

    def __call__(self, batch: Batch) -> None:
        found = list(tensors(batch))
        self.samples += count(batch, self._batch_size)
        self.nbytes += sum(_nbytes(t) for t in found)
        if self._plan.device is not None:
            self._moved = [t.to(self._plan.device, non_blocking=True) for t in found]
        if self._plan.step_s:
            began = time.perf_counter()
            time.sleep(self._plan.step_s)  # like a step on the accelerator: the process does nothing
            self.step_s += time.perf_counter() - began


def _loop(batches: _Batches, loader: LoaderLike, plan: _Plan) -> Rates:
    clock = time.perf_counter
    consume = _Consumer(loader.batch_size or 1, plan)
    waits = array("d")
    if plan.device is not None:
        torch.zeros(1).to(plan.device)  # starts the device's context, which is not the loader's time
        synchronize()
    plan.progress(f"{plan.prefix}the first batch")
    called = clock()
    batch = batches.next()
    first_s = clock() - called
    consume(batch)
    if plan.device is not None:
        synchronize()
    consume.reset()
    began = reported = asked = clock()
    ended = ""
    while len(waits) < plan.batches:
        if asked - called >= plan.time_limit_s:
            ended = f"{plan.time_limit_s:g} s were over (--time-limit)"
            break
        try:
            batch = batches.next()
        except StopIteration:
            ended = "another epoch gave no batch"
            break
        waits.append(clock() - asked)
        consume(batch)
        asked = clock()
        if asked - reported >= PROGRESS_S:
            reported = asked
            rate = len(waits) / (asked - began)
            plan.progress(f"{plan.prefix}batch {len(waits):,} of {plan.batches:,}, {rate:,.1f} batches/s")
    if plan.device is not None:
        synchronize()
        asked = clock()
    ranked = sorted(waits)
    p50, p95, p99 = (ranked[math.ceil(p * len(ranked)) - 1] if ranked else None for p in (0.5, 0.95, 0.99))
    return Rates(
        first_batch_s=first_s,
        batches=len(waits),
        samples=consume.samples,
        nbytes=consume.nbytes,
        seconds=asked - began,
        epochs=batches.epochs,
        wait_s=sum(waits),
        step_s=consume.step_s,
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


def _engine(loader: DataLoader[Batch]) -> str:
    get = getattr(loader._get_iterator, "__func__", None)
    if get is torch_get_iterator:
        return "torch"
    return "stoker" if isinstance(loader, StokerDataLoader) or active() or get is get_iterator else "torch"


def _notes(loader: DataLoader[Batch], rates: Rates, wanted: int) -> Iterator[str]:
    """What a reader of the numbers should know about them."""
    if rates.ended:
        yield f"{rates.batches:,} of {wanted:,} batches were measured: {rates.ended}"
    if rates.epochs > 1:
        yield f"an epoch is shorter than that: {rates.epochs:,} were begun, and the waits between them count"
    ready = int(loader.num_workers) * (loader.prefetch_factor or 0)
    if rates.batches and ready > READY_SHARE * rates.batches:
        yield f"up to {ready:,} of these {rates.batches:,} batches were ready when the clock began: use a larger -n"
    if not rates.nbytes and rates.batches:
        yield "there is no tensor in the batches, so no bytes to count"
    if _engine(loader) == "torch" and worker_word(getattr(loader, "worker_method", "process")) != "process":
        yield "torch's workers are processes: worker_method is stoker's"
