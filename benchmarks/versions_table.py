"""The table of ``benchmarks.versions``: torch x Python, and which tests passed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = ("contract", "transport", "device", "sampling", "core", "loader", "workers", "staging")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cell(lines: list[dict[str, Any]]) -> str:
    """What the table says about one pair."""
    if not lines:
        return ""
    if "not_installed" in lines[0]:
        return "not to be had"
    names = ("passed", "failed", "skipped")
    numbers = {name: sum(line.get(name, 0) for line in lines) for name in names}
    numbers["failed"] += sum("failure" in line for line in lines)
    return ", ".join(f"{numbers[name]:,} {name}" for name in names if numbers[name] or name == "passed")


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def table(lines: list[dict[str, Any]]) -> str:
    """torch x Python, newest torch first; below it what was not run, what failed, and what could not be installed."""
    by_pair: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        by_pair.setdefault((line["torch"], line["python"]), []).append(line)
    torches = sorted({t for t, _ in by_pair}, key=_key, reverse=True)
    columns = sorted({p for _, p in by_pair}, key=_key)
    full = {p: next((e["version"] for e in lines if e["python"] == p and "version" in e), p) for p in columns}
    out = [f"| torch | {' | '.join(f'Python {full[p]}' for p in columns)} |", "|---" * (len(columns) + 1) + "|"]
    out += [f"| {t} | {' | '.join(cell(by_pair.get((t, p), [])) for p in columns)} |" for t in torches]
    notes = [
        f"- torch {torch}, Python {python}: {note}"
        for torch in torches
        for python in columns
        for note in _notes(by_pair.get((torch, python), []))
    ]
    return "\n".join([*out, *([""] if notes else []), *notes])


def _notes(lines: list[dict[str, Any]]) -> Iterator[str]:
    if lines and "not_installed" in lines[0]:
        yield lines[0]["not_installed"]
        return
    ran = [line["tests"] for line in lines]
    if ran and set(ran) != set(TESTS):
        yield f"only {', '.join(f'tests/{name}' for name in TESTS if name in ran)}"
    for line in lines:
        if "failure" in line:
            yield f"tests/{line['tests']}: {line['failure']}"
        elif line["failures"]:
            yield f"failed: {', '.join(f'`{name}`' for name in line['failures'])}"
