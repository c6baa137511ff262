"""Medians, ratios and spread from raw lines."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

# Ratio stoker/torch that a row has to reach; time and memory the other way round, so that more is always better.
# "overhead" with workers made anew has none of its own: README.md, "Known weaknesses".
TARGETS = {"transport": 5.0, "transport persistent": 5.0, "overhead persistent": 6.0, "jpeg": 1.0, "stragglers": 1.3}
TARGETS |= {"shuffle torch's order: first batch": 1.7, "shuffle torch's order: memory": 5.0, "rows 0 workers": 15.0}
TARGETS |= {"leaves": 3.0, "leaves persistent": 3.0, "ragged": 1.0, "ragged persistent": 1.0}
TARGETS |= {"indices torch's order: 64 of them": 1.0}
TARGETS |= {"overhead auto against 0 workers": 1.0, "rows auto against 0 workers": 1.0}
TARGETS |= {"startup spawn, 4 workers: first batch": 1.5, "startup fork, 2 workers: first batch": 2.0}
TARGETS |= {"startup fork persistent, 2 workers: restart": 3.0}
TARGETS |= {"staged: first epoch": 1.0, "staged: later epochs": 60.0}
STARTUP_TARGET = 1.0  # for what else is measured of it
SHARES = {
    "transport unread": 0.85,
    "jpeg": 0.97,
    "staged: later epochs": 0.8,
}  # of what bare processes do, in the same round
# What a row may be at most, whatever torch does.
MOST = {"memory: 2,000,000 dicts": 340.0, "resize 1 -> 4 -> 2: longest pause": 2.0}
MOST |= {"shuffle feistel: first batch": 20.0, "shuffle feistel: memory": 1.0, "indices feistel: 64 of them": 25.0}
MOST |= {"state script draws nothing: state_dict() after each step": 60.0}
MOST |= {f"state 10^10 samples, script {d}: state_dict() after each step": 100.0 for d in ("draws", "draws nothing")}
NOISE = 0.05  # a "not slower" row may be short of 1.0 by this much: what equal contestants differ by here
UNITS = {
    "transport": "GB/s",
    "jpeg": "images/s",
    "staged:": "images/s",
    "startup": "ms",
    "shuffle": "ms",
    "memory:": "MB",
    "scripts": "s",
}
UNITS |= {"resize": "batch times", "indices": "us", "state": "us"}  # all else: batches/s
LESS = {"s", "ms", "us", "MB", "batch times"}  # units of which less is better


@dataclass(frozen=True)
class Row:
    """One metric: values of both contestants by round, and what follows from them.

    Attributes:
        metric: its name.
        unit: of the values.
        stoker, torch: one value a round, rounds in which both were measured.
        ratio: of the medians, turned so that more is better; None where torch cannot do it.
        paired: per round, likewise.
        target: what ``ratio`` has to reach, or None.
        limit: what bare processes did, by round; empty where that was not measured.
    """

    metric: str
    unit: str
    stoker: list[float]
    torch: list[float]
    target: float | None
    limit: list[float] = field(default_factory=list)

    @property
    def paired(self) -> list[float]:
        pairs = zip(self.stoker, self.torch, strict=False)
        return [t / s if self.unit in LESS else s / t for s, t in pairs]

    @property
    def ratio(self) -> float | None:
        if not self.torch:
            return None
        s, t = statistics.median(self.stoker), statistics.median(self.torch)
        return t / s if self.unit in LESS else s / t

    @property
    def share(self) -> float | None:
        """Median over rounds of stoker's part of the limit."""
        if not self.limit:
            return None
        return statistics.median(s / limit for s, limit in zip(self.stoker, self.limit, strict=False))

    @property
    def wants(self) -> list[tuple[str, bool]]:
        """Each thing the row has to show, and whether it does."""
        out = []
        if self.target is not None and self.ratio is not None:
            noise = NOISE if self.target == 1.0 else 0.0
            out.append((f">= {self.target:.1f}x", self.ratio >= self.target - noise))
        if self.share is not None and self.metric in SHARES:
            out.append((f">= {SHARES[self.metric]:.0%} of bare", self.share >= SHARES[self.metric]))
        if self.metric in MOST:
            most = MOST[self.metric]
            out.append((f"<= {most:g} {self.unit}", statistics.median(self.stoker) <= most))
        return out

    @property
    def met(self) -> bool:
        return all(ok for _, ok in self.wants)


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
        contestants = [c for c in ("stoker", "torch") if by[c]]
        if "stoker" not in contestants:
            continue
        rounds = sorted(set.intersection(*(set(by[c]) for c in contestants)))
        if not rounds:
            continue
        series = {c: [value_of(metric, by[c][r]) for r in rounds if r in by[c]] for c in ("stoker", "torch", "limit")}
        target = TARGETS.get(metric, STARTUP_TARGET if metric.startswith("startup") else None)
        unit = "MB" if metric.endswith(": memory") else UNITS.get(metric.split()[0], "batches/s")
        out.append(Row(metric, unit, series["stoker"], series["torch"], target, series["limit"]))
    return out


def _span(values: list[float]) -> str:
    digits = 0 if statistics.median(values) >= 100 else 2
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}..{max(values):,.{digits}f}]"


def render(lines: list[dict[str, Any]], markdown: bool = False) -> str:
    """The table as text."""
    cells = [["metric", "unit", "stoker", "torch", "ratio", "paired", "of bare", "target", ""]]
    for r in rows(lines):
        verdict = "" if not r.wants else "ok" if r.met else "MISSED"
        torch = _span(r.torch) if r.torch else "cannot"
        ratio, paired = "", ""
        if r.ratio is not None:
            ratio = f"{r.ratio:.2f}x"
            paired = f"{statistics.median(r.paired):.2f} [{min(r.paired):.2f}..{max(r.paired):.2f}]"
        share = "" if r.share is None else f"{r.share:.0%} of {statistics.median(r.limit):,.4g}"
        target = ", ".join(words for words, _ in r.wants)
        cells.append([r.metric, r.unit, _span(r.stoker), torch, ratio, paired, share, target, verdict])
    for line in lines:
        if "failed" in line:
            blank = [""] * 5
            cells.append([line["workload"], "", line["contestant"], *blank, f"FAILED: {line['failed'][-200:]}"])
    if markdown:
        body = ["| " + " | ".join(c) + " |" for c in cells]
        body.insert(1, "|" + " --- |" * len(cells[0]))
    else:
        sizes = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
        body = ["  ".join(v.ljust(n) for v, n in zip(c, sizes, strict=True)).rstrip() for c in cells]
    return "\n".join(body)
