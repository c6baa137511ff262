"""The result of ``mean_std``: numbers for each channel, the line to paste, and all of it as text and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...core.terminal import counted, human_seconds, printable, table
from ...core.types import JsonObject

SCHEMA = 1
SHOWN = 10  # unreadable samples and shapes in the text; JSON has all
LAYOUTS = {"CHW": "first (CHW)", "HWC": "last (HWC)", "HW": "one (HW)"}


class Failed(NamedTuple):
    """A sample that could not be read: its index, its file if the dataset lists files, and the error."""

    sample: int
    file: str | None
    error: str


@dataclass(frozen=True)
class Channels:
    """Images of one channel count and one unit; a number for each channel, in the data's own unit.

    Attributes:
        channels: how many.
        scale: 255 for uint8, by which ``normalize`` divides as torchvision's ToTensor does; 1 for other types.
        images: how many.
        pixels: finite values in each channel.
        mean, std: of these; std is the population's.
        min, max: of these.
        nan, inf: values that the other numbers leave out.
    """

    channels: int
    scale: int
    images: int
    pixels: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min: tuple[float, ...]
    max: tuple[float, ...]
    nan: tuple[int, ...]
    inf: tuple[int, ...]

    @property
    def normalize(self) -> str:
        """The line: ``Normalize(mean=[...], std=[...])``."""
        mean, std = (", ".join(f"{x / self.scale:.6g}" for x in values) for values in (self.mean, self.std))
        return f"Normalize(mean=[{mean}], std=[{std}])"

    def __str__(self) -> str:
        columns = (self.mean, self.std, self.min, self.max, self.nan, self.inf)
        rows = [[str(i), *(_figure(column[i]) for column in columns)] for i in range(self.channels)]
        title = f"{counted(self.images, 'image')} of {counted(self.channels, 'channel')}"
        out = [title + ", uint8" * (self.scale == 255)]
        out += [table(["channel", "mean", "std", "min", "max", "NaN", "Inf"], rows, 120), self.normalize]
        if self.scale == 255:
            out.append(
                "  for values / 255, which torchvision's ToTensor makes of uint8; the table is in the data's unit"
            )
        if any(self.nan) or any(self.inf):
            out.append(f"{sum(self.nan):,} NaN and {sum(self.inf):,} Inf are left out of mean, std, min and max")
        if 0 in self.std:
            constant = ", ".join(str(i) for i, std in enumerate(self.std) if std == 0)
            out.append(f"std 0, by which Normalize would divide: channel {constant} is constant")
        return "\n".join(out)


@dataclass(frozen=True)
class ImageStats:
    """The result of ``mean_std``. ``mean``, ``std``, ``min``, ``max``, ``nan``, ``inf`` and ``normalize`` are those of
    the first group, as in ``Channels``.

    Attributes:
        name: what was read.
        groups: by channel count and unit, the one with most images first.
        samples: how many were read, unreadable ones included.
        of: how many there are; None for an iterable dataset.
        failed: samples that could not be read: ``(sample, file, error)``.
        shapes, dtypes, layouts: how many samples have which.
        notes: what a reader should know about the numbers.
        seconds: taken.
        workers: worker processes when it ended; 0 is none.
    """

    name: str
    groups: tuple[Channels, ...]
    samples: int
    of: int | None
    failed: tuple[Failed, ...]
    shapes: dict[str, int]
    dtypes: dict[str, int]
    layouts: dict[str, int]
    notes: tuple[str, ...]
    seconds: float
    workers: int

    def __getattr__(self, name: str) -> Any:
        if name in ("mean", "std", "min", "max", "nan", "inf", "normalize"):
            return getattr(self.groups[0], name)
        raise AttributeError(name)

    def as_dict(self) -> JsonObject:
        """For JSON, with None in place of NaN."""
        out = {"schema": SCHEMA, **asdict(self), "failed": [f._asdict() for f in self.failed]}
        for entry, group in zip(out["groups"], self.groups, strict=True):
            entry["normalize"] = {
                "mean": [m / group.scale for m in group.mean],
                "std": [s / group.scale for s in group.std],
                "line": group.normalize,
            }
        plain: JsonObject = _without_nan(out)
        return plain

    def __str__(self) -> str:
        of = "" if self.of in (None, self.samples) else f" of {self.of:,}"
        read = f"{self.samples:,}{of} samples, {human_seconds(self.seconds)}, {counted(self.workers, 'worker')}"
        out = [f"{self.name}: {read}", ""]
        for group in self.groups:
            out += [str(group), ""]
        out.append(f"shapes: {_most_common(self.shapes)}")
        out.append(f"types: {_most_common(self.dtypes)}")
        out.append(f"channels: {_most_common({LAYOUTS[k]: n for k, n in self.layouts.items()})}")
        out += self.notes
        if self.failed:
            out.append(f"unreadable: {len(self.failed):,} of {self.samples:,} samples, left out")
        for f in self.failed[:SHOWN]:
            out.append(printable(f"  sample {f.sample}{f' ({f.file})' if f.file else ''}: {f.error}"))
        if len(self.failed) > SHOWN:
            out.append(f"  and {len(self.failed) - SHOWN:,} more; --json has all")
        return "\n".join(out)


def _figure(x: float) -> str:
    return f"{x:,}" if isinstance(x, int) else f"{x:.6g}"


def _most_common(counts: dict[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(ranked) - SHOWN:,} others" if len(ranked) > SHOWN else ""
    return ", ".join(f"{name} ({n:,})" for name, n in ranked[:SHOWN]) + more


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
