"""Makes the report of a run from what the watched processes sent and what the machine did meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...core import gpus, resources
from ..doctor import ranks
from ..doctor.verdict import diagnose
from . import applied as done
from . import before_after, history, patch, schema


def report_of(
    command: list[str],
    code: int,
    snapshots: list[dict[str, Any]],
    around: dict[str, Any],
    wall_s: float,
    apply: bool = False,
) -> dict[str, Any]:
    """The report (docs/report.md).

    Args:
        command: what was run, ``-m`` before a module.
        code: its exit code.
        snapshots: the last word of each process.
        around: what the machine did meanwhile.
        wall_s: seconds from the command's start to its end.
        apply: whether stoker's engine and settings were behind its loaders.
    """
    grant = resources.read().as_dict()
    around = {**around, **_least((around, *snapshots), "shm_free_min", "memory_available_min")}
    # A script may be put into a smaller container, or on fewer cores, than this process.
    grant.update(_least((grant, *snapshots), "memory"))
    grant["cores"] = max((s["cores"] for s in snapshots if s.get("cores")), default=grant["cores"])
    _visible(grant, around, snapshots)
    loaders = schema.merged(snapshots)
    settings: dict[str, Any] = {}
    for s in snapshots:
        settings.update(s.get("applied") or {})
    for e in loaders:
        e["cache"] = (settings.get(e["name"]) or {}).get("cache") or {}
        e["settings"]["applied"] = apply
    cuda = any(s.get("cuda") for s in snapshots)
    verdict, found = diagnose(loaders, grant["cores"], cuda, around, len(grant["gpus"]), grant["memory"])
    findings = [f.as_dict() for f in found]
    applied = _applied(command, wall_s, loaders, settings) if apply else None
    if applied is not None:
        findings = done.findings(applied) + findings
    return {
        "schema": schema.SCHEMA,
        "command": command,
        "exit_code": code,
        "wall_s": wall_s,
        "machine": grant,
        "around": around,
        "loaders": loaders,
        "verdict": verdict,
        "findings": findings,
        "applied": applied,
        "ranks": ranks.compare(snapshots),
        "bypassing": _bypassing(snapshots, loaders),
        "ceilings": next((s["ceilings"] for s in snapshots if (s.get("ceilings") or {}).get("name")), None),
        "partial": any(not s.get("final") for s in snapshots),
        "diff": patch.of(patch.changes(findings)),
    }


def _applied(
    command: list[str], wall_s: float, loaders: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    """What ``--apply`` did, beside an observed run of the same command if one is remembered."""
    before = history.load(command)
    compared = before_after.of(wall_s, loaders, settings, before, history.digest(command))
    speedup = {row["name"]: before_after.gain(row["samples_per_s"], rate=True) for row in compared["loaders"]}
    return {
        "settings": settings,
        "before": before,
        "compared": compared,
        "speedup": {name: gain for name, gain in speedup.items() if gain},
    }


def _bypassing(snapshots: list[dict[str, Any]], loaders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loaders behind which stoker's engine cannot stand, and why; ``seen``: their batches were counted."""
    seen = {e["name"] for e in loaders if e["batches"]}
    found = {e["name"]: e for s in snapshots for e in s.get("bypassing") or []}
    return [{**e, "seen": name in seen} for name, e in found.items()]


def _visible(grant: dict[str, Any], around: dict[str, Any], snapshots: list[dict[str, Any]]) -> None:
    """Leaves out GPUs that a script has hidden from itself."""
    wanted = {s["cuda_visible"] for s in snapshots if s.get("cuda_visible") is not None}
    if not wanted or wanted == {os.environ.get("CUDA_VISIBLE_DEVICES")}:
        return
    here = grant["gpus"]
    stay = {i for value in wanted for i in gpus.visible_gpus([(g["index"], g["uuid"]) for g in here], value)}
    grant["gpus"] = [gpu for i, gpu in enumerate(here) if i in stay]
    busy = around.get("gpu_busy") or []
    around["gpu_busy"] = [share for i, share in enumerate(busy) if i in stay] if len(busy) == len(here) else []


def _least(said: Sequence[dict[str, Any]], *keys: str) -> dict[str, int | None]:
    """The least of what this process and the script's say."""
    return {key: min((s[key] for s in said if s.get(key) is not None), default=None) for key in keys}
