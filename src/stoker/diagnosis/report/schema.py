"""The JSON report: one schema, versioned. ``docs/report.md`` documents every key.

``schema`` grows by one whenever a key is removed or changes its meaning; new keys may appear at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.files import write
from ..watch import worker_record
from . import epochs

SCHEMA = 2
AT_ONCE_S = 2e-4  # what handing over takes, in which nobody is waited for
LINES = 12  # of code, of a loader, that are kept in the report
TIMES = ("wait_s", "first_wait_s", "step_s", "step_cpu_s", "between_s", "loop_s")
NUMBERS = ("batches", "samples", "epochs", "ended", "made", "at_once")
COUNTS = (*NUMBERS, "tasks", "fetch_ns", "collate_ns", "transport_ns", "cpu_ns")
DEVICE = ("gaps", "gap_s", "gap_wait_s", "crossing_steps", "crossing_s", "pinned_bytes")


def loader_entry(metrics: dict[str, Any], threads: int) -> dict[str, Any]:
    """One of the report's ``loaders`` from the fields of a ``LoaderMetrics``."""
    # Of a process that was killed the live rows have the last batches' waits and steps only.
    total = max(metrics.get("loop_s", 0.0), metrics["wait_s"] + metrics["step_s"])
    stages: dict[str, dict[str, float]] = {}
    if metrics["tasks"]:
        for name in ("fetch", "collate", "transport"):
            stages[name] = {"self_s": metrics[f"{name}_ns"] / 1e9}
        stages["worker"] = {"cpu_s": metrics["cpu_ns"] / 1e9, "tasks": metrics["tasks"]}
    stages["consumer"] = {"cpu_s": metrics["step_cpu_s"]}
    stages["startup"] = {"wait_s": metrics["first_wait_s"]}
    return {
        "name": metrics["name"],
        **{key: metrics[key] for key in NUMBERS},
        "wait_s": metrics["wait_s"],
        "step_s": metrics["step_s"],
        "between_s": metrics["between_s"],
        "loop_s": total,
        "samples_per_s": metrics["samples"] / total * metrics.get("processes", 1) if total else 0.0,
        "settings": {**metrics["settings"], "threads": threads, "processes": metrics.get("processes", 1)},
        "stages": stages,
        "memory": {
            "worker_pss": metrics.get("worker_pss", []),
            "batch_bytes": metrics.get("batch_bytes", 0),
            "over_time": metrics.get("memory", []),
            "own": (metrics.get("inside") or {}).get("own", []),
        },
        "decisions": metrics.get("decisions", []),
        "steps": spread(metrics.get("step_bins", {})),
        "waits": spread(metrics.get("wait_bins", {})),
        "ready_share": _ready(metrics),
        "by_epoch": metrics.get("by_epoch", []),
        "filled_epochs": metrics.get("filled_epochs", 0),
        "epoch_s": epochs.epochs(metrics.get("by_epoch", [])),
        "over_time": metrics.get("over_time", []),
        "device": _device(metrics),
        "faults": metrics.get("faults") or {},
        **_inside(metrics.get("inside") or {}),
    }


def _ready(m: dict[str, Any]) -> float | None:
    """The part of the batches, each epoch's first left out, that were there when they were asked for."""
    waits = {int(b): int(n) for b, n in m.get("wait_bins", {}).items()}
    total = sum(waits.values())
    if not total:
        return None
    at_once = max(AT_ONCE_S, 0.1 * spread(m.get("step_bins", {}))["median_s"])
    there = sum(n for b, n in waits.items() if worker_record.seconds_of(b) <= at_once)
    return there / total


def _device(m: dict[str, Any]) -> dict[str, Any]:
    """What was seen of the device; empty where the script did not use one."""
    if not m.get("gaps") and not m.get("crossing_steps"):
        return {}
    return {
        "gaps": m["gaps"],
        "starved_share_of_wait": m["gap_s"] / m["gap_wait_s"] if m["gap_wait_s"] else 0.0,
        "steps": m["crossing_steps"],
        "seconds": m["crossing_s"],
        "crossings": [
            {"kind": key.partition(" ")[0], "line": key.partition(" ")[2], "calls": n, "seconds": s, "bytes": b}
            for key, (n, s, b) in sorted(m["crossings"].items(), key=lambda kv: -kv[1][1])
        ],
        "pinned_bytes": m["pinned_bytes"],
    }


