"""Observed runs, kept in the user's cache folder by command and folder, for ``stoker run --apply`` to compare with.

A file holds what the comparison shows and nothing else: no path, no argument. A run does not end differently because
this folder cannot be written: then it is not remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...core.files import cache_folder, make_folder, write
from .schema import Finding, LoaderReport, RememberedRun, RunReport

VERSION = 1
MAX_RUNS = 256
LOADER = ("name", "batches", "samples", "epochs", "wait_s", "step_s", "loop_s", "samples_per_s", "settings", "epoch_s")
MAX_BYTES = 256 << 10  # of one


def folder() -> Path:
    """Where runs are kept (XDG Base Directory Specification)."""
    return cache_folder("runs")


def save(report: RunReport) -> None:
    """Remembers an observed run. One that ended early has no total that could be compared, so it replaces only another
    such run."""
    if not report.loaders:
        return
    run = RememberedRun(
        version=VERSION,
        script=digest(report.command),
        complete=report.exit_code == 0 and not report.partial,
        wall_s=report.wall_s,
        verdict=report.verdict,
        loaders=[LoaderReport(**{key: getattr(loader, key) for key in LOADER}) for loader in report.loaders],
        findings=[Finding(f.cause, f.share, {}, "", f.predicted_speedup, f.change, f.loader) for f in report.findings],
    )
    text = json.dumps(msgspec.to_builtins(run, enc_hook=str), default=str)
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, a full or read-only disk
        path = _path(report.command)
        old = load(report.command)
        if len(text) > MAX_BYTES or (old is not None and old.complete and not run.complete):
            return
        make_folder(path.parent)
        write(path, text)
        _prune(path.parent)


def load(command: Sequence[str]) -> RememberedRun | None:
    """The observed run of this command in this folder; None where none is known."""
    try:
        run = msgspec.json.decode(_path(command).read_bytes(), type=RememberedRun)
    except (OSError, RuntimeError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    return run if run.version == VERSION else None


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


def _prune(runs: Path) -> None:
    """Forgets the oldest runs beyond ``MAX_RUNS``."""
    by_age = sorted(runs.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[MAX_RUNS:]:
        path.unlink(missing_ok=True)
