"""``mean_std``: reads a dataset's images once, in workers of stoker's own loader, and merges what they send."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import (
    Dataset,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from ...core.errors import StokerError, UsageError
from ...core.progress import samples_done
from ...core.types import LoaderLike
from ...loader.auto.tasks import keys_of
from ...loader.variant import as_loader
from ...workers.faults.policy import Failure
from ...workers.faults.sample_name import called
from ..sweep import Sweep
from .images import image_in, record_of
from .moments import Group, Record, joined
from .result import Channels, Failed, ImageStats

TASK_SAMPLES = 16  # in one record
LAYOUTS = ("CHW", "HWC")


def mean_std(
    loader: TorchDataLoader[Any] | Dataset[Any] | Callable[[], Any],
    *,
    key: str | None = None,
    samples: int | None = None,
    seed: int = 0,
    layout: str | None = None,
    num_workers: int | str = "auto",
    name: str = "the dataset",
    progress: Callable[[str], None] | None = None,
) -> ImageStats:
    """Mean and standard deviation of each channel of a dataset's images, and its unreadable samples.

    Each sample of the dataset is read once, before ``collate_fn`` and with the random augmentation that the dataset
    does. Of the loader's samplers only a ``SubsetRandomSampler`` counts; other orders and weights are ignored.

    Args:
        loader: a DataLoader (stoker's or torch's), a Dataset, or a callable without arguments that returns one. Images
            may be of any size and real type: tensors, arrays or PIL images, [C, H, W], [H, W, C], [H, W], or batches of
            these. Channels are the shorter outer axis; if both are equal a tensor's first axis, an array's last.
        key: the image in a sample: a dict's key, a tuple's index or a field's name, with dots to go inside.
            None: the first PIL image, or floating or uint8 tensor or array of 2 to 4 dimensions.
        samples: how many to read, drawn at random without replacement; of an iterable dataset the first. None: all.
        seed: for the draw of ``samples`` and for augmentation.
        layout: "CHW" or "HWC", where the rule above is wrong. PIL images are always HWC.
        num_workers: worker processes; 0 reads in this process; "auto" begins with one a core and adapts. The count does
            not change a bit of the result, except that 0 changes a dataset's random augmentation.
        name: what the result and errors call it.
        progress: called with a line of text now and then.

    Returns:
        An ``ImageStats``. Its ``mean`` and ``std`` (the population's) are in the data's own unit, ``normalize`` is the
        line to paste, in which uint8 is divided by 255, ``str()`` has all of it as text.

    Raises:
        UsageError: a wrong argument, an empty dataset, or no image in any sample.
        StokerError: no sample could be read, or an iterable dataset raised. If only some samples cannot be read,
            ``failed`` lists them, also those that kill their worker process.

    Example:
        >>> found = mean_std([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)], num_workers=0)
        >>> found.mean, found.std, found.normalize
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 'Normalize(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])')

    Source:
        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    _check(samples, seed, layout, num_workers)
    return _measured(as_loader(loader, name=name), name, key, samples, seed, layout, num_workers, progress)


def _check(samples: int | None, seed: int, layout: str | None, num_workers: int | str) -> None:
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise UsageError(f"samples={samples!r}: a whole number, at least 1, or None for all")
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise UsageError(f"seed={seed!r}: a whole number from 0 to 2**63 - 1")
    if layout not in (None, *LAYOUTS):
        raise UsageError(f"layout={layout!r}: one of {', '.join(LAYOUTS)}, or None")
    if num_workers != "auto" and (not isinstance(num_workers, int) or num_workers < 0):
        raise UsageError(f'num_workers={num_workers!r}: a whole number, at least 0, or "auto"')


