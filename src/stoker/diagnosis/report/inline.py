"""The report as a small HTML fragment for a notebook, without further packages, and the progress line before it.

Colours come from the notebook's theme; only the verdict has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ...core.terminal import human_seconds, short
from . import applied as applied_changes
from .headline import bypassing_text, headline, why
from .schema import RunReport
from .text import LOADER_HEADERS, apply_helps, finding_text, loader_rows

COLOURS = {"healthy": "#16a34a", "input-bound": "#dc2626", "transfer-bound": "#dc2626", "unknown": "#d97706"}
FINDINGS = 4  # findings shown; the others are folded away
BOX = "font:13px/1.5 system-ui,sans-serif;border-left:3px solid {};padding:2px 0 2px 12px;max-width:60em"
CELL = "padding:1px 14px 1px 0;background:none;border:0;white-space:nowrap;text-align:"
TABLE = "margin:4px 0;border:0;font:inherit;color:inherit"
SCROLLS = "overflow-x:auto"


def render(report: RunReport) -> str:
    """Returns the fragment. It begins with the headline, as the text and the page do."""
    sentence = f"stoker: {escape(headline(report))}"
    unreached = [f"<div>{escape(bypassing_text(each))}</div>" for each in report.bypassing]
    if not report.loaders:  # the headline has the first of ``unreached``
        return _box("unknown", [f"<div>{sentence}</div>", *unreached[1:]])
    verdict = f'<b style="color:{COLOURS[report.verdict]}">{report.verdict}</b>'
    out = [f"<div>{sentence if report.applied else sentence.replace(report.verdict, verdict, 1)}</div>"]
    if report.applied is not None:
        out.append(f"<div>what is left: {verdict}: {escape(why(report))}</div>")
    out.append(_table(LOADER_HEADERS, loader_rows(report)))
    if report.applied is not None:
        headers, figures = applied_changes.rows(report.applied.compared)
        out.append(_table(headers, figures[1:]))  # without the row for the script as a whole
        figures_from = [*applied_changes.notes(report.applied), *applied_changes.reasons(report.applied)]
        notes = "".join(f"<div>{escape(note)}</div>" for note in figures_from)
        out.append(f"<details><summary>where these figures come from</summary>{notes}</details>" if notes else "")
    findings = [f"<li>{escape(finding_text(f)).replace(f.cause, f'<b>{f.cause}</b>', 1)}</li>" for f in report.findings]
    if findings:
        out.append(_list(findings[:FINDINGS]))
    if findings[FINDINGS:]:
        out.append(f"<details><summary>more</summary>{_list(findings[FINDINGS:])}</details>")
    out += unreached
    if report.applied is None and apply_helps(report):
        out.append("<div>Try <code>%stoker_apply on</code> before the cell.</div>")
    if report.diff:
        diff = f'<pre style="{SCROLLS}">{escape(report.diff)}</pre>'
        out.append(f"<details><summary>the same in your own code</summary>{diff}</details>")
    return _box(report.verdict, out)


def progress(live: Mapping[str, Mapping[str, float]], seconds: float) -> str:
    """Returns one line of progress from the counters of ``ProcessWatch.live``.

    Example:
        >>> progress({"/x/train.py:3": {"wait_s": 1, "step_s": 3, "batches": 10, "samples": 80}}, 4.0)
        'stoker: 4.0 s, train.py:3: batch 10, waits 25% of its time, 20 samples/s'
    """
    out = [f"stoker: {human_seconds(seconds)}"]
    for name, row in sorted(live.items(), key=lambda item: -item[1]["wait_s"] - item[1]["step_s"])[:1]:
        loop_s = row["wait_s"] + row["step_s"]
        if row["batches"] and loop_s > 0:
            out.append(
                f"{short(name)}: batch {row['batches']:,.0f}, waits {row['wait_s'] / loop_s:.0%} of its time, "
                f"{row['samples'] / loop_s:,.0f} samples/s"
            )
    return ", ".join(out)


def line(text: str) -> str:
    """Renders a line of plain text in the style of the report."""
    return _box("", [f"<div>{escape(text)}</div>"])


def _box(verdict: str, parts: list[str]) -> str:
    return f'<div style="{BOX.format(COLOURS.get(verdict, "#94a3b8"))}">{"".join(parts)}</div>'


def _list(items: list[str]) -> str:
    return f'<ul style="margin:2px 0;padding-left:18px">{"".join(items)}</ul>'


def _table(headers: list[str], figures: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        sides = ["left", *["right"] * len(cells)]
        parts = [f'<{tag} style="{CELL}{side}">{escape(c)}</{tag}>' for c, side in zip(cells, sides, strict=False)]
        return f"<tr style='background:none'>{''.join(parts)}</tr>"

    body = "".join(row(cells, "td") for cells in figures)
    return f'<div style="{SCROLLS}"><table style="{TABLE}">{row(headers, "th")}{body}</table></div>'
