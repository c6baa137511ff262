"""What ``mean_std`` found: numbers for each channel, the line to paste, and all of it as text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...core.terminal import human_seconds, table
from .moments import Failed

SCHEMA = 1
SHOWN = 10  # unreadable samples and shapes in the text; JSON has all
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # torchvision's constants for values of 0 to 1
NEAR, RATIO = 0.25, 1.25  # standard deviations off, and factor, up to which they are said to do


@dataclass(frozen=True)
class Channels:
    """Images of one channel count and one unit; a number a channel, in the data's own unit.

    Attributes:
        channels: how many.
        scale: 255 for uint8, by which ``normalize`` divides as torchvision's ToTensor does; 1 for other types.
        images: how many.
        pixels: finite values in each channel.
        mean, std: of these; std is the population's.
        min, max: of these.
        nan, inf: values that are left out of the four.
        mean_error: the standard error of the mean where the samples are a random subset, else None.
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
    mean_error: tuple[float, ...] | None = None

    @property
    def normalize(self) -> str:
        """The line: ``Normalize(mean=[...], std=[...])``."""
        mean, std = (", ".join(f"{x / self.scale:.6g}" for x in values) for values in (self.mean, self.std))
        return f"Normalize(mean=[{mean}], std=[{std}])"

    @property
    def imagenet(self) -> dict[str, Any] | None:
        """What ImageNet's constants would make of these images: ``mean`` and ``std`` after them, where 0 and 1 are
        wanted, and whether they ``would_do``. None unless there are 3 channels with values of 0 to 1 (or uint8)."""
        if self.channels != 3 or not all(
            lo >= 0 and hi <= self.scale for lo, hi in zip(self.min, self.max, strict=True)
        ):
            return None
        mean = [(m / self.scale - m0) / s0 for m, m0, s0 in zip(self.mean, *IMAGENET, strict=True)]
        std = [s / self.scale / s0 for s, s0 in zip(self.std, IMAGENET[1], strict=True)]
        do = all(abs(m) <= NEAR for m in mean) and all(1 / RATIO <= s <= RATIO for s in std)
        return {"mean": mean, "std": std, "would_do": do}

    def _words(self) -> list[str]:
        out = [self.normalize]
        if self.scale == 255:
            out.append(
                "  for values / 255, as torchvision's ToTensor makes them of uint8; the table has the data's own unit"
            )
        if any(self.nan) or any(self.inf):
            out.append(f"{sum(self.nan):,} NaN and {sum(self.inf):,} Inf are in no mean, std, min or max")
        flat = [str(i) for i, s in enumerate(self.std) if s == 0]
        if flat:
            out.append(f"constant, std 0, by which Normalize would divide: channel {', '.join(flat)}")
        if self.scale == 1 and all(
            abs(m) < 0.5 < s < 2 and lo < 0 for m, s, lo in zip(self.mean, self.std, self.min, strict=True)
        ):
            out.append("these values look normalized already: this line would come on top of that")
        return out + self._against_imagenet()

    def _against_imagenet(self) -> list[str]:
        if self.channels != 3:
            return []
        seen = self.imagenet
        if seen is None:
            low, high = min(self.min), max(self.max)
            return [f"ImageNet's constants are for values of 0 to 1; these are {low:.4g} to {high:.4g}"]
        mean, std = (", ".join(f"{x:{sign}.2f}" for x in seen[name]) for name, sign in (("mean", "+"), ("std", "")))
        verdict = "would do" if seen["would_do"] else "would not do"
        return [
            f"ImageNet's constants {verdict}: with them the means are {mean} (not 0), the stds {std} (not 1)",
            "  a network pretrained with them wants them in any case, one trained from scratch the line above",
        ]

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        names = ["mean", "std", "min", "max", "nan", "inf"]
        heads = ["channel", "mean", "std", "min", "max", "NaN", "Inf"]
        if self.mean_error is not None:
            names.insert(1, "mean_error")
            heads.insert(2, "+-")
        columns = [getattr(self, name) for name in names]
        rows = [[str(i), *(_figure(column[i]) for column in columns)] for i in range(self.channels)]
        return heads, rows


