"""Prints the result of a command: as text, or as JSON if ``--json`` asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .files import check_writable, write
from .types import JsonObject


def check(json_path: Path | None) -> None:
    """Raises UsageError before the work, not after it, if the file cannot be written."""
    if json_path is not None and str(json_path) != "-":
        check_writable(json_path)


def give(result: JsonObject, json_path: Path | None, show: Callable[[], object], named: bool = True) -> None:
    """Shows the text, and writes the JSON if it has a path. ``-`` prints JSON to stdout instead of the text. ``named``:
    see ``write``."""
    data = json.dumps(result, indent=2)
    if str(json_path) == "-":
        print(data)
        return
    if json_path is not None:
        write(json_path, data + "\n", named)
    show()
