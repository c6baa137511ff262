"""The page's plots, as plotly has them: data and layout, in plain dicts."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from ..doctor.loader_stats import LoaderStats
from ..doctor.model import period

KINDS = {
    "decode": "#d97706",
    "transform": "#2563eb",
    "collate": "#059669",
    "fetch": "#64748b",
    "cache": "#0d9488",
    "waiting": "#c026d3",
    "transport": "#0891b2",
}
WAIT, STEP, FIRST, OTHER = "#dc2626", "#16a34a", "#f59e0b", KINDS["transform"]
SECONDS = {"ticksuffix": " s"}
Figure = dict[str, Any]


def figures(report: dict[str, Any]) -> dict[str, Figure]:
    """All that there is something to draw for, by the id of the element that a plot fills.

    Args:
        report: as in ``report.schema``.
    """
    out = {}
    for i, e in enumerate(report["loaders"]):
        out[f"loop{i}"] = _loop(e)
        if e.get("looks"):
            out[f"task{i}"] = _task(e)
        if len(e.get("over_time", [])) > 1:
            out[f"time{i}"] = _over_time(e["over_time"])
        if len(e.get("by_epoch", [])) > 1:
            out[f"epochs{i}"] = _epochs(e["by_epoch"])
        if len(e["memory"].get("over_time", [])) > 1:
            out[f"memory{i}"] = _memory(e["memory"]["over_time"])
        curve = _curve(e, int(report["machine"].get("cores", 1)))
        if curve:
            out[f"curve{i}"] = curve
    compared = (report.get("applied") or {}).get("compared", {"loaders": []})
    for i, row in enumerate(compared["loaders"]):
        if len(row["each"]["after"]) > 1:
            out[f"pace{i}"] = _pace(row["each"]["before"], row["each"]["after"], compared["estimated"])
    around = (report.get("around") or {}).get("over_time", [])
    if len(around) > 1:
        out["machine"] = _machine(around)
    return out


def _figure(data: list[dict[str, Any]], height: int, **layout: Any) -> Figure:
    return {"data": data, "layout": {"height": height, **layout}}


def _line(name: str, points: Iterable[tuple[float, float]], colour: str, dash: str = "solid", **more: Any) -> Figure:
    x, y = zip(*points, strict=True)
    return {"type": "scatter", "x": x, "y": y, "name": name, "line": {"color": colour, "dash": dash}, **more}


def _bars(name: str, values: list[float], colour: str) -> Figure:
    """One bar an epoch."""
    return {"type": "bar", "name": name, "x": [*range(1, len(values) + 1)], "y": values, "marker": {"color": colour}}


def _stack(parts: list[tuple[str, float, str]], unit: str, height: int) -> Figure:
    """One bar, made of parts: a name, a value and a colour each."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [""],
            "x": [value],
            "name": html.escape(name),  # plotly reads names as markup
            "marker": {"color": colour},
            "hovertemplate": f"{html.escape(name)}: %{{x:.3g}} {unit}<extra></extra>",
        }
        for name, value, colour in parts
        if value > 0
    ]
    return _figure(data, height, barmode="stack", xaxis={}, yaxis={"visible": False})


def _loop(e: dict[str, Any]) -> Figure:
    batches = max(1, int(e["batches"]))
    first = float(e["stages"].get("startup", {}).get("wait_s", 0.0))
    parts = [
        ("waiting for data", max(0.0, e["wait_s"] - first), WAIT),
        ("waiting for an epoch's first batch", first, FIRST),
        ("the step", e["step_s"], STEP),
    ]
    return _stack([(name, seconds / batches * 1e3, colour) for name, seconds, colour in parts], "ms a batch", 150)


def _task(e: dict[str, Any]) -> Figure:
    parts: dict[tuple[str, str], float] = {}
    for w in e["where"]:
        name = f"{w['kind']}: {w['name']}"
        parts[name, w["kind"]] = parts.get((name, w["kind"]), 0.0) + w["ran"] * 100
        parts["waiting", "waiting"] = parts.get(("waiting", "waiting"), 0.0) + w["waited"] * 100
    order = sorted(parts.items(), key=lambda kv: -kv[1])
    return _stack([(name, v, KINDS.get(kind, "#888888")) for (name, kind), v in order], "% of a task", 170)


def _over_time(looks: list[list[float]]) -> Figure:
    data = [
        _line("waiting, % of the loop", ((t, 100 * share) for t, share, _ in looks), WAIT, fill="tozeroy"),
        _line("samples/s", ((t, rate) for t, _, rate in looks), OTHER, "dot", yaxis="y2"),
    ]
    data[0]["line"]["shape"] = "hv"
    right = {"overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False}
    return _figure(data, 240, xaxis=SECONDS, yaxis={"range": [0, 100], "ticksuffix": " %"}, yaxis2=right)


def _epochs(by_epoch: list[list[float]]) -> Figure:
    data = [
        _bars("first batch", [x[3] for x in by_epoch], FIRST),
        _bars("waiting", [x[1] - x[3] for x in by_epoch], WAIT),
        _bars("steps", [x[2] for x in by_epoch], STEP),
    ]
    return _figure(data, 260, barmode="stack", xaxis={"dtick": max(1, len(by_epoch) // 10)}, yaxis={})


def _pace(before: list[float], after: list[float], estimated: bool) -> Figure:
    """Seconds of each epoch, before and after, beside each other."""
    name = "before (estimate)" if estimated else "before"
    data = [_bars(name, each, colour) for name, each, colour in ((name, before, WAIT), ("after", after, STEP)) if each]
    dtick = max(1, max(len(before), len(after)) // 10)
    return _figure(data, 260, barmode="group", xaxis={"dtick": dtick}, yaxis=SECONDS, showlegend=True)


def _curve(e: dict[str, Any], cores: int) -> Figure | None:
    """Samples/s against workers, as the model has it; None where it has nothing."""
    case = LoaderStats(e, cores)
    size = int(e["samples"]) / case.batches
    counts = sorted({*range(1, 2 * cores + 1), max(1, case.workers)})
    points = [(n, size / p) for n in counts if (p := period(case, n))]
    if not points:
        return None
    data = [_line("predicted, with the steps", points, WAIT, "dot", mode="lines+markers")]
    dtick = max(1, (counts[-1] + 8) // 16)
    return _figure(data, 260, xaxis={"dtick": dtick}, yaxis={"rangemode": "tozero"}, showlegend=True)


def _memory(line: list[list[float]]) -> Figure:
    data = [_line("workers, MB", ((p[0], p[1] / 1e6) for p in line), OTHER, mode="lines+markers")]
    return _figure(data, 240, xaxis=SECONDS, yaxis={"ticksuffix": " MB", "rangemode": "tozero"})


def _machine(line: list[list[float]]) -> Figure:
    data = [
        _line("cores busy", ((p[0], p[1]) for p in line), STEP),
        _line("memory free, GB", ((p[0], p[2] / 1e9) for p in line), OTHER, "dot", yaxis="y2"),
    ]
    right = {"ticksuffix": " GB", "overlaying": "y", "side": "right", "rangemode": "tozero"}
    return _figure(data, 260, xaxis=SECONDS, yaxis={"rangemode": "tozero"}, yaxis2=right)
