"""``stoker stats`` and ``stoker.mean_std``: mean and std of each channel of a dataset's images."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from ..core import output
from ..core.errors import StokerError, UsageError
from ..core.progress import Progress, samples_done
from ..core.terminal import counted, human_seconds, printable, table
from ..core.types import Index, JsonObject, LoaderLike
from ..loader.auto.tasks import keys_of
from ..loader.variant import as_loader, find
from ..workers.faults.policy import Failure, called
from . import arguments
from .image_record import ImageRecord, joined, record_in
from .sweep import SEED, Sweep

SCHEMA = 2
TASK_SAMPLES = 16  # samples per task
SHOWN = 10  # most shapes in the text; JSON has all
LAYOUTS = ("CHW", "HWC")
NO_IMAGE = "NoImage: "


@arguments.command("stats")
@arguments.target
@click.option("--key", metavar="NAME", help="Where a sample has its image: a dict key, a tuple index or a field name.")
@click.option("--samples", type=arguments.COUNT, metavar="N", help="Read N random samples only.")
@click.option("--layout", type=click.Choice(LAYOUTS), help="Position of the channels, if the guess is wrong.")
@arguments.num_workers
@arguments.json_file
def command(
    target: str,
    key: str | None,
    samples: int | None,
    layout: str | None,
    num_workers: int | str,
    json_path: Path | None,
) -> int:
    """Mean and std of an image dataset.

    TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name. Measure the
    images as Normalize gets them: without Normalize itself. stoker verify lists samples that cannot be read.

    \b
    Examples:
      stoker stats train.py:train_set
      stoker stats mypackage.data:make_loader --samples 5000 --key image --json stats.json
    """
    read = functools.partial(mean_std, key=key, samples=samples, layout=layout, num_workers=num_workers, name=target)
    with Progress(target) as progress:
        found = read(find(target), progress=progress)
    output.give(found.as_dict(), json_path, lambda: print(found))
    return 0


@dataclass(frozen=True)
class ImageStats:
    """The result of ``mean_std``: one number per channel, over finite values, in the data's own unit.

    ``scale`` is 255 for uint8 and 1 for other types; ``normalize`` divides by it, as torchvision's ToTensor does.
    ``samples`` includes the ``failed`` ones, which could not be read. ``images`` counts images in the statistics.
    """

    name: str
    samples: int
    failed: int
    images: int
    scale: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min: tuple[float, ...]
    max: tuple[float, ...]
    nan: tuple[int, ...]
    inf: tuple[int, ...]
    shapes: dict[str, int]
    types: dict[str, int]
    notes: tuple[str, ...]
    seconds: float

    @property
    def normalize(self) -> str:
        """The code of a torchvision transform: ``Normalize(mean=[...], std=[...])``."""
        mean, std = (", ".join(f"{x / self.scale:.6g}" for x in values) for values in (self.mean, self.std))
        return f"Normalize(mean=[{mean}], std=[{std}])"

    def as_dict(self) -> JsonObject:
        """Returns the result for JSON, with None instead of NaN."""
        numbers = {name: [None if x != x else x for x in getattr(self, name)] for name in ("mean", "std", "min", "max")}
        return {"schema": SCHEMA, **asdict(self), **numbers, "normalize": self.normalize}

    def __str__(self) -> str:
        columns = (self.mean, self.std, self.min, self.max, self.nan, self.inf)
        rows = [[str(i), *(f"{x:.6g}" for x in values)] for i, values in enumerate(zip(*columns, strict=True))]
        uint8 = ", for values / 255, as torchvision's ToTensor makes them from uint8" if self.scale == 255 else ""
        out = [f"{self.name}: {counted(self.samples, 'sample')}, {human_seconds(self.seconds)}", ""]
        out += [table(["channel", "mean", "std", "min", "max", "NaN", "Inf"], rows, 120), self.normalize + uint8, ""]
        out += [f"shapes: {_most_common(self.shapes)}", f"types: {_most_common(self.types)}"]
        return "\n".join([*out, *(f"note: {note}" for note in self.notes)])


def mean_std(
    loader: object,
    *,
    key: str | None = None,
    samples: int | None = None,
    layout: str | None = None,
    num_workers: int | str = "auto",
    name: str = "the dataset",
    progress: Callable[[str], None] | None = None,
) -> ImageStats:
    """Computes mean and standard deviation of each channel of a dataset's images.

    Each sample of the dataset is read once, before ``collate_fn``. docs/stats.md says what counts.

    Args:
        loader: a DataLoader (stoker's or torch's), a map-style Dataset, or a callable without arguments that returns
            one. Images may be of any size and real type.
        key: the image in a sample: a dict's key, a tuple's index or a field's name. None: the first image.
        samples: how many to read, drawn at random without replacement; every call draws the same ones. None: all.
        layout: "CHW" or "HWC", if the guess is wrong.
        num_workers: worker processes. 0 reads in this process; "auto" begins with one per core and adapts.
        name: name of the dataset in the result and in errors.
        progress: called with a line of text from time to time.

    Raises:
        UsageError: a wrong argument, an empty or iterable dataset, or no sample with an image.
        StokerError: no sample could be read.

    Example:
        >>> found = mean_std([np.zeros((3, 2, 2)), np.ones((3, 2, 2))], layout="CHW", num_workers=0)
        >>> found.mean, found.std, found.normalize
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 'Normalize(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])')
    """
    if layout not in (None, *LAYOUTS):
        raise UsageError(f"layout must be one of {', '.join(LAYOUTS)}, or None, not {layout!r}")
    inner = as_loader(loader, name=name)
    if isinstance(inner.dataset, IterableDataset):
        raise UsageError(f"{name} is an iterable dataset, whose samples cannot be read by their index")
    keys = _drawn(keys_of(inner), samples)
    sweep = Sweep(inner, keys, functools.partial(record_in, key, layout), joined, num_workers, TASK_SAMPLES)
    record = ImageRecord(0)
    with closing(sweep.results()) as results:
        for part in results:
            record, failed = joined([record, part]), len(sweep.failures)
            if progress is not None:
                progress(samples_done(record.samples + failed, len(keys), sweep.seconds, failed))
    if not record.groups:
        raise _nothing_read(name, sweep.failed)
    return _result(name, record, sweep, tuple(_notes(record, sweep.failed, inner)))


def _drawn(keys: Sequence[Index], samples: int | None) -> Sequence[Index]:
    if samples is None or samples >= len(keys):
        return keys
    return [keys[i] for i in sorted(random.Random(SEED).sample(range(len(keys)), samples))]


def _result(name: str, record: ImageRecord, sweep: Sweep, notes: tuple[str, ...]) -> ImageStats:
    (_, scale), g = max(record.groups.items(), key=lambda item: (item[1].images, item[0]))
    std, unknown = np.sqrt(g.m2 / np.maximum(g.n, 1)), np.where(g.n == 0, np.nan, 0.0)
    numbers = (tuple((x + unknown).tolist()) for x in (g.mean, std, g.low, g.high))
    return ImageStats(
        name=name,
        samples=record.samples + len(sweep.failed),
        failed=len(sweep.failed),
        images=g.images,
        scale=scale,
        **dict(zip(("mean", "std", "min", "max"), numbers, strict=True)),
        nan=tuple(g.nan.tolist()),
        inf=tuple(g.inf.tolist()),
        shapes=dict(record.shapes),
        types=dict(record.types),
        notes=notes,
        seconds=sweep.seconds,
    )


def _nothing_read(name: str, failed: Sequence[Failure]) -> StokerError:
    if not failed:
        return UsageError(f"{name} is empty")
    for f in failed:
        if f.error.startswith(NO_IMAGE):
            return UsageError(f"{name} has no image in its samples; sample {f.index}: {f.error.removeprefix(NO_IMAGE)}")
    where = called(failed[0].index, failed[0].file)
    return StokerError(f"none of the {len(failed):,} samples of {name} could be read; {where}: {failed[0].error}")


def _notes(record: ImageRecord, failed: Sequence[Failure], loader: LoaderLike) -> Iterator[str]:
    if failed:
        first = f"{called(failed[0].index, failed[0].file)}: {failed[0].error}"
        left_out = f"{'is' if len(failed) == 1 else 'are'} left out; the first is {first} (stoker verify lists all)"
        yield printable(f"{counted(len(failed), 'sample')} could not be read and {left_out}")
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler, SubsetRandomSampler)):
        yield f"the loader's {type(loader.sampler).__name__} is ignored: each sample counts once"
    if len(record.groups) > 1:
        most = max(g.images for g in record.groups.values())
        others = sum(g.images for g in record.groups.values()) - most
        yield f"{counted(others, 'image')} with other channel counts or types skipped: one Normalize does not fit all"


def _most_common(counts: dict[str, int]) -> str:
    more = f" and {len(counts) - SHOWN:,} others" if len(counts) > SHOWN else ""
    return ", ".join(f"{name} ({n:,})" for name, n in Counter(counts).most_common(SHOWN)) + more
