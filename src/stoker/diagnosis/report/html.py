"""The report as one page of HTML, with nothing to fetch: ``stoker run --html FILE``.

Everything that comes from a script (paths, names of transforms, messages) is text, never markup. The plots are
plotly's, whose JavaScript goes into the page; that makes it 5 MB, and readable on a train.
"""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.files import write
from ...core.terminal import human_bytes, human_seconds
from ..doctor import Case
from ..doctor.model import period
from . import before_after_text, plots
from .text import bypassed, clock, waited

LINES = 8  # of code, a loader

STYLE = """
:root {
  color-scheme: light dark; --line: #d4d4d8; --soft: #71717a; --card: #f4f4f5;
  --good: #15803d; --bad: #b91c1c; --odd: #a16207;
}
@media (prefers-color-scheme: dark) {
  :root { --line: #3f3f46; --soft: #a1a1aa; --card: #27272a; --good: #4ade80; --bad: #f87171; --odd: #facc15; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
code { overflow-wrap: anywhere; } .soft { color: var(--soft); }
.verdict { font-size: 1.25rem; }
.healthy { color: var(--good); } .input-bound, .transfer-bound { color: var(--bad); } .unknown { color: var(--odd); }
.card { background: var(--card); border-radius: .5rem; padding: .75rem 1rem; margin: .5rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
pre { margin: 0; } details summary { cursor: pointer; } .plot { width: 100%; overflow: hidden; }
"""

SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const ink = dark.matches ? "#e4e4e7" : "#18181b", line = dark.matches ? "#3f3f46" : "#e4e4e7";
  for (const [id, figure] of Object.entries(figures)) {
    const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
    const layout = { ...figure.layout, font: { color: ink, family: "system-ui, sans-serif" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      margin: { l: 8, r: 8, t: 8, b: 8 },
      legend: { orientation: "h", yanchor: "top", y: -32 / (figure.layout.height - 80), traceorder: "normal" } };
    for (const name of ["xaxis", "yaxis", "yaxis2"]) if (layout[name]) layout[name] = { ...axis, ...layout[name] };
    Plotly.react(id, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }
}
dark.addEventListener("change", draw);
draw();
"""


def check(path: Path) -> None:
    """Raises before anything is run where the page could not be written afterwards.

    Raises:
        UsageError: no such folder, no write access, or plotly is not there.
    """
    if not path.parent.is_dir():
        raise UsageError(f"--html {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--html {path}: " + ("it is a folder" if path.is_dir() else "no write access"))
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise UsageError("--html needs plotly: pip install 'stoker[html]'") from None


def save(report: dict[str, Any], path: Path) -> None:
    """Writes the page whole or not at all."""
    write(path, render(report))


def render(report: dict[str, Any]) -> str:
    """The page.

    Args:
        report: as in ``report.schema``.
    """
    from plotly.offline import get_plotlyjs

    figures: dict[str, Any] = {}
    body = [_head(report), _applied(report, figures), _findings(report), _ceilings(report), _diff(report)]
    for i, entry in enumerate(report["loaders"]):
        body.append(_loader(entry, i, figures))
        body.append(_curve(report, entry, i, figures))
    body.append(_machine(report, figures))
    # Inside a script element only "</" and "<!--" could end it or begin a comment; JSON may write "<" otherwise.
    data = json.dumps(figures, default=str).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>stoker: {_text(' '.join(report['command']))}</title><style>{STYLE}</style></head><body>"
        + "\n".join(body)
        + f'<script type="application/json" id="figures">{data}</script>'
        + f"<script>{get_plotlyjs()}</script><script>{SCRIPT}</script></body></html>\n"
    )


def summary(report: dict[str, Any]) -> str:
    """The report without plots, for a notebook."""
    rows: list[list[object]] = [
        [e["name"], e["settings"].get("num_workers"), f"{e['batches']:,}", f"{e['samples_per_s']:,.0f}"]
        for e in report["loaders"]
    ]
    table = _table(["loader", "workers", "batches", "samples/s"], rows) if rows else ""
    verdict = f"<p><b>{_text(report['verdict'])}</b>{_waited(report)}</p>"
    return f"<div>{verdict}{table}{_findings(report)}</div>"


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(headers: list[str], rows: list[list[object]]) -> str:
    head = "".join(f"<th>{_text(h)}</th>" for h in headers)
    lines = "".join("<tr>" + "".join(f"<td>{_text(v)}</td>" for v in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _head(report: dict[str, Any]) -> str:
    verdict = _text(report["verdict"])
    partial = ' <span class="soft">(partial: a process ended without a last word)</span>' if report["partial"] else ""
    code = f' <span class="soft">exit code {_text(report["exit_code"])}</span>' if report["exit_code"] else ""
    grant = report["machine"]
    memory = human_bytes(float(grant.get("memory") or 0))
    return (
        f"<h1>stoker run <code>{_text(' '.join(report['command']))}</code></h1>"
        f'<p class="soft">{_text(grant.get("cores"))} cores, {_text(memory)} granted{code}{partial}</p>'
        f'<p class="verdict {verdict}"><b>{verdict}</b>{_waited(report)}</p>'
        + "".join(f"<p>{_text(words)}</p>" for words in (*clock(report), *map(bypassed, report["bypassing"])))
    )


def _waited(report: dict[str, Any]) -> str:
    if not report["loaders"]:
        return "" if report["bypassing"] else ": no DataLoader was iterated"
    return f": {waited(report)[1]}"


def _diff(report: dict[str, Any]) -> str:
    if not report.get("diff"):
        return ""
    return f'<h2>The same in your own code</h2><div class="card scroll"><pre>{_text(report["diff"])}</pre></div>'


def _curve(report: dict[str, Any], e: dict[str, Any], i: int, figures: dict[str, Any]) -> str:
    """Samples/s against workers: as the model has it, and, after ``--apply``, as it was measured without the steps."""
    cores = int(report["machine"].get("cores", 1))
    case = Case(e, cores)
    size = int(e["samples"]) / case.batches
    counts = sorted({*range(1, 2 * cores + 1), max(1, case.workers)})
    periods = {n: period(case, n) for n in counts}
    applied = (report.get("applied") or {}).get("settings", {}).get(e["name"], {})
    curves = {
        "predicted, with the steps": {n: size / p for n, p in periods.items() if p},
        "measured, the loader alone": {int(n): size * float(rate) for n, rate in applied.get("rates", {}).items()},
    }
    if not any(curves.values()):
        return ""
    return _plot(f"curve{i}", figures, plots.curves(curves), "Samples/s against workers", 260)


def _ceilings(report: dict[str, Any]) -> str:
    found = report.get("ceilings") or {}
    if "loader" not in found:
        return ""
    row: list[object] = [f"{found[what]:,.0f}" for what in ("loop", "steps", "loader")]
    return "<h2>Ceilings, samples/s</h2>" + _table(["the loop", "its steps alone", "its loader alone"], [row])


def _findings(report: dict[str, Any]) -> str:
    out = []
    for f in report["findings"]:
        said = f"{f['share']:.0%} of the loop"
        said += f", predicted {f['predicted_speedup']:.2f}x" if f["predicted_speedup"] else ""
        if f.get("applied"):
            said = "applied" + (f", {f['measured_speedup']:.2f}x" if f.get("measured_speedup") else "")
        evidence = _table(["evidence", ""], [[k, _figure(k, v)] for k, v in f["evidence"].items()])
        out.append(
            f'<div class="card"><b>{_text(f["cause"])}</b> <span class="soft">{said}</span>'
            f"<p>{_text(f['fix'])}</p><details><summary>evidence</summary>{evidence}</details></div>"
        )
    return ("<h2>Findings</h2>" if out else "") + "".join(out)


def _figure(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if name.endswith(("bytes", "_min")):
        return human_bytes(float(value))
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"


def _applied(report: dict[str, Any], figures: dict[str, Any]) -> str:
    applied = report.get("applied")
    if not applied:
        return ""
    headers, rows = before_after_text.rows(applied["compared"])
    out = ["<h2>Before and after</h2>", _table(headers, [list(row) for row in rows])]
    for i, row in enumerate(applied["compared"]["loaders"]):
        if len(row["each"]["after"]) > 1:
            figure = plots.pace(row["each"]["before"], row["each"]["after"], applied["compared"]["estimated"])
            out.append(_plot(f"pace{i}", figures, figure, f"Seconds per epoch, {row['name']}", 260))
    return "".join(out) + "".join(f"<p>{_text(words)}</p>" for words in before_after_text.said(applied))


def _loader(e: dict[str, Any], i: int, figures: dict[str, Any]) -> str:
    settings = e["settings"]
    batches = max(1, int(e["batches"]))
    row: list[object] = [
        settings.get("num_workers"),
        settings.get("batch_size"),
        f"{e['batches']:,}",
        e["epochs"],
        human_seconds(e["wait_s"] / batches),
        human_seconds(e["step_s"] / batches),
        f"{e['samples_per_s']:,.0f}",
    ]
    out = [f"<h2>Loader <code>{_text(e['name'])}</code></h2>"]
    out.append(_table(["workers", "batch", "batches", "epochs", "wait", "step", "samples/s"], [row]))
    out.append(_plot(f"loop{i}", figures, plots.loop(e), "Where a batch's time goes, ms", 150))
    if e.get("looks"):
        out.append(_plot(f"task{i}", figures, plots.task(e), "Where a worker's time goes, %", 170))
        where: list[list[object]] = [
            [w["line"], w["name"], w["kind"], f"{w['ran']:.1%}", f"{w['waited']:.1%}"] for w in e["where"][:LINES]
        ]
        out.append(_table(["line", "in", "kind", "running", "waiting"], where))
    if len(e.get("over_time", [])) > 1:
        out.append(_plot(f"time{i}", figures, plots.over_time(e), "Waiting, over time", 240))
    if len(e.get("by_epoch", [])) > 1:
        out.append(_plot(f"epochs{i}", figures, plots.epochs(e), "Seconds, epoch by epoch", 260))
    line = e["memory"].get("over_time", [])
    if len(line) > 1:
        out.append(_plot(f"memory{i}", figures, plots.memory(line), "The workers' memory (PSS)", 240))
    for words in e.get("decisions", []):
        out.append(f'<p class="soft">{_text(words)}</p>')
    return "".join(out)


def _machine(report: dict[str, Any], figures: dict[str, Any]) -> str:
    around = report.get("around") or {}
    line = around.get("over_time", [])
    if len(line) < 2:
        return ""
    busy = ", ".join(f"{b:.0%}" for b in around.get("cores_busy", []))
    said = f'<p class="soft">each core was busy: {_text(busy)}</p>'
    return "<h2>The machine</h2>" + said + _plot("machine", figures, plots.machine(line), "Meanwhile", 260)


def _plot(name: str, figures: dict[str, Any], figure: dict[str, Any], title: str, height: int) -> str:
    figure["layout"]["height"] = height
    figures[name] = figure
    return f'<h3>{_text(title)}</h3><div class="plot" id="{name}"></div>'
