"""Observed runs, kept in the user's cache folder by command and folder, for ``stoker run --apply`` to compare with.

A file holds what the comparison shows and nothing else: no path, no argument. Whatever goes wrong here is no reason to
end a run differently, so a folder that cannot be written means that nothing is remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.files import cache_folder, write

VERSION = 1
MOST = 256  # runs
MOST_BYTES = 256 << 10  # of one
LOADER = ("name", "batches", "samples", "epochs", "wait_s", "step_s", "loop_s", "samples_per_s", "settings", "epoch_s")


def folder() -> Path:
    """Where runs are kept (XDG Base Directory Specification)."""
    return cache_folder("runs")


def save(report: dict[str, Any]) -> None:
    """Keeps what is to be compared of an observed run's report.

    One that ended early has no total that could be compared, so it takes the place of another such run only.
    """
    if not report["loaders"]:
        return
    kept = {
        "version": VERSION,
        "at": time.time(),
        "script": digest(report["command"]),
        "cores": report["machine"].get("cores"),
        "complete": report["exit_code"] == 0 and not report["partial"],
        "wall_s": report["wall_s"],
        "verdict": report["verdict"],
        "loaders": [{key: e[key] for key in LOADER} for e in report["loaders"]],
        "findings": [
            {key: f[key] for key in ("cause", "loader", "predicted_speedup", "change")} for f in report["findings"]
        ],
    }
    text = json.dumps(kept, default=str)
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, a full or read-only disk
        path = _path(report["command"])
        old = load(report["command"])
        if len(text) > MOST_BYTES or (old is not None and old["complete"] and not kept["complete"]):
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(path, text)
        _prune(path.parent)


def load(command: Sequence[str]) -> dict[str, Any] | None:
    """The observed run of this command in this folder; None where none is known."""
    try:
        found = json.loads(_path(command).read_text())
        known = found["version"] == VERSION and all(key in e for e in found["loaders"] for key in LOADER)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    return found if known and {"complete", "wall_s", "findings", "script", "cores"} <= found.keys() else None


def digest(command: Sequence[str]) -> str:
    """Of the content of the command's first Python file; "" where it has none."""
    for word in command:
        path = Path(word)
        with contextlib.suppress(OSError, ValueError):
            if path.suffix == ".py" and path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


def _path(command: Sequence[str]) -> Path:
    key = json.dumps([os.getcwd(), *command])
    return folder() / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.json"


def _prune(kept: Path) -> None:
    """Forgets the oldest runs beyond the number that is kept."""
    by_age = sorted(kept.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[MOST:]:
        path.unlink(missing_ok=True)
