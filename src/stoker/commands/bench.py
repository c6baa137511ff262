"""``stoker bench`` and ``stoker.bench.measure``: how fast a loader is as it stands.

Runs an empty loop over the batches of a copy of the loader. Random state advances as iterating advances it, and no
further.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import textwrap
import time
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import click
import torch
from torch.utils.data import DataLoader

from ..core import output, processes, resources
from ..core.errors import StokerError, UsageError
from ..core.nested import tensors
from ..core.options import worker_word
from ..core.progress import Progress
from ..core.terminal import counted, human_seconds, rate, table
from ..core.types import Batch, JsonObject
from ..loader.dataloader import DataLoader as StokerDataLoader
from ..loader.describe import count, settings_of
from ..loader.engine import get_iterator, torch_get_iterator
from ..loader.variant import ENGINES, as_loader, find, variant
from ..staging.install import active
from . import arguments

BATCHES = 100
TIME_LIMIT_S = 60.0
PROGRESS_S = 0.25  # seconds between two progress texts
READY_SHARE = 0.25  # a note warns if a larger share of the batches may have been ready before the clock started
SCHEMA = 2
MAX_ERROR = 300  # characters of an error
WORKER_DIED = ("exited unexpectedly", "killed by signal")  # torch's texts


@arguments.command("bench")
@arguments.target
@click.option(
    "-n",
    "batches",
    type=arguments.COUNT,
    metavar="N",
    default=BATCHES,
    show_default=True,
    help="Batches to measure after the first one.",
)
@click.option("--engine", type=click.Choice(ENGINES), help="In place of the loader's own.")
@click.option("--num-workers", type=click.IntRange(min=0), metavar="N", help="In place of the loader's own.")
@click.option("--batch-size", type=arguments.COUNT, metavar="N", help="In place of the loader's own; 32 for a dataset.")
@arguments.time_limit(default=TIME_LIMIT_S)
@arguments.json_file
def command(
    target: str,
    batches: int,
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
      stoker bench train.py:make_loader --json bench.json
    """
    loader = variant(as_loader(find(target), name=target), num_workers, batch_size, engine)
    with Progress(target, time_limit) as progress:
        found = measure(loader, batches, time_limit, target, progress)
    output.give(found.as_dict(), json_path, lambda: print(found))
    return 0


@dataclass(frozen=True)
class BenchResult:
    """The result of ``measure``. All numbers except ``first_batch_s`` and ``epochs`` leave out the first batch.

    ``first_batch_s`` is the time from ``iter()`` to the first batch, ``seconds`` the loop after it. ``wait_s`` is the
    time in ``next()`` and, for later epochs, in ``iter()``. ``p50_s``, ``p95_s`` and ``p99_s`` are percentiles of the
    wait for one batch. ``nbytes`` sums over all tensors. ``epochs`` counts those with a batch, including the first.
    ``machine`` is as in ``stoker check --json``.
    """

    name: str
    settings: JsonObject
    first_batch_s: float
    batches: int
    samples: int
    nbytes: int
    seconds: float
    epochs: int
    wait_s: float
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    notes: tuple[str, ...]
    machine: JsonObject

    @property
    def samples_per_s(self) -> float | None:
        return self._per_s(self.samples)

    @property
    def batches_per_s(self) -> float | None:
        return self._per_s(self.batches)

    @property
    def mb_per_s(self) -> float | None:
        """Megabytes (1e6 bytes) of tensors per second."""
        return self._per_s(self.nbytes / 1e6)

    def _per_s(self, amount: float) -> float | None:
        return amount / self.seconds if self.batches else None

    def as_dict(self) -> JsonObject:
        """Returns the result for JSON; ``docs/bench.md`` lists the keys."""
        rates = {name: getattr(self, name) for name in ("samples_per_s", "batches_per_s", "mb_per_s")}
        return {"schema": SCHEMA, "kind": "bench", **dataclasses.asdict(self), **rates}

    def __str__(self) -> str:
        s = self.settings
        workers = counted(s["num_workers"], "worker") + (" (auto)" if s["auto"] else "")
        size = f", batches of {s['batch_size']:,}" if s["batch_size"] else ""
        waits = (("wait p50", self.p50_s), ("wait p95", self.p95_s), ("wait p99", self.p99_s))
        rows = [
            ("first batch", human_seconds(self.first_batch_s)),
            ("samples/s", rate(self.samples_per_s)),
            ("batches/s", rate(self.batches_per_s)),
            ("MB/s", rate(self.mb_per_s)),
            *((label, "-" if x is None else human_seconds(x)) for label, x in waits),
            ("batches", f"{self.batches:,}"),
            ("samples", f"{self.samples:,}"),
            ("epochs begun", f"{self.epochs:,}"),
            ("time", human_seconds(self.seconds)),
        ]
        head = textwrap.wrap(f"{self.name}: {s['engine']}'s engine, {workers}{size}", 80, break_long_words=False)
        lines = [*head, "", table(["", "loader"], rows, 80), "", "rates and waits exclude the first batch"]
        return "\n".join([*lines, *(textwrap.fill(f"note: {note}", 80) for note in self.notes)])