@dataclass(frozen=True)
class ImageStats:
    """What ``mean_std`` found.

    Attributes:
        name: what was read.
        groups: by channel count and unit, the one with most images first: ``mean``, ``std``, ``min``, ``max``, ``nan``,
            ``inf``, ``mean_error``, ``normalize`` and ``imagenet`` are those of this one, as in ``Channels``.
        samples: how many were read, unreadable ones included.
        of: how many there are; None for an iterable dataset.
        failed: samples that could not be read: ``(sample, file, error)``.
        shapes, dtypes, layouts: how many samples had which.
        notes: what else there is to say.
        seconds: how long it took.
        workers: how many worker processes there were when it ended; 0 is none.
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

    @property
    def mean(self) -> tuple[float, ...]:
        return self.groups[0].mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.groups[0].std

    @property
    def min(self) -> tuple[float, ...]:
        return self.groups[0].min

    @property
    def max(self) -> tuple[float, ...]:
        return self.groups[0].max

    @property
    def nan(self) -> tuple[int, ...]:
        return self.groups[0].nan

    @property
    def inf(self) -> tuple[int, ...]:
        return self.groups[0].inf

    @property
    def mean_error(self) -> tuple[float, ...] | None:
        return self.groups[0].mean_error

    @property
    def normalize(self) -> str:
        return self.groups[0].normalize

    @property
    def imagenet(self) -> dict[str, Any] | None:
        return self.groups[0].imagenet

    def as_dict(self) -> dict[str, Any]:
        """For JSON: no NaN in it, but None."""
        out = {"schema": SCHEMA, **asdict(self), "failed": [f._asdict() for f in self.failed]}
        for entry, group in zip(out["groups"], self.groups, strict=True):
            entry["normalize"] = {
                "mean": [m / group.scale for m in group.mean],
                "std": [s / group.scale for s in group.std],
                "line": group.normalize,
            }
            entry["imagenet"] = group.imagenet
        return _plain(out)  # type: ignore[no-any-return]

    def _head(self) -> str:
        of = "" if self.of in (None, self.samples) else f" of {self.of:,}"
        read, workers = f"{self.samples:,}{of} {_s(self.of or self.samples, 'sample')}", _s(self.workers, "worker")
        return f"{self.name}: {read}, {human_seconds(self.seconds)}, {self.workers} {workers}"

    def _title(self, group: Channels) -> str:
        kind = "uint8" if group.scale == 255 else "not uint8" if len({g.scale for g in self.groups}) > 1 else ""
        images, channels = _s(group.images, "image"), _s(group.channels, "channel")
        words = f"{group.images:,} {images} of {group.channels} {channels}"
        return f"{words}, {kind}" if kind else words

    def _seen(self) -> list[str]:
        out = [f"{name}: {_counts(seen)}" for name, seen in (("shapes", self.shapes), ("types", self.dtypes))]
        return [*out, f"channels: {_counts({_WHERE[k]: n for k, n in self.layouts.items()})}"]

    def _unreadable(self) -> list[str]:
        if not self.failed:
            return []
        out = [f"unreadable: {len(self.failed):,} of {self.samples:,} samples, left out"]
        out += [f"  sample {f.sample}{f' ({f.file})' if f.file else ''}: {f.error}" for f in self.failed[:SHOWN]]
        return out + ([f"  and {len(self.failed) - SHOWN:,} more; --json has all"] if len(self.failed) > SHOWN else [])

    def __str__(self) -> str:
        out = [self._head()]
        for group in self.groups:
            out += ["", self._title(group), table(*group._rows(), 120), *group._words()]
        return "\n".join([*out, "", *self._seen(), *self.notes, *self._unreadable()])

    def _repr_html_(self) -> str:
        def paragraphs(lines: Sequence[str]) -> str:
            return "".join(f"<p>{html.escape(line.strip())}</p>" for line in lines)

        out = paragraphs([self._head()])
        for group in self.groups:
            heads, rows = group._rows()
            body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in r) + "</tr>" for r in rows)
            head = "".join(f"<th>{h}</th>" for h in heads)
            out += (
                paragraphs([self._title(group)]) + f"<table><tr>{head}</tr>{body}</table>" + paragraphs(group._words())
            )
        return f"<div>{out}{paragraphs([*self._seen(), *self.notes, *self._unreadable()])}</div>"


_WHERE = {"CHW": "first (CHW)", "HWC": "last (HWC)", "HW": "one (HW)"}


def _s(n: int, noun: str) -> str:
    return noun if n == 1 else noun + "s"


def _figure(x: float) -> str:
    return f"{x:,}" if isinstance(x, int) else f"{x:.6g}"


def _counts(seen: dict[str, int]) -> str:
    most = sorted(seen.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(most) - SHOWN:,} others" if len(most) > SHOWN else ""
    return ", ".join(f"{name} ({n:,})" for name, n in most[:SHOWN]) + more


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
