"""Medians, ratios and spread from raw lines."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

# Ratio stoker/torch that a row has to reach; time and memory the other way round, so that more is always better.
# "overhead" with workers made anew has none of its own: README.md, "Known weaknesses".
TARGETS = {"transport": 4.0, "transport persistent": 4.0, "overhead persistent": 4.0, "jpeg": 1.0}
TARGETS |= {"shuffle torch's order: first batch": 1.7, "shuffle torch's order: memory": 5.0, "rows 0 workers": 15.0}
TARGETS |= {"leaves": 3.0, "leaves persistent": 3.0, "ragged": 1.0, "ragged persistent": 1.0}
STARTUP_TARGET = 1.0
NOISE = (
    0.05  # a row whose target is "not slower" may be short of 1.0 by this much: what equal contestants differ by here
)
UNITS = {"transport": "GB/s", "jpeg": "images/s", "startup": "ms", "shuffle": "ms"}  # all else: batches/s
LESS = {"ms", "MB"}  # units of which less is better


@dataclass(frozen=True)
class Row:
    """One metric: values of both contestants by round, and what follows from them.

    Attributes:
        metric: its name.
        unit: of the values.
        stoker, torch: one value a round, rounds in which both were measured.
        ratio: of the medians, turned so that more is better.
        paired: per round, likewise.
        target: what ``ratio`` has to reach, or None.
    """

    metric: str
    unit: str
    stoker: list[float]
    torch: list[float]
    target: float | None

    @property
    def paired(self) -> list[float]:
        pairs = zip(self.stoker, self.torch, strict=True)
        return [t / s if self.unit in LESS else s / t for s, t in pairs]

    @property
    def ratio(self) -> float:
        s, t = statistics.median(self.stoker), statistics.median(self.torch)
        return t / s if self.unit in LESS else s / t

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.ratio >= self.target * (1 - NOISE if self.target == 1.0 else 1)


def value_of(metric: str, values: dict[int, float]) -> float:
    """A measurement's figure: the median of its epochs but the first, which makes the memory; its only one else."""
    later = [v for epoch, v in values.items() if epoch > 1]
    return statistics.median(later or values.values())


def rows(lines: list[dict[str, Any]]) -> list[Row]:
    """Rows of the table, in the order in which they were measured."""
    raw: dict[str, dict[str, dict[int, dict[int, float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for line in lines:
        if "metric" in line:
            raw[line["metric"]][line["contestant"]][line["round"]][line["epoch"]] = line["value"]
    out = []
    for metric, by in raw.items():
        rounds = sorted(set(by["stoker"]) & set(by["torch"]))
        if not rounds:
            continue
        series = {c: [value_of(metric, by[c][r]) for r in rounds] for c in ("stoker", "torch")}
        target = STARTUP_TARGET if metric.startswith("startup") else TARGETS.get(metric)
        unit = "MB" if metric.endswith(": memory") else UNITS.get(metric.split()[0], "batches/s")
        out.append(Row(metric, unit, series["stoker"], series["torch"], target))
    return out


def limits(lines: list[dict[str, Any]]) -> float | None:
    """Median of the bare limit of transport, GB/s."""
    values = [line["value"] for line in lines if line.get("metric") == "transport limit"]
    return statistics.median(values) if values else None


def _span(values: list[float]) -> str:
    digits = 0 if statistics.median(values) >= 100 else 2
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}..{max(values):,.{digits}f}]"


def render(lines: list[dict[str, Any]], markdown: bool = False) -> str:
    """The table as text."""
    cells = [["metric", "unit", "stoker", "torch", "ratio", "paired", "target", ""]]
    for r in rows(lines):
        target = f">= {r.target:.1f}" if r.target is not None else ""
        verdict = "" if r.target is None else "ok" if r.met else "MISSED"
        paired = f"{statistics.median(r.paired):.2f} [{min(r.paired):.2f}..{max(r.paired):.2f}]"
        cells.append([r.metric, r.unit, _span(r.stoker), _span(r.torch), f"{r.ratio:.2f}x", paired, target, verdict])
    for line in lines:
        if "failed" in line:
            cells.append([line["workload"], "", line["contestant"], "", "", "", "", f"FAILED: {line['failed'][-200:]}"])
    if markdown:
        body = ["| " + " | ".join(c) + " |" for c in cells]
        body.insert(1, "|" + " --- |" * len(cells[0]))
    else:
        sizes = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
        body = ["  ".join(v.ljust(n) for v, n in zip(c, sizes, strict=True)).rstrip() for c in cells]
    bare = limits(lines)
    if bare is not None:
        body.append("")
        body.append(f"two bare processes stacking into reused shared memory: {bare:.2f} GB/s")
        for r in rows(lines):
            if r.metric.startswith("transport"):
                shares = [
                    f"{n} {statistics.median(v) / bare:.0%}" for n, v in (("stoker", r.stoker), ("torch", r.torch))
                ]
                body.append(f"  {r.metric}: {', '.join(shares)} of it")
    return "\n".join(body)