def measure(
    loader: DataLoader[Batch],
    batches: int = BATCHES,
    budget_s: float = TIME_LIMIT_S,
    name: str = "the loader",
    progress: Callable[[str], None] | None = None,
) -> BenchResult:
    """Measures how fast ``loader`` is, with its own settings and without a model.

    Args:
        loader: torch's or stoker's, with its own engine and settings.
        batches: number of batches to measure after the first one, over several epochs if necessary.
        budget_s: seconds after which no further batch is requested.
        name: name of the loader in errors and in the result.
        progress: called with a line of text between two batches, at most four times per second.

    Raises:
        UsageError: the loader has no batch, or an argument is wrong.
        StokerError: a sample or a worker failed. The workers have ended.

    Example:
        >>> found = measure(DataLoader(range(100), batch_size=10), batches=5)
        >>> found.batches, found.samples, found.nbytes
        (5, 50, 400)
    """
    if batches < 1:
        raise UsageError(f"batches must be at least 1, not {batches}")
    if not 0 < budget_s < math.inf:
        raise UsageError(f"budget_s must be a number of seconds, not {budget_s}")
    source = _Batches(variant(loader))
    try:
        with closing(source.batches()) as delivered:
            found = _loop(source, delivered, batches, budget_s, name, progress or (lambda _: None))
    except StopIteration:
        reason = ": drop_last drops a batch that is not full" if loader.drop_last else ""
        raise UsageError(f"{name} is empty: it yielded no batch{reason}") from None
    except (Exception, SystemExit) as e:
        # torch notices a worker's death in a SIGCHLD handler, which may raise between any two instructions until the
        # iterator has been shut down. So errors are translated only here, after that.
        after = f"after {source.delivered:,} batches" if source.delivered else "before the first batch"
        raise StokerError(f"{name} failed {after}: {_reason(e, source)}") from e
    return found


class _Batches:
    """A loader's batches, epoch after epoch. ``epochs`` counts epochs with a batch, ``delivered`` batches so far."""

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self.loader = loader
        self._iterator: Iterator[Batch] | None = None
        self.epochs = 0
        self.delivered = 0
        self.workers: list[BaseProcess] = []  # set when ``batches`` ends

    def batches(self) -> Generator[Batch, None, None]:
        """Yields batches until an epoch has none. Once it returns, raises or is closed, its workers have ended."""
        before = -1
        try:
            while self.delivered > before:
                before = self.delivered
                self._iterator = iter(self.loader)
                for batch in self._iterator:
                    self.epochs += self.delivered == before
                    self.delivered += 1
                    yield batch
                    del batch  # do not keep it alive while waiting for the next one
        finally:
            self._end()

    def _end(self) -> None:
        iterator = self._iterator
        self.workers = [w for w in getattr(iterator, "_workers", ()) if isinstance(w, BaseProcess)]
        self._iterator = self.loader._iterator = None
        with ExitStack() as stack:  # runs callbacks last to first, each one even if others raise
            stack.callback(processes.join, self.workers)
            for method in ("close", "_shutdown_workers"):  # ``close``: a subclass's iterator may be a generator
                if hasattr(iterator, method):
                    stack.callback(getattr(iterator, method))


