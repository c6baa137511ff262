"""Text for a terminal, by rich: colour where it is wanted, tables that fit, numbers people can read.

rich is imported when something is printed, and draws into a string: a report is one text, whole, whoever reads it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import TextIO


def colour_wanted(stream: TextIO) -> bool:
    """Only on a terminal, and not where NO_COLOR (no-color.org) or TERM=dumb says no."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def width(stream: TextIO) -> int:
    """Columns to use, 40 to 120; 80 where nobody knows."""
    if os.environ.get("COLUMNS", "").isdigit():
        columns = int(os.environ["COLUMNS"])
    else:
        try:
            columns = os.get_terminal_size(stream.fileno()).columns
        except (OSError, ValueError, AttributeError):
            columns = shutil.get_terminal_size((80, 24)).columns
    return max(40, min(120, columns or 80))


def style(text: str, name: str, on: bool) -> str:
    """``text`` in one of rich's styles ("bold", "red", ...), or as it is."""
    if not on:
        return text
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(name).render(text, color_system=ColorSystem.STANDARD)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> str:
    """Aligned columns, the first to the left. Where that is wider than ``columns``: one line a value."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=True, header_style="")
    for i, header in enumerate(headers):
        grid.add_column(Text(header), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    plain = Console(width=1 << 12, color_system=None, force_terminal=False, legacy_windows=False)
    if plain.measure(grid).maximum <= columns:
        with plain.capture() as capture:
            plain.print(grid)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())
    blocks = []
    for row in rows:
        named = [(h, c) for h, c in zip(headers, row, strict=True) if c]
        blocks.append("\n".join(f"{h + ':' if h else '':<12}{c}" for h, c in named))
    return "\n\n".join(blocks)


def short(name: str) -> str:
    """``file:line`` without the folders, which would push the numbers out of a small terminal.

    Example:
        >>> short("/home/me/train.py:12")
        'train.py:12'
    """
    return name.replace("\\", "/").rsplit("/", 1)[-1]


def human_bytes(n: float) -> str:
    """Bytes in binary units.

    Example:
        >>> human_bytes(3 << 29)
        '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def human_seconds(s: float) -> str:
    """Seconds with a unit that suits them.

    Example:
        >>> human_seconds(0.0123), human_seconds(75)
        ('12.3 ms', '1 min 15 s')
    """
    if s < 1e-3:
        return f"{s * 1e6:.0f} us"
    if s < 1:
        return f"{s * 1e3:.1f} ms"
    if s < 60:
        return f"{s:.1f} s"
    return f"{s // 60:.0f} min {s % 60:.0f} s"
