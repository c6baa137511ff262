"""Seconds per epoch, before and after, as bars of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from ...core.terminal import human_seconds, style

MOST = 6  # epochs that are drawn; of more, the first ones and the last
LABEL, VALUE = 16, 12  # columns for what stands before and behind a bar
EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"


def draw(before: Sequence[float], after: Sequence[float], columns: int, colour: bool, stream: TextIO) -> list[str]:
    """Two bars for each epoch, of one scale; one where only one of both is known.

    Args:
        before, after: seconds of each epoch.
        columns: that a line may have.
        colour: whether bars are coloured.
        stream: where the lines go; one that cannot show blocks gets plain characters.
    """
    count = max(len(before), len(after))
    longest = max([*before, *after], default=0.0)
    if not count or longest <= 0:
        return []
    blocks = (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
    room = max(8, columns - LABEL - VALUE)
    out = []
    for i in range(count):
        if MOST <= i + 1 < count:
            continue
        label = f"epoch {i + 1}"
        for name, values, tint in (("before", before, "red"), ("after", after, "green")):
            if i >= len(values):
                continue
            drawn = style(_bar(values[i] / longest * room, blocks), tint, colour)
            out.append(f"{label:<9}{name:<7}{drawn} {human_seconds(values[i])}")
            label = ""
    return out


def _bar(length: float, blocks: bool) -> str:
    """A bar of so many columns, at least a sliver.

    Example:
        >>> _bar(2.5, True), _bar(2.5, False), _bar(0.0, True)
        ('\u2588\u2588\u258c', '##', '\u258f')
    """
    if not blocks:
        return "#" * max(1, int(length))
    eighths = max(1, int(length * 8))
    return "\u2588" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
