"""The page's plots, as plotly has them: data and layout, in plain dicts."""

from __future__ import annotations

import html
from typing import Any

KINDS = {
    "decode": "#d97706",
    "transform": "#2563eb",
    "collate": "#059669",
    "fetch": "#64748b",
    "cache": "#0d9488",
    "waiting": "#c026d3",
    "transport": "#0891b2",
}
WAIT, STEP = "#dc2626", "#16a34a"


def bars(parts: list[tuple[str, float, str]], unit: str) -> dict[str, Any]:
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [""],
            "x": [value],
            "name": html.escape(name),
            "marker": {"color": colour},
            "hovertemplate": f"{html.escape(name)}: %{{x:.3g}} {unit}<extra></extra>",
        }
        for name, value, colour in parts
        if value > 0
    ]
    return {
        "data": data,
        "layout": {"barmode": "stack", "xaxis": {}, "yaxis": {"visible": False}},
    }


def loop(e: dict[str, Any]) -> dict[str, Any]:
    batches = max(1, int(e["batches"]))
    first = float(e["stages"].get("startup", {}).get("wait_s", 0.0))
    wait = max(0.0, e["wait_s"] - first)
    return bars(
        [
            ("waiting for data", wait / batches * 1e3, WAIT),
            ("waiting for an epoch's first batch", first / batches * 1e3, "#f59e0b"),
            ("the step", e["step_s"] / batches * 1e3, STEP),
        ],
        "ms a batch",
    )


def task(e: dict[str, Any]) -> dict[str, Any]:
    parts: dict[tuple[str, str], float] = {}
    for w in e["where"]:
        name = f"{w['kind']}: {w['name']}"
        parts[name, w["kind"]] = parts.get((name, w["kind"]), 0.0) + w["ran"] * 100
        parts["waiting", "waiting"] = parts.get(("waiting", "waiting"), 0.0) + w["waited"] * 100
    order = sorted(parts.items(), key=lambda kv: -kv[1])
    return bars([(name, v, KINDS.get(kind, "#888888")) for (name, kind), v in order], "% of a task")


def over_time(e: dict[str, Any]) -> dict[str, Any]:
    x = [look[0] for look in e["over_time"]]
    rate = {"type": "scatter", "x": x, "y": [look[2] for look in e["over_time"]], "name": "samples/s", "yaxis": "y2"}
    data = [
        {
            "type": "scatter",
            "x": x,
            "y": [100 * look[1] for look in e["over_time"]],
            "name": "waiting, % of the loop",
            "line": {"color": WAIT, "shape": "hv"},
            "fill": "tozeroy",
        },
        {**rate, "line": {"color": KINDS["transform"], "dash": "dot"}},
    ]
    layout = {
        "xaxis": {"ticksuffix": " s"},
        "yaxis": {"range": [0, 100], "ticksuffix": " %"},
        "yaxis2": {"overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False},
    }
    return {"data": data, "layout": layout}


def epochs(e: dict[str, Any]) -> dict[str, Any]:
    epochs = list(range(1, len(e["by_epoch"]) + 1))

    def bar(name: str, values: list[float], colour: str) -> dict[str, Any]:
        return {"type": "bar", "name": name, "x": epochs, "y": values, "marker": {"color": colour}}

    data = [
        bar("first batch", [x[3] for x in e["by_epoch"]], "#f59e0b"),
        bar("waiting", [x[1] - x[3] for x in e["by_epoch"]], WAIT),
        bar("steps", [x[2] for x in e["by_epoch"]], STEP),
    ]
    return {
        "data": data,
        "layout": {"barmode": "stack", "xaxis": {"dtick": max(1, len(epochs) // 10)}, "yaxis": {}},
    }


def pace(before: list[float], after: list[float], estimated: bool) -> dict[str, Any]:
    """Seconds of each epoch, before and after, beside each other."""
    name = "before (estimate)" if estimated else "before"
    data = [
        {"type": "bar", "name": name, "x": list(range(1, len(each) + 1)), "y": each, "marker": {"color": colour}}
        for name, each, colour in ((name, before, WAIT), ("after", after, STEP))
        if each
    ]
    layout = {
        "barmode": "group",
        "xaxis": {"dtick": max(1, max(len(before), len(after)) // 10)},
        "yaxis": {"ticksuffix": " s"},
        "showlegend": True,
    }
    return {"data": data, "layout": layout}


def curves(by_name: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Lines over the number of workers; those without points are left out."""
    data = [
        {
            "type": "scatter",
            "x": list(points),
            "y": list(points.values()),
            "mode": "lines+markers",
            "name": name,
            "line": {"color": colour, "dash": dash},
        }
        for (name, points), colour, dash in zip(by_name.items(), (WAIT, STEP), ("dot", "solid"), strict=True)
        if points
    ]
    most = max(max(points) for points in by_name.values() if points)
    layout = {"xaxis": {"dtick": max(1, (most + 8) // 16)}, "yaxis": {"rangemode": "tozero"}, "showlegend": True}
    return {"data": data, "layout": layout}


def memory(line: list[list[float]]) -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "x": [p[0] for p in line],
        "y": [p[1] / 1e6 for p in line],
        "mode": "lines+markers",
        "name": "workers, MB",
        "line": {"color": KINDS["transform"]},
    }
    layout = {"xaxis": {"ticksuffix": " s"}, "yaxis": {"ticksuffix": " MB", "rangemode": "tozero"}}
    return {"data": [trace], "layout": layout}


def machine(line: list[list[float]]) -> dict[str, Any]:
    x = [p[0] for p in line]
    data = [
        {"type": "scatter", "x": x, "y": [p[1] for p in line], "name": "cores busy", "line": {"color": STEP}},
        {
            "type": "scatter",
            "x": x,
            "y": [p[2] / 1e9 for p in line],
            "name": "memory free, GB",
            "yaxis": "y2",
            "line": {"color": KINDS["transform"], "dash": "dot"},
        },
    ]
    layout = {
        "xaxis": {"ticksuffix": " s"},
        "yaxis": {"rangemode": "tozero"},
        "yaxis2": {"ticksuffix": " GB", "overlaying": "y", "side": "right", "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}
