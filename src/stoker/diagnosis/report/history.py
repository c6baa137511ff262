"""Observed runs, kept in the user's cache folder by command and working directory, for ``--apply`` to compare with.

A file holds only what the comparison shows; it does not record the command's arguments. If the folder is not writable,
the run is not remembered, and otherwise ends as usual.
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
MAX_BYTES = 256 << 10  # of one file


def save(report: RunReport) -> None:
    """Remembers an observed run. A run that ended early has no total to compare: it never replaces a complete run."""
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
    with contextlib.suppress(OSError, RuntimeError):  # no home directory, or a full or read-only disk
        path = _path(report.command)
        old = load(report.command)
        if len(text) > MAX_BYTES or (old is not None and old.complete and not run.complete):
            return
        make_folder(path.parent)
        write(path, text)
        by_age = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime, reverse=True)
        for forgotten in by_age[MAX_RUNS:]:
            forgotten.unlink(missing_ok=True)


def load(command: Sequence[str]) -> RememberedRun | None:
    """Returns the observed run of this command in the working directory; None if none is remembered."""
    try:
        run = msgspec.json.decode(_path(command).read_bytes(), type=RememberedRun)
    except (OSError, RuntimeError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    return run if run.version == VERSION else None


def digest(command: Sequence[str]) -> str:
    """Returns the SHA-256 of the command's first Python file; "" if it has none."""
    for word in command:
        path = Path(word)
        with contextlib.suppress(OSError, ValueError):
            if path.suffix == ".py" and path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


def _path(command: Sequence[str]) -> Path:
    key = json.dumps([os.getcwd(), *command])
    return cache_folder("runs") / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.json"
