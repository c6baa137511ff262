"""Text for a terminal: colour where it is wanted, numbers people can read, tables that fit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}


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
    """``text`` in bold or a colour."""
    return f"\033[{_CODES[name]}m{text}\033[0m" if on else text


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


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> str:
    """Aligned columns, the first to the left. Where that is wider than ``columns``: one line a value."""
    cells = [list(headers), *[list(r) for r in rows]]
    sizes = [max(len(r[i]) for r in cells) for i in range(len(headers))]
    if sum(sizes) + 2 * (len(sizes) - 1) <= columns:
        lines = []
        for r in cells:
            parts = [c.ljust(n) if i == 0 else c.rjust(n) for i, (c, n) in enumerate(zip(r, sizes, strict=True))]
            lines.append("  ".join(parts).rstrip())
        return "\n".join(lines)
    blocks = []
    for row in rows:
        named = [(h, c) for h, c in zip(headers, row, strict=True) if c]
        blocks.append("\n".join(f"{h + ':' if h else '':<12}{c}" for h, c in named))
    return "\n\n".join(blocks)
