"""Text for a terminal: colour, width and tables by rich, numbers with units, and text that is safe to print.

Reports are built as one string, so that they read the same on a terminal, in a pipe and in a file. rich is imported
when something is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

MIN_COLUMNS, MAX_COLUMNS = 40, 120


def console(stream: TextIO) -> Console:
    """A rich console on ``stream``; output to a pipe or file stays plain, even under FORCE_COLOR."""
    from rich.console import Console

    terminal = None if stream.isatty() else False
    return Console(file=stream, force_terminal=terminal, force_jupyter=False, highlight=False)


def colour_wanted(stream: TextIO) -> bool:
    """Whether to use colour: only on a terminal, and not if NO_COLOR (no-color.org) or TERM=dumb forbids it."""
    if not stream.isatty():
        return False
    there = console(stream)
    return there.color_system is not None and not there.no_color


def width(stream: TextIO) -> int:
    """Columns to use, 40 to 120: ``COLUMNS``, else the terminal's, else 80."""
    return max(MIN_COLUMNS, min(MAX_COLUMNS, console(stream).width))


def style(text: str, name: str, on: bool) -> str:
    """``text`` in one of rich's styles ("bold", "red", ...), or as it is."""
    if not on:
        return text
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(name).render(text, color_system=ColorSystem.STANDARD)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> str:
    """Aligned columns, the first one left-aligned. A table wider than ``columns`` becomes one line for each value."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=True, header_style="")
    for i, header in enumerate(headers):
        grid.add_column(Text(header), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    plain = Console(
        width=1 << 12, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
    )  # in a notebook rich would show what it captures
    if plain.measure(grid).maximum <= columns:
        with plain.capture() as capture:
            plain.print(grid)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())
    blocks = []
    for row in rows:
        named = [(h, c) for h, c in zip(headers, row, strict=True) if c]
        blocks.append("\n".join(f"{h + ':' if h else '':<12}{c}" for h, c in named))
    return "\n\n".join(blocks)


def labelled(rows: Sequence[tuple[str, str]], stream: TextIO, label_columns: int) -> list[str]:
    """One line for each label and its text; long text is wrapped and indented below itself."""
    import textwrap

    columns = max(20, width(stream) - label_columns)
    lines = []
    for label, text in rows:
        first, *more = textwrap.wrap(text, columns) or [""]
        lines.append(style(f"{label:<{label_columns}}", "bold", colour_wanted(stream)) + first)
        lines += [" " * label_columns + line for line in more]
    return lines


def printable(text: str) -> str:
    """``text`` without control characters: what a file or an error contains must not steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def counted(n: int, noun: str) -> str:
    """A number and its noun."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def rate(x: float | None) -> str:
    """Formats a rate with at least three digits; ``-`` if there is none."""
    return "-" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def short(name: str) -> str:
    """``file:line`` without the folders, which would push the numbers out of a small terminal."""
    return name.replace("\\", "/").rsplit("/", 1)[-1]


def human_bytes(n: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def human_seconds(s: float) -> str:
    """Formats seconds with a suitable unit."""
    if round(s * 1e6) < 1000:
        return f"{s * 1e6:.0f} us"
    if round(s * 1e3, 1) < 1000:
        return f"{s * 1e3:.1f} ms"
    if round(s, 1) < 60:
        return f"{s:.1f} s"
    minutes, seconds = divmod(round(s), 60)
    return f"{minutes} min {seconds} s"
