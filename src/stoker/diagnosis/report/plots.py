"""The page's plots, as plotly has them: data and layout, in plain dicts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ...core.types import JsonObject
from .schema import EachEpoch, EpochRow, LoaderReport, RunReport

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
Figure = JsonObject


def figures(report: RunReport) -> dict[str, Figure]:
    """All plots that there are data for, by the id of the element that a plot fills."""
    out = {}
    for i, loader in enumerate(report.loaders):
        out[f"loop{i}"] = _loop(loader)
        if loader.looks:
            out[f"task{i}"] = _task(loader)
        if len(loader.over_time) > 1:
            out[f"time{i}"] = _over_time(loader.over_time)
        if len(loader.by_epoch) > 1:
            out[f"epochs{i}"] = _epochs(loader.by_epoch)
    if report.applied is not None:
        compared = report.applied.compared
        for i, row in enumerate(compared.loaders):
            if len(row.each.after) > 1:
                out[f"pace{i}"] = _pace(row.each, compared.estimated)
    return out


def _figure(data: list[JsonObject], height: int, **layout: object) -> Figure:
    return {"data": data, "layout": {"height": height, **layout}}


def _line(
    name: str, points: Iterable[tuple[float, float]], colour: str, dash: str = "solid", **more: object
) -> JsonObject:
    x, y = zip(*points, strict=True)
    return {"type": "scatter", "x": x, "y": y, "name": name, "line": {"color": colour, "dash": dash}, **more}


def _bars(name: str, values: Sequence[float], colour: str) -> JsonObject:
    """One bar an epoch."""
    return {"type": "bar", "name": name, "x": [*range(1, len(values) + 1)], "y": values, "marker": {"color": colour}}


def _stack(parts: list[tuple[str, float, str]], unit: str, height: int) -> Figure:
    """One bar, made of parts: a name, a value and a colour each."""
    data: list[JsonObject] = [
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


def _loop(loader: LoaderReport) -> Figure:
    batches, first = max(1, loader.batches), loader.stages.startup.wait_s
    parts = [
        ("waiting for data", max(0.0, loader.wait_s - first), WAIT),
        ("waiting for an epoch's first batch", first, FIRST),
        ("the step", loader.step_s, STEP),
    ]
    return _stack([(name, seconds / batches * 1e3, colour) for name, seconds, colour in parts], "ms a batch", 150)


def _task(loader: LoaderReport) -> Figure:
    parts = {("waiting", "waiting"): 100 * sum(code.waited for code in loader.where)}
    for code in loader.where:
        key = f"{code.kind}: {code.name}", code.kind
        parts[key] = parts.get(key, 0.0) + code.ran * 100
    order = sorted(parts.items(), key=lambda item: -item[1])
    return _stack([(name, v, KINDS.get(kind, "#888888")) for (name, kind), v in order], "% of a task", 170)


def _over_time(points: list[list[float]]) -> Figure:
    data = [
        _line("waiting, % of the loop", ((t, 100 * share) for t, share, _ in points), WAIT, fill="tozeroy"),
        _line("samples/s", ((t, rate) for t, _, rate in points), OTHER, "dot", yaxis="y2"),
    ]
    data[0]["line"]["shape"] = "hv"
    right = {"overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False}
    return _figure(data, 240, xaxis=SECONDS, yaxis={"range": [0, 100], "ticksuffix": " %"}, yaxis2=right)


def _epochs(epochs: Sequence[EpochRow]) -> Figure:
    data = [
        _bars("first batch", [e.first_wait_s for e in epochs], FIRST),
        _bars("waiting", [e.later_wait_s for e in epochs], WAIT),
        _bars("steps", [e.step_s for e in epochs], STEP),
    ]
    return _figure(data, 260, barmode="stack", xaxis={"dtick": max(1, len(epochs) // 10)}, yaxis={})


def _pace(each: EachEpoch, estimated: bool) -> Figure:
    """Seconds of each epoch, before and after, beside each other."""
    name = "before (estimate)" if estimated else "before"
    bars = ((name, each.before, WAIT), ("after", each.after, STEP))
    data = [_bars(name, seconds, colour) for name, seconds, colour in bars if seconds]
    dtick = max(1, max(len(each.before), len(each.after)) // 10)
    return _figure(data, 260, barmode="group", xaxis={"dtick": dtick}, yaxis=SECONDS, showlegend=True)
