"""The report as one page of HTML, with nothing to fetch: ``stoker run --html FILE``.

``page.html`` is the template, ``page.css`` and ``page.js`` go into it. Jinja escapes all that comes from a script
(paths, names of transforms, messages). plotly's JavaScript goes into the page, which makes it 5 MB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.files import check_writable, write
from ...core.terminal import human_bytes, human_seconds
from . import before_after_text, plots
from .text import bypassed, clock, waited

LINES = 8  # of code, a loader
MISSING = "--html needs jinja2 and plotly: pip install 'stoker[html]'"


def check(path: Path) -> None:
    """Raises before anything is run where the page could not be written afterwards.

    Raises:
        UsageError: no such folder, no write access, or jinja2 or plotly is not installed.
    """
    check_writable(path, "--html")
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ImportError:
        raise UsageError(MISSING) from None


def save(report: dict[str, Any], path: Path) -> None:
    """Writes the page whole or not at all."""
    write(path, render(report))


def render(report: dict[str, Any]) -> str:
    """The page.

    Args:
        report: as in ``report.schema``.
    """
    from plotly.offline import get_plotlyjs

    applied = report.get("applied")
    page: str = _template().render(
        report=report,
        command=" ".join(report["command"]),
        waited=_waited(report),
        notes=[*clock(report), *map(bypassed, report["bypassing"])],
        compared=before_after_text.rows(applied["compared"]) if applied else None,
        applied_notes=before_after_text.said(applied) if applied else [],
        figures=plots.figures(report),
        plotly=get_plotlyjs(),
    )
    return page.lstrip() + "\n"


def summary(report: dict[str, Any]) -> str:
    """The report without plots, for a notebook."""
    rows = [
        [e["name"], e["settings"].get("num_workers"), f"{e['batches']:,}", f"{e['samples_per_s']:,.0f}"]
        for e in report["loaders"]
    ]
    found: str = _template().render(report=report, waited=_waited(report), summary=rows, figures=None)
    return found.strip()


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        bytes=lambda size: human_bytes(float(size or 0)),
        evidence=lambda evidence: [[name, _evidence(name, value)] for name, value in evidence.items()],
        ceilings=lambda found: [f"{found[what]:,.0f}" for what in ("loop", "steps", "loader")],
        totals=_totals,
        lines=lambda where: [
            [w["line"], w["name"], w["kind"], f"{w['ran']:.1%}", f"{w['waited']:.1%}"] for w in where[:LINES]
        ],
    )
    return environment.get_template("page.html")


def _waited(report: dict[str, Any]) -> str:
    if not report["loaders"]:
        return "" if report["bypassing"] else ": no DataLoader was iterated"
    return f": {waited(report)[1]}"


def _totals(e: dict[str, Any]) -> list[object]:
    """A loader's row: settings, counts, and seconds of one batch."""
    batches = max(1, int(e["batches"]))
    return [
        e["settings"].get("num_workers"),
        e["settings"].get("batch_size"),
        f"{e['batches']:,}",
        e["epochs"],
        human_seconds(e["wait_s"] / batches),
        human_seconds(e["step_s"] / batches),
        f"{e['samples_per_s']:,.0f}",
    ]


def _evidence(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if name.endswith(("bytes", "_min")):
        return human_bytes(float(value))
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"