def _reason(error: BaseException, batches: _Batches) -> str:
    """Describes an error in one line.

    An error from a worker has two tracebacks in its text, and the last line says what happened. When a worker dies, the
    exception from torch's queue varies (``EOFError``, ``ConnectionResetError``, ...). The error that reports the death
    may be in its chain or not."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    else:
        text = f"{type(error).__name__}: {text}"
        cause: BaseException | None = error
        while cause is not None and not any(words in str(cause) for words in WORKER_DIED):
            cause = cause.__cause__ or cause.__context__
        codes = [w.exitcode for w in batches.workers if w.exitcode and w.exitcode != -signal.SIGTERM]
        if cause is not None:
            text = f"{type(cause).__name__}: {cause}"
        elif codes or (batches.workers and isinstance(error, (EOFError, ConnectionError))):
            code = f"exit code {codes[0]}, " if codes else ""
            text = f"a worker exited unexpectedly ({code}{text})"
    return " ".join(text.split())[:MAX_ERROR]


def _loop(
    source: _Batches, batches: Iterator[Batch], wanted: int, budget_s: float, name: str, progress: Callable[[str], None]
) -> BenchResult:
    loader, clock = source.loader, time.perf_counter
    waits = array("d")
    samples = nbytes = 0
    progress("the first batch")
    called = clock()
    next(batches)
    began = reported = asked = clock()
    ended = ""
    while len(waits) < wanted:
        if asked - called >= budget_s:
            ended = f"the --time-limit of {budget_s:g} s was reached"
            break
        try:
            batch = next(batches)
        except StopIteration:
            ended = "another epoch yielded no batch"
            break
        waits.append(clock() - asked)
        samples += count(batch, loader.batch_size or 1)
        nbytes += sum(map(_nbytes, tensors(batch)))
        asked = clock()
        if asked - reported >= PROGRESS_S:
            reported = asked
            progress(f"batch {len(waits):,} of {wanted:,}, {len(waits) / (asked - began):,.1f} batches/s")
    ranked = sorted(waits)
    p50, p95, p99 = (ranked[math.ceil(p * len(ranked)) - 1] if ranked else None for p in (0.5, 0.95, 0.99))
    return BenchResult(
        name=name,
        settings={**settings_of(loader), "engine": _engine(loader)},
        first_batch_s=began - called,
        batches=len(waits),
        samples=samples,
        nbytes=nbytes,
        seconds=asked - began,
        epochs=source.epochs,
        wait_s=sum(waits),
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        notes=tuple(_notes(loader, ended, source.epochs, len(waits), wanted)),
        machine=resources.read().as_dict(),
    )


def _nbytes(t: torch.Tensor) -> int:
    try:
        return t.nbytes
    except RuntimeError:  # sparse: its values
        return int(t._nnz()) * t.element_size()


def _engine(loader: DataLoader[Batch]) -> str:
    get = getattr(loader._get_iterator, "__func__", None)
    is_ours = isinstance(loader, StokerDataLoader) or active() or get is get_iterator
    return "stoker" if is_ours and get is not torch_get_iterator else "torch"


def _notes(loader: DataLoader[Batch], ended: str, epochs: int, measured: int, wanted: int) -> Iterator[str]:
    if ended:
        yield f"only {measured:,} of {wanted:,} batches were measured: {ended}"
    if epochs > 1:
        yield f"an epoch is shorter than that, so {epochs:,} epochs were started; the waits between them are included"
    ready = int(loader.num_workers) * (loader.prefetch_factor or 0)
    if measured and ready > READY_SHARE * measured:
        yield f"up to {ready:,} of these {measured:,} batches were ready before the measurement began: use a larger -n"
    if _engine(loader) == "torch" and worker_word(getattr(loader, "worker_method", "process")) != "process":
        yield "torch's engine has no worker_method: its workers are always processes"
