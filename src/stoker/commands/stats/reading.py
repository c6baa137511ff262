"""``mean_std``: reads a dataset's images once, in workers of stoker's own loader, and merges what they send."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, IterDataPipe, RandomSampler, SequentialSampler, SubsetRandomSampler

from ...core.errors import StokerError, UsageError, WorkerDiedError
from ...core.random_state import preserved
from ...core.terminal import human_seconds
from ...loader.auto.tasks import keys_of
from ...loader.dataloader import DataLoader
from ...loader.variant import as_loader
from ...sampling import seeding
from .images import Items, Stream, start
from .moments import Group, Record, joined
from .result import Channels, ImageStats

BATCH = 16  # samples in one record
GATHER = 64  # records before they become one
TELL_S = 0.1  # between two words of progress
LAYOUTS = ("CHW", "HWC")


def mean_std(
    loader: Any,
    *,
    key: str | None = None,
    samples: int | None = None,
    seed: int = 0,
    layout: str | None = None,
    num_workers: int | str = "auto",
    name: str = "the dataset",
    progress: Callable[[str], None] | None = None,
) -> ImageStats:
    """Mean and standard deviation of each channel of a dataset's images, and what else its samples show.

    Each sample of the dataset is read once, as the dataset gives it: before ``collate_fn``, and with the random
    augmentation that it does. Only a ``SubsetRandomSampler`` of the loader counts; every other order and weight is left
    aside. The first four samples are read twice, to see whether the dataset is random.

    Args:
        loader: a DataLoader (stoker's or torch's), a Dataset, or a callable without arguments that returns one. Images
            may be of any size and real type: tensors, arrays or PIL images, [C, H, W], [H, W, C], [H, W], or batches of
            these; channels are the first or the last axis, whichever has at most 4 entries while the other has more;
            where that decides nothing the first of a tensor, the shorter one of an array.
        key: what of a sample is the image: a dict's key, a tuple's place or a field's name, with dots to go inside.
            None: the first PIL image, or floating or uint8 tensor or array of 2 to 4 dimensions.
        samples: read so many, drawn at random without replacement; of an iterable dataset the first. None: all.
        seed: for the draw of ``samples`` and for augmentation.
        layout: "CHW" or "HWC", where the rule above is wrong. PIL images are always HWC.
        num_workers: worker processes; 0 reads in this process; "auto" begins with one a core, and changes that while
            it reads if it pays. It changes no bit of the answer, except through a dataset's random augmentation when 0.
        name: what the result and errors call it.
        progress: called with a line of text now and then.

    Returns:
        An ``ImageStats``. Its ``mean`` and ``std`` (the population's) are in the data's own unit, ``normalize`` is the
        line to paste, in which uint8 is divided by 255, ``str()`` has all of it as text.

    Raises:
        UsageError: a wrong argument, an empty dataset, or no image in any sample.
        StokerError: no sample could be read. Some that cannot be are listed in ``failed``.
        WorkerDiedError: a worker process was killed.

    Example:
        >>> found = mean_std([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)], num_workers=0)
        >>> found.mean, found.std, found.normalize
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 'Normalize(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])')

    Source:
        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979; the
        standard error is that of a ratio of cluster totals (Cochran, "Sampling Techniques", 3rd ed., 1977, chapter 6).
    """
    began = time.monotonic()
    _check(samples, seed, layout, num_workers)
    inner = as_loader(loader, name=name)
    streams = isinstance(inner.dataset, IterableDataset)
    reader, of, notes = _reader(inner, key, samples, seed, layout)
    total = samples if streams else len(reader)
    mine = _loader(reader, inner, num_workers, total, seed)
    if streams and mine.num_workers > 1:
        notes.append(
            f"{mine.num_workers} workers read the stream: one that they do not share out was read so many times"
        )
    record = _read(mine, seed, total, progress or (lambda words: None))
    if not record.samples:
        raise UsageError(f"{name} is empty")
    failed = tuple(sorted((*record.failed, *record.imageless), key=lambda f: f.sample))
    if not record.groups:
        if record.imageless:
            first = record.imageless[0]
            raise UsageError(f"{name} has no image in its samples; sample {first.sample}: {first.error}")
        first = failed[0]
        file = f" ({first.file})" if first.file else ""
        where = f"none of the {record.samples:,} samples of {name} could be read; sample {first.sample}{file}"
        raise StokerError(f"{where}: {first.error}")
    part = None if of is None or record.samples >= of else record.samples / of
    groups = [_channels(k, g, part) for k, g in record.groups.items()]
    groups.sort(key=lambda g: (-g.images, g.channels, g.scale))
    return ImageStats(
        name,
        tuple(groups),
        record.samples,
        of,
        failed,
        dict(record.shapes),
        dict(record.dtypes),
        dict(record.layouts),
        tuple(notes + _notes(record, groups, part, samples if streams else None, seed)),
        time.monotonic() - began,
        int(mine.num_workers),
    )


def _check(samples: int | None, seed: int, layout: str | None, num_workers: int | str) -> None:
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise UsageError(f"samples={samples!r}: a whole number, at least 1, or None for all")
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise UsageError(f"seed={seed!r}: a whole number from 0 to 2**63 - 1")
    if layout not in (None, *LAYOUTS):
        raise UsageError(f"layout={layout!r}: one of {', '.join(LAYOUTS)}, or None")
    if num_workers != "auto" and (not isinstance(num_workers, int) or num_workers < 0):
        raise UsageError(f'num_workers={num_workers!r}: a whole number, at least 0, or "auto"')


def _reader(
    loader: Any, key: str | None, samples: int | None, seed: int, layout: str | None
) -> tuple[Any, int | None, list[str]]:
    """What yields the records, how many samples there would be, and what there is to say."""
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader.dataset, samples, key, layout), None, []
    keys, notes = keys_of(loader), []
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler, SubsetRandomSampler)):
        notes.append(f"the loader's {type(loader.sampler).__name__} is left aside: each sample counts once")
    of = len(keys)
    if samples is not None and samples < of:
        keys = [keys[i] for i in sorted(random.Random(seed).sample(range(of), samples))]
    return Items(loader.dataset, keys, key, layout), of, notes


def _loader(reader: Any, inner: Any, num_workers: int | str, total: int | None, seed: int) -> DataLoader[Any]:
    streams = isinstance(reader, Stream)
    if streams:
        many: int | str = 1 if num_workers == "auto" else num_workers
        if isinstance(reader.dataset, IterDataPipe) and int(many) > 1:
            raise UsageError("an IterDataPipe is read by one worker here: leave num_workers (--workers) alone")
    else:
        many = num_workers and "auto"  # seeds that belong to the task, so that the count changes no bit
    mine: DataLoader[Any] = DataLoader(
        reader,
        BATCH,
        num_workers=many,
        collate_fn=joined,
        worker_init_fn=functools.partial(start, inner.worker_init_fn),
        multiprocessing_context=inner.multiprocessing_context if many else None,
        generator=torch.Generator().manual_seed(seed),
        on_worker_death="raise",
    )
    if many == "auto" and num_workers != "auto":
        mine.resize(int(num_workers))
    return mine


def _read(loader: DataLoader[Any], seed: int, total: int | None, progress: Callable[[str], None]) -> Record:
    """The record of all samples. No worker outlives it."""
    began = told = time.monotonic()
    parts: list[Record] = []
    it, done, bad = None, 0, 0
    with preserved():
        seeding.seed_worker(seed, 0)  # for 0 workers
        try:
            progress(_so_far(0, 0, total, 0.0))
            it = iter(loader)
            for record in it:
                parts.append(record)
                if len(parts) == GATHER:
                    parts = [joined(parts)]
                done, bad, now = done + record.samples, bad + len(record.failed), time.monotonic()
                if now - told > TELL_S:
                    told = now
                    progress(_so_far(done, bad, total, now - began))
        except WorkerDiedError as e:
            if not e.tasks:
                raise
            at = e.tasks[0] * BATCH
            raise WorkerDiedError(
                f"{e}. It had one of the samples {at} to {at + BATCH - 1} of those read", e.workers, e.tasks
            ) from e
        except StokerError:
            raise
        except Exception as e:  # no sample's: that is in its record
            raise StokerError(f"a worker failed: {type(e).__name__}: {_last(e)}") from e
        finally:
            if it is not None and loader.num_workers:
                it._shutdown_workers()
    return joined(parts)


def _last(e: Exception) -> str:
    """The last line of an error: one that comes from a worker has its traceback before that."""
    return (str(e).strip().splitlines() or [""])[-1]


def _so_far(done: int, bad: int, total: int | None, took: float) -> str:
    """Progress in words; ``took`` seconds so far."""
    words = f"{done:,} of {total:,} samples" if total else f"{done:,} samples"
    words += f", {bad:,} unreadable" if bad else ""
    return words + (f", about {human_seconds(took / done * (total - done))} left" if total and 0 < done < total else "")


def _channels(key: tuple[int, int], g: Group, part: float | None) -> Channels:
    n, mean, m2 = g.pixels
    none = n == 0
    least = np.maximum(n, 1)
    error = None
    if part is not None and g.samples > 1:
        spread = g.clusters.m2 + g.clusters.n * (g.clusters.mean - mean) ** 2
        error = np.sqrt((1 - part) * g.samples / (g.samples - 1) * spread) / least

    def floats(x: Any) -> tuple[float, ...]:
        return tuple(np.where(none, np.nan, x).tolist())

    return Channels(
        *key,
        g.images,
        tuple(int(x) for x in n),
        floats(mean),
        floats(np.sqrt(m2 / least)),
        floats(g.low),
        floats(g.high),
        tuple(g.nan.tolist()),
        tuple(g.inf.tolist()),
        None if error is None else floats(error),
    )


def _notes(record: Record, groups: Sequence[Channels], part: float | None, first: int | None, seed: int) -> list[str]:
    out = []
    if part is not None:
        words = f"a random subset, {part:.2g} of all, drawn by seed {seed}"
        errors = [e / groups[0].scale for e in groups[0].mean_error or ()]
        if errors:
            words += f"; +- is the standard error of the mean, at most {max(errors):.2g} in the line's unit"
        out.append(words)
    if first is not None and record.samples == first:
        out.append(f"the first {first:,} samples of a stream, which is no random subset: no error of the mean is given")
    counts = sorted({g.channels for g in groups})
    if len(counts) > 1:
        out.append(f"images of {' and of '.join(map(str, counts))} channels: one Normalize does not fit all of them")
    if len(groups) > len(counts):
        out.append("uint8 beside other types: they are listed apart, for ToTensor scales only uint8")
    if record.random:
        out.append("the dataset is random: samples read twice differ. Augmentation is measured as it comes")
    if "CHW" in record.layouts and "HWC" in record.layouts:
        out.append(
            "channels were found first in some samples and last in others: --layout (layout=) decides it for all"
        )
    palette = sum(n for kind, n in record.dtypes.items() if "PIL P" in kind)
    if palette:
        out.append(
            f"{palette:,} palette images: what was counted are indices of colours; .convert('RGB') makes colours"
        )
    return out