def _measured(
    inner: LoaderLike,
    name: str,
    key: str | None,
    samples: int | None,
    seed: int,
    layout: str | None,
    num_workers: int | str,
    progress: Callable[[str], None] | None,
) -> ImageStats:
    keys, of = _keys(inner, samples, seed)
    if of is None and isinstance(inner.dataset, IterDataPipe) and num_workers not in ("auto", 0, 1):
        raise UsageError("an IterDataPipe is read by one worker here: leave out num_workers (--num-workers)")
    read = functools.partial(_record, key, layout, of is None)
    sweep = Sweep(inner, keys, read, joined, num_workers, TASK_SAMPLES, seed)
    record = Record(0)

    def take(part: Record) -> None:
        nonlocal record
        record = joined([record, part])

    def report() -> None:
        done = record.samples + len(sweep.failed)
        if progress is not None:
            progress(samples_done(done, samples if of is None else len(keys), sweep.seconds, len(sweep.failed)))

    _run(sweep, name, take, report)
    failed = tuple(Failed(f.index, f.file or None, f.error.removeprefix("NoImage: ")) for f in sweep.failed)
    if not record.groups:
        _raise_nothing_read(name, sweep.failed)
    groups = [_channels(*kind, group) for kind, group in record.groups.items()]
    return ImageStats(
        name,
        tuple(sorted(groups, key=lambda g: (-g.images, g.channels, g.scale))),
        record.samples + len(failed),
        of,
        failed,
        dict(record.shapes),
        dict(record.dtypes),
        dict(record.layouts),
        tuple(_notes(record, inner, len(keys) if of is not None else 0, of, seed, sweep.workers)),
        sweep.seconds,
        sweep.workers,
    )


def _run(sweep: Sweep, name: str, take: Callable[[Record], None], report: Callable[[], None]) -> None:
    """Reads all samples. An error of a sample is in its record; any other ends the reading."""
    try:
        sweep.run(take, report)
    except StokerError:
        raise
    except Exception as e:  # of an iterable dataset, or of worker_init_fn
        last_line = (str(e).strip().splitlines() or [""])[-1]  # after the traceback of an error from a worker
        message = f"{type(e).__name__}: {last_line.removeprefix(f'{type(e).__name__}: ')}"
        raise StokerError(f"reading {name} failed: {message}") from e


def _record(key: str | None, layout: str | None, streams: bool, source: Any, index: Any) -> Record:
    """In a worker: the record of a sample of a dataset, or of a sample of a stream."""
    return record_of(image_in(source if streams else source[index], key), layout)


def _keys(loader: LoaderLike, samples: int | None, seed: int) -> tuple[Any, int | None]:
    """The samples to read, and how many there are; None for an iterable dataset."""
    if isinstance(loader.dataset, IterableDataset):
        return samples, None
    keys = keys_of(loader)
    of = len(keys)
    if samples is not None and samples < of:
        keys = [keys[i] for i in sorted(random.Random(seed).sample(range(of), samples))]
    return keys, of


def _raise_nothing_read(name: str, failed: Sequence[Failure]) -> NoReturn:
    """Raises the error that says why there is no result."""
    if not failed:
        raise UsageError(f"{name} is empty")
    for f in failed:
        if f.error.startswith("NoImage: "):
            raise UsageError(f"{name} has no image in its samples; sample {f.index}: {f.error[len('NoImage: ') :]}")
    where = called(failed[0].index, failed[0].file)
    raise StokerError(f"none of the {len(failed):,} samples of {name} could be read; {where}: {failed[0].error}")


def _channels(channels: int, scale: int, g: Group) -> Channels:
    def floats(x: Any) -> tuple[float, ...]:
        return tuple(np.where(g.n == 0, np.nan, x).tolist())

    return Channels(
        channels,
        scale,
        g.images,
        tuple(int(n) for n in g.n),
        floats(g.mean),
        floats(np.sqrt(g.m2 / np.maximum(g.n, 1))),
        floats(g.low),
        floats(g.high),
        tuple(g.nan.tolist()),
        tuple(g.inf.tolist()),
    )


def _notes(record: Record, loader: LoaderLike, read: int, of: int | None, seed: int, workers: int) -> list[str]:
    """What a reader of the numbers should know about them."""
    out = []
    if of is None and workers > 1:
        out.append(f"{workers} workers read the stream: samples that they do not share out were read {workers} times")
    if of is not None and read < of:
        out.append(f"a random subset, {read / of:.2g} of all, drawn by seed {seed}")
    if of is not None and not isinstance(loader.sampler, (RandomSampler, SequentialSampler, SubsetRandomSampler)):
        out.append(f"the loader's {type(loader.sampler).__name__} is ignored: each sample counts once")
    if len(record.groups) > 1:
        out.append("images of several channel counts or types: one Normalize does not fit all of them")
    if "CHW" in record.layouts and "HWC" in record.layouts:
        out.append("channels are first in some samples and last in others: --layout (layout=) decides it for all")
    return out
