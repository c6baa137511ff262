"""Before and after ``--apply``, for a terminal: a table of wall-clock times, bars of the epochs, and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from ...core.terminal import human_seconds, short, style, table
from .schema import Applied, Compared

NAMED = 4  # most loaders in the table: those whose epochs took longest
EPOCHS = 6  # most epochs drawn; if there are more, the first ones and the last
LABEL, VALUE = 16, 12  # columns before and after a bar
EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"


def epoch_bars(applied: Applied, columns: int, colour: bool, stream: TextIO) -> list[str]:
    """Returns bars of the seconds per epoch, of the loader whose epochs took longest. They are ASCII if the stream
    cannot show block characters."""
    compared = applied.compared
    main = max(compared.loaders, key=lambda row: sum(row.each.after), default=None)
    if main is None or len(main.each.after) < 2:
        return []
    estimate = ", before is an estimate" if main.each.before and compared.estimated else ""
    drawn = bars(main.each.before, main.each.after, columns, colour, stream)
    return ["", f"seconds per epoch, {short(main.name)}{estimate}", *drawn, ""]


def table_and_notes(applied: Applied, columns: int, colour: bool) -> list[str]:
    """Returns the table of wall-clock times, and where its figures come from."""
    headers, figures = rows(applied.compared)
    title = style("before / after" if len(headers) > 2 else "after", "bold", colour)
    out = ["", title, table(headers, figures, columns)]
    return out + [textwrap.fill(note, columns, subsequent_indent="  ") for note in notes(applied)]


def rows(compared: Compared) -> tuple[list[str], list[list[str]]]:
    """Returns the table's header and rows. Without any figure from before, that column is left out."""
    known = compared.script.before is not None or not compared.estimated
    figures = [("the script", compared.script, False)]
    for row in sorted(compared.loaders, key=lambda row: -sum(row.each.after))[:NAMED]:
        name, later = short(row.name), len(row.each.after) - 1
        figures.append((f"{name}: first epoch", row.first, False))
        figures.append((f"{name}: each later epoch" + (f" ({later})" if later > 0 else ""), row.later, False))
        figures.append((f"{name}: samples/s of its loop", row.samples_per_s, True))
    out = []
    for label, change, rate in figures:
        if change.after is not None:
            both = (change.before, change.after)
            cells = ["" if x is None else f"{x:,.0f}" if rate else human_seconds(x) for x in both]
            gain = change.times_as_fast(rate)
            out.append([label, *cells, f"{gain:.2f}x" if gain else ""] if known else [label, cells[1]])
    before = "before (estimate)" if compared.estimated else "before"
    return (["wall clock", before, "after", ""] if known else ["wall clock", "after"]), out


def notes(applied: Applied) -> Iterator[str]:
    """Yields sentences on where the figures come from."""
    compared = applied.compared
    if compared.estimated and compared.script.before is not None:
        yield (
            "before is an estimate: no observed run of this command is known, so each epoch is taken to last as long "
            "as the first one of this run, in which nothing was served from the cache; the warm-up of its first step "
            "is left out"
        )
    elif compared.estimated:
        yield "no observed run of this command is known to compare with: stoker run, without --apply, makes one"
    spent = [(compared.cost.trials_s, "before first batches"), (compared.cost.fill_s, "in workers to store samples")]
    parts = [f"{human_seconds(seconds)} {what}" for seconds, what in spent if seconds]
    if parts:
        yield "what stoker itself cost is in these figures: " + " and ".join(parts)
    for name, settings in applied.settings.items():
        if settings.reason:
            yield f"{short(name)}: {settings.reason}"


def reasons(applied: Applied) -> Iterator[str]:
    """Yields what qualifies the comparison, and why nothing is cached, by loader."""
    yield from applied.compared.notes
    for name, settings in applied.settings.items():
        cache = settings.cache
        if cache.discarded:
            yield f"{short(name)}: the cache was discarded: {cache.discarded}"
        elif cache.why_not and not settings.after.staged:
            what = "no part of a sample" if cache.collate else "nothing"
            yield f"{short(name)}: {what} is cached: {cache.why_not}"


def bars(before: Sequence[float], after: Sequence[float], columns: int, colour: bool, stream: TextIO) -> list[str]:
    """Draws the seconds per epoch as bars on one scale: two for each epoch, or one if only one value is known."""
    count = max(len(before), len(after))
    longest = max([*before, *after], default=0.0)
    if not count or longest <= 0:
        return []
    blocks = (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
    room = max(8, columns - LABEL - VALUE)
    out = []
    for i in range(count):
        if EPOCHS <= i + 1 < count:
            continue
        label = f"epoch {i + 1}"
        for name, values, tint in (("before", before, "red"), ("after", after, "green")):
            if i < len(values):
                bar = style(_bar(values[i] / longest * room, blocks), tint, colour)
                out.append(f"{label:<9}{name:<7}{bar} {human_seconds(values[i])}")
                label = ""
    return out


def _bar(length: float, blocks: bool) -> str:
    """Returns a bar of ``length`` columns, at least a sliver.

    Example:
        >>> _bar(2.5, True), _bar(2.5, False), _bar(0.0, True)
        ('\u2588\u2588\u258c', '##', '\u258f')
    """
    if not blocks:
        return "#" * max(1, int(length))
    eighths = max(1, int(length * 8))
    return "\u2588" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
