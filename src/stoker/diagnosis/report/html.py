"""The report as one page of HTML, with nothing to fetch: ``stoker run --html FILE``.

``page.html`` is the template, ``page.css`` and ``page.js`` go into it. Jinja escapes all that comes from a script
(paths, names of transforms, messages). plotly's JavaScript goes into the page, which makes it 5 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import UsageError
from ...core.files import check_writable, write
from ...core.terminal import human_bytes, human_seconds
from ...core.types import JsonObject
from . import before_after_text, plots
from .schema import CodeLine, LoaderReport, RunReport
from .text import bypassing_text, waited, wall_clock

if TYPE_CHECKING:
    import jinja2

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


def save(report: RunReport, path: Path) -> None:
    """Writes the page whole or not at all."""
    write(path, render(report))


def render(report: RunReport) -> str:
    """The page."""
    from plotly.offline import get_plotlyjs

    page: str = _template().render(
        report=report,
        command=" ".join(report.command),
        waited=_waited(report),
        notes=[wall_clock(report), *map(bypassing_text, report.bypassing)],
        compared=before_after_text.rows(report.applied.compared) if report.applied else None,
        applied_notes=list(before_after_text.notes(report.applied)) if report.applied else [],
        figures=plots.figures(report),
        plotly=get_plotlyjs(),
    )
    return page.lstrip() + "\n"


def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        bytes=lambda size: human_bytes(float(size or 0)),
        evidence=_evidence,
        totals=_totals,
        lines=_lines,
    )
    return environment.get_template("page.html")


def _waited(report: RunReport) -> str:
    if not report.loaders:
        return "" if report.bypassing else ": no DataLoader was iterated"
    return f": {waited(report)}"


def _totals(loader: LoaderReport) -> list[object]:
    """A loader's row: settings, counts, and seconds of one batch."""
    batches = max(1, loader.batches)
    return [
        loader.settings.num_workers,
        loader.settings.batch_size,
        f"{loader.batches:,}",
        loader.epochs,
        human_seconds(loader.wait_s / batches),
        human_seconds(loader.step_s / batches),
        f"{loader.samples_per_s:,.0f}",
    ]


def _lines(where: Sequence[CodeLine]) -> list[list[str]]:
    return [[w.line, w.name, w.kind, f"{w.ran:.1%}", f"{w.waited:.1%}"] for w in where[:LINES]]


def _evidence(evidence: JsonObject) -> list[list[str]]:
    return [[name, _shown(name, value)] for name, value in evidence.items()]


def _shown(name: str, value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith(("bytes", "_min")):
        return human_bytes(float(value))
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"
