"""Before and after ``--apply``, for a terminal: a table of wall clock, bars of the epochs, and notes."""

from __future__ import annotations

import textwrap
from typing import Any, TextIO

from ...core.terminal import human_seconds, short, style, table
from . import bars, before_after

NAMED = 4  # loaders in the table, those with most to show first
RUN_IT = "no observed run of this command is known to compare with: stoker run, without --apply, makes one"


def applied_lines(applied: dict[str, Any], columns: int, colour: bool, stream: TextIO) -> list[str]:
    """The lines.

    Args:
        applied: the report's.
        columns: that a line may have; ``colour``: whether there is colour; ``stream``: where they go.
    """
    compared = applied["compared"]
    headers, shown = rows(compared)
    out = ["", style("before / after" if len(headers) > 2 else "after", "bold", colour), table(headers, shown, columns)]
    main = max(compared["loaders"], key=lambda row: sum(row["each"]["after"]), default=None)
    if main is not None and len(main["each"]["after"]) > 1:
        each = main["each"]
        guess = ", before is an estimate" if each["before"] and compared["estimated"] else ""
        out += ["", f"seconds per epoch, {short(main['name'])}{guess}"]
        out += bars.draw(each["before"], each["after"], columns, colour, stream)
    return out + ["\n".join(textwrap.wrap(words, columns, subsequent_indent="  ")) for words in said(applied)]


def said(applied: dict[str, Any]) -> list[str]:
    """What is to be known about the figures, and why each loader has the settings it has.

    Args:
        applied: the report's.
    """
    return [*_notes(applied["compared"]), *_reasons(applied)]


def _notes(compared: dict[str, Any]) -> list[str]:
    out = list(compared["notes"])
    if compared["estimated"] and compared["script"]["before"] is not None:
        out.append(
            "before is an estimate: no observed run of this command is known, so each epoch is taken to last as long "
            "as the first one of this run, in which nothing was served from the cache"
        )
    elif compared["estimated"]:
        out.append(RUN_IT)
    spent = compared["cost"]
    parts = [
        f"{human_seconds(seconds)} {what}"
        for seconds, what in (
            (spent["trials_s"], "before first batches"),
            (spent["fill_s"], "in workers to store samples"),
        )
        if seconds
    ]
    if parts:
        out.append("what stoker itself cost is in these figures: " + " and ".join(parts))
    return out


def rows(compared: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: its head and its lines. Where nothing is known of before, there is no column for it.

    Args:
        compared: see ``change.of``.
    """
    known = compared["script"]["before"] is not None or not compared["estimated"]
    first = "before (estimate)" if compared["estimated"] else "before"
    figures = [("the script", compared["script"], False)]
    loaders = sorted(compared["loaders"], key=lambda row: -sum(row["each"]["after"]))
    for row in loaders[:NAMED]:
        name = short(row["name"])
        later = len(row["each"]["after"]) - 1
        figures.append((f"{name}: first epoch", row["first"], False))
        figures.append((f"{name}: each later epoch" + (f" ({later})" if later > 0 else ""), row["later"], False))
        figures.append((f"{name}: samples/s of its loop", row["samples_per_s"], True))
    out = []
    for label, pair, rate in figures:
        if pair["after"] is None:
            continue
        shown = [_figure(x, rate) for x in (pair["before"], pair["after"])]
        gain = before_after.gain(pair, rate)
        out.append([label, *shown, f"{gain:.2f}x" if gain else ""] if known else [label, shown[1]])
    headers = ["wall clock", first, "after", ""] if known else ["wall clock", "after"]
    return headers, out


def _figure(x: float | None, rate: bool) -> str:
    if x is None:
        return ""
    return f"{x:,.0f}" if rate else human_seconds(x)


def _reasons(applied: dict[str, Any]) -> list[str]:
    """Of each loader why it has the settings it has, and why nothing, or no more, is kept."""
    out = []
    for name, settings in applied["settings"].items():
        cache = settings.get("cache") or {}
        if settings.get("reason"):
            out.append(f"{short(name)}: {settings['reason']}")
        if cache.get("discarded"):
            out.append(f"{short(name)}: what was kept has been discarded: {cache['discarded']}")
        elif cache.get("why_not") and not settings.get("to", {}).get("staged"):
            out.append(f"{short(name)}: nothing is kept: {cache['why_not']}")
    return out