def _inside(found: dict[str, Any]) -> dict[str, Any]:
    """``tasks``, ``where`` and ``kernel`` of an entry."""
    looks = sum(ran + waited for *_, ran, waited in found.get("stacks", []))
    return {
        "tasks": {**spread(found.get("bins", {})), "slow_samples": found.get("slow", {})},
        "where": [
            {"kind": kind, "name": name, "line": line, "ran": ran / looks, "waited": waited / looks}
            for kind, name, line, ran, waited in found.get("stacks", [])[:LINES]
        ],
        "looks": looks,
        "helpers": dict(zip(("looks", "threads", "held"), found.get("helpers", [0, 0, 0]), strict=True)),
        "kernel": {**found["kernel"], "seconds": found["seconds"]} if found else {},
    }


def spread(bins: Mapping[Any, int]) -> dict[str, float]:
    """A histogram by ``inside.bin_of`` in a few numbers: how many, the median and the 95th percentile in seconds, and
    the part of all the time that goes by in those of more than ``inside.SLOW`` medians."""
    by_bin = {int(b): n for b, n in bins.items()}
    if not by_bin:
        return {"count": 0, "median_s": 0.0, "p95_s": 0.0, "slow_share": 0.0, "slow_count": 0}
    middle = worker_record.median(by_bin)
    total = sum(n * worker_record.seconds_of(b) for b, n in by_bin.items())
    slow = {b: n for b, n in by_bin.items() if worker_record.seconds_of(b) > worker_record.SLOW * middle}
    count, seen, p95 = sum(by_bin.values()), 0, 0.0
    for b in sorted(by_bin):
        seen += by_bin[b]
        p95 = worker_record.seconds_of(b)
        if seen >= 0.95 * count:
            break
    return {
        "count": count,
        "median_s": middle,
        "p95_s": p95,
        "slow_share": sum(n * worker_record.seconds_of(b) for b, n in slow.items()) / total,
        "slow_count": sum(slow.values()),
    }


def merged(snapshots: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The loaders of all processes; those made by one line are one entry, its sums over all processes."""
    by_name: dict[str, dict[str, Any]] = {}
    threads = 1
    for snapshot in snapshots:
        threads = max(threads, int(snapshot.get("threads", 1)))
        for m in snapshot["loaders"]:
            if not m["epochs"]:
                continue
            m = {**m, "worker_pss": list(m.get("worker_pss", {}).values()), "decisions": m.get("decisions", [])}
            if m["name"] not in by_name:
                by_name[m["name"]] = {**m, "processes": 1}
                continue
            entry = by_name[m["name"]]
            entry["processes"] += 1
            for key in (*TIMES, *COUNTS, "worker_pss", "decisions"):
                entry[key] = entry[key] + m[key]
            accounts = [r for r in (entry.get("inside"), m.get("inside")) if r]
            entry["inside"] = worker_record.merge(accounts) if accounts else {}
            for key in DEVICE:
                entry[key] = entry.get(key, 0) + m.get(key, 0)
            entry["faults"] = _faults(entry.get("faults") or {}, m.get("faults") or {})
            for line, numbers in m.get("crossings", {}).items():
                old = entry.setdefault("crossings", {}).get(line, [0, 0.0, 0])
                entry["crossings"][line] = [a + b for a, b in zip(old, numbers, strict=True)]
            for key in ("step_bins", "wait_bins"):
                entry[key] = {
                    b: entry.get(key, {}).get(b, 0) + m.get(key, {}).get(b, 0)
                    for b in {**entry.get(key, {}), **m.get(key, {})}
                }
    return [loader_entry(m, threads) for m in by_name.values()]


def _faults(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """What failed in two processes: numbers and lists are added."""
    out = {**a, **b}
    for key in a.keys() & b.keys():
        if isinstance(a[key], (int, list)):
            out[key] = a[key] + b[key]
    return out


def check_writable(path: Path, option: str = "--json") -> None:
    """Raises before the run what would otherwise be raised after it.

    Args:
        path: where the report is to be written.
        option: of the command line, which names another place.

    Raises:
        UsageError: no file can be written there.
    """
    why = ""
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "no write access"
    if why:
        raise UsageError(f"the report cannot be written to {path}: {why} ({option} FILE names another place)")


def load(path: Path) -> dict[str, Any] | None:
    """A report of an earlier run, or None when there is none that this version can read."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or not isinstance(report.get("loaders"), list):
        return None
    return report


def save(report: dict[str, Any], path: Path) -> None:
    """Writes the report whole or not at all."""
    write(path, json.dumps(report, indent=2, default=str) + "\n")
