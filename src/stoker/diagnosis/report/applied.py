"""What ``stoker run --apply`` did in this run, as findings: they stand before what is left to do."""

from __future__ import annotations

import os
from typing import Any

from ...core.terminal import human_bytes
from ..doctor.loader_stats import Finding
from . import before_after

ENGINE = {"engine": "stoker"}  # in the user's own code: stoker.DataLoader
WORKERS = ("num_workers", "prefetch_factor")


def findings(applied: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each thing that was done for a loader, what brought most first.

    Args:
        applied: the report's, with ``settings`` and ``compared``.
    """
    found = []
    rows = {row["name"]: row for row in applied["compared"]["loaders"]}
    for name, settings in applied["settings"].items():
        row = rows.get(name)
        if row is not None:
            found += [f for f in (_kept(name, settings, row), _workers(name, settings, row)) if f is not None]
    return [f.as_dict() for f in sorted(found, key=lambda f: -(f.measured_speedup or 0.0))]


def _kept(name: str, settings: dict[str, Any], row: dict[str, Any]) -> Finding | None:
    """The deterministic part is served from memory."""
    cache = settings.get("cache") or {}
    if not settings.get("to", {}).get("staged") or cache.get("discarded"):
        return None
    here = os.getcwd() + os.sep  # paths below it are as short as a loader's name
    kept, cut = (str(cache.get(key) or "").replace(here, "") for key in ("kept", "cut"))
    said = f"stoker keeps {kept or 'what is the same in every epoch'}"
    if cut and cut not in kept:
        said += f", up to {cut}"
    if cache.get("filled"):
        of = f" of {cache['samples']:,}" if cache.get("samples") else ""
        said += f": {cache['filled']:,}{of} samples, {human_bytes(float(cache.get('nbytes') or 0))}"
    if cache.get("why_not"):
        said += f"; not more, because {cache['why_not']}"
    change_to = {"staged": True, **_changed(settings), **ENGINE}
    speedup = before_after.gain(row["later"])
    return Finding("cacheable_prefix", 0.0, dict(cache), said, None, change_to, name, True, speedup)


def _workers(name: str, settings: dict[str, Any], row: dict[str, Any]) -> Finding | None:
    """Another number of workers, or more batches ahead."""
    changed, old = _changed(settings), settings.get("from", {})
    if not changed:
        return None
    cause = "prefetch_too_small" if "num_workers" not in changed else "too_few_workers"
    if "num_workers" in changed:
        cause = "main_process_loading" if not old.get("num_workers") else cause
        if changed["num_workers"] < int(old.get("num_workers") or 0):
            cause = "too_many_workers"
    said = ", ".join(f"{key}={value} (was {old.get(key)})" for key, value in changed.items())
    kept = settings.get("to", {}).get("staged")
    speedup = None if kept else before_after.gain(row["samples_per_s"], rate=True)
    return Finding(cause, 0.0, {"from": old, "to": changed}, said, None, {**changed, **ENGINE}, name, True, speedup)


def _changed(settings: dict[str, Any]) -> dict[str, Any]:
    old, new = settings.get("from", {}), settings.get("to", {})
    return {key: new[key] for key in WORKERS if key in new and new[key] != old.get(key)}
