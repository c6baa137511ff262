"""``stoker verify``: reads a whole dataset in parallel and lists the samples that cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from torch.utils.data import IterableDataset, Subset

from ..core import output
from ..core.errors import StokerError, UsageError
from ..core.files import check_writable
from ..core.progress import Progress
from ..core.terminal import printable
from ..core.types import Index, JsonObject, LoaderLike
from ..loader.auto.tasks import keys_of
from ..loader.variant import as_loader, find
from ..workers.faults.error_log import quarantine
from ..workers.faults.policy import Failure
from ..workers.fetcher import staged_in
from . import arguments
from .sweep import Sweep

TASK_SAMPLES = 8  # samples per task
SHOWN = 20  # most samples in the text; --json and --quarantine have all


@arguments.command("verify")
@arguments.target
@arguments.num_workers
@click.option(
    "--sample-timeout",
    type=arguments.SECONDS,
    help="Seconds after which a sample counts as broken.  [default: no limit]",
)
@click.option("--quarantine", "listing", type=arguments.FILE, help="Append broken samples to this file.")
@arguments.json_file
def command(
    target: str, num_workers: int | str, sample_timeout: float | None, listing: Path | None, json_path: Path | None
) -> int:
    """Read a whole dataset and list the samples that are broken.

    TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name. Each sample
    is loaded once; of a stoker.Staged the source is read, not the cache. Samples that kill their worker are found too,
    and with --sample-timeout those that hang. Exit code 0: all samples could be read; 1: some could not.

    \b
    Examples:
      stoker verify train.py:train_set
      stoker verify train.py:make_loader --num-workers 8 --json broken.json
      stoker verify train.py:train_set --quarantine broken.jsonl
    """
    if listing is not None:
        check_writable(listing)
    loader = as_loader(find(target), name=target)
    with Progress(target, doing="reading") as progress:
        found = verify(loader, num_workers, progress.samples, sample_timeout)
    if listing is not None and found.failed:
        try:
            quarantine(listing, found.failed, type(loader.dataset).__name__)
        except OSError as e:
            raise UsageError(f"cannot write {listing}: {e.strerror or e}") from e
    output.give(found.as_dict(), json_path, lambda: print(_text(found)))
    return int(bool(found.failed))


@dataclass
class Verified:
    """The result of ``verify``. ``read`` includes the samples that failed."""

    samples: int
    read: int = 0
    failed: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    workers: int = 0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.read / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> JsonObject:
        failed = [f._asdict() for f in self.failed]
        return {"schema": 1, **asdict(self), "failed": failed, "samples_per_s": self.rate}


def verify(
    loader: LoaderLike,
    workers: int | str = "auto",
    on_progress: Callable[[int, int, int], None] = lambda done, total, failed: None,
    sample_timeout: float | None = None,
) -> Verified:
    """Reads each sample of a loader's dataset once, without its collate function and without a cache: those of its
    ``SubsetRandomSampler``, or all. 0 workers read in this process, which a sample that kills its process would end.
    ``on_progress`` is called from time to time with the number of samples read, in total, and failed.

    Raises:
        UsageError: the dataset is iterable, or ``sample_timeout`` is given without workers.
        StokerError: workers died without a sample to blame.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"{type(loader.dataset).__name__} is an iterable dataset, which ends at its first error, so the remaining "
            "samples cannot be read"
        )
    keys = keys_of(loader)
    if not keys:
        return Verified(0)
    sweep = Sweep(loader, keys, _read, len, workers, TASK_SAMPLES, sample_timeout)
    on_progress(0, len(keys), 0)
    good = 0
    with closing(sweep.results()) as results:
        for n in results:
            good += n
            on_progress(good + len(sweep.failures), len(keys), len(sweep.failures))
    found = Verified(len(keys), good + len(sweep.failures), sweep.failed, sweep.seconds, sweep.workers)
    if found.read != found.samples:
        raise StokerError(f"only {found.read:,} of {found.samples:,} samples were read, for an unknown reason")
    return found


def _read(dataset: Any, key: Index) -> int:
    """Loads a sample and drops it. Reads a staged dataset's source instead of its cache."""
    if staged_in(dataset) is None:
        dataset[key]
    else:
        while type(dataset) is Subset:
            dataset, key = dataset.dataset, dataset.indices[key]
        dataset._whole(key)
    return 1


def _text(found: Verified) -> str:
    rate = f"{found.rate:,.0f} samples/s" if found.read else "nothing to read"
    if not found.failed:
        return f"all {found.samples:,} samples could be read ({rate})"
    lines = [f"{len(found.failed):,} of {found.samples:,} samples are broken ({rate})"]
    kinds = Counter(f.error.partition(":")[0] for f in found.failed)
    lines.append("  " + ", ".join(f"{n:,} {printable(kind)}" for kind, n in kinds.most_common(SHOWN)))
    lines += [printable(f"{f.index}: {f.file + ': ' if f.file else ''}{f.error}") for f in found.failed[:SHOWN]]
    if len(found.failed) > SHOWN:
        lines.append(f"... and {len(found.failed) - SHOWN:,} more: --json FILE lists them all")
    return "\n".join(lines)
