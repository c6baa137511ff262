"""The report as one page of HTML, with nothing to fetch: ``stoker run --html FILE``.

``page.html`` is the template, ``page.css`` goes into it. Jinja escapes all that comes from a script (paths, names of
transforms, messages). Plots are bars of HTML, each part with a title that has its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...core.errors import UsageError
from ...core.files import check_writable, write
from ...core.terminal import human_bytes, human_seconds
from . import before_after_text
from .schema import Compared, LoaderReport, RunReport
from .text import bypassing_text, waited, wall_clock

if TYPE_CHECKING:
    import jinja2

MISSING = "--html needs jinja2: pip install 'stoker[html]'"
KINDS = {
    "decode": "#d97706",
    "transform": "#2563eb",
    "collate": "#059669",
    "fetch": "#64748b",
    "cache": "#0d9488",
    "waiting": "#c026d3",
    "transport": "#0891b2",
}
WAIT, STEP, FIRST = "#dc2626", "#16a34a", "#f59e0b"


class Part(NamedTuple):
    name: str
    value: float
    colour: str


class Plot(NamedTuple):
    """Stacked bars of one scale: by label, the parts of each."""

    title: str
    unit: str
    rows: list[tuple[str, list[Part]]]

    @property
    def top(self) -> float:
        """What the longest bar comes to."""
        return max(sum(part.value for part in parts) for _, parts in self.rows) or 1.0

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Each part's colour and text, with its number where there is one bar."""
        if len(self.rows) == 1:
            return [(part.colour, f"{part.name}: {part.value:.3g} {self.unit}") for part in self.rows[0][1]]
        return list(dict.fromkeys((part.colour, part.name) for _, parts in self.rows for part in parts))


def check(path: Path) -> None:
    """Raises before anything is run where the page could not be written afterwards. Raises UsageError: no such
    folder, no write access, or jinja2 is not installed."""
    check_writable(path, "--html")
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise UsageError(MISSING) from None


def save(report: RunReport, path: Path) -> None:
    """Writes the page whole or not at all."""
    write(path, render(report))


def render(report: RunReport) -> str:
    """The page."""
    page: str = _template().render(
        report=report,
        command=" ".join(report.command),
        waited=waited(report) if report.loaders else "" if report.bypassing else "no DataLoader was iterated",
        notes=[wall_clock(report), *map(bypassing_text, report.bypassing)],
        compared=before_after_text.rows(report.applied.compared) if report.applied else None,
        applied_notes=list(before_after_text.notes(report.applied)) if report.applied else [],
        paces=list(_paces(report.applied.compared)) if report.applied else [],
    )
    return page.lstrip() + "\n"


def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(bytes=human_bytes, shown=_shown, totals=_totals, plots=_plots)
    return environment.get_template("page.html")


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


def _shown(value: object, name: str) -> str:
    """A number of a finding's evidence in the unit that its name says."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith(("bytes", "_min")):
        return human_bytes(float(value))
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"


def _plots(loader: LoaderReport) -> Iterator[Plot]:
    """Where a batch's time goes, a task's, and each epoch's."""
    batches, first = max(1, loader.batches), loader.stages.startup.wait_s
    parts = [
        Part("waiting for data", max(0.0, loader.wait_s - first), WAIT),
        Part("waiting for an epoch's first batch", first, FIRST),
        Part("the step", loader.step_s, STEP),
    ]
    loop = [part._replace(value=part.value / batches * 1e3) for part in parts if part.value]
    yield Plot("Where a batch's time goes", "ms", [("", loop)])
    if loader.looks:
        shares = {("waiting", KINDS["waiting"]): 100 * sum(code.waited for code in loader.where)}
        for code in loader.where:
            key = f"{code.kind}: {code.name}", KINDS.get(code.kind, "#888888")
            shares[key] = shares.get(key, 0.0) + code.ran * 100
        task = [Part(name, share, colour) for (name, colour), share in shares.items() if share]
        yield Plot("Where a worker's time goes", "%", [("", sorted(task, key=lambda part: -part.value))])
    if len(loader.by_epoch) > 1:
        rows = []
        for i, e in enumerate(loader.by_epoch):
            waits = [Part("first batch", e.first_wait_s, FIRST), Part("waiting", e.later_wait_s, WAIT)]
            rows.append((f"epoch {i + 1}", [*waits, Part("steps", e.step_s, STEP)]))
        yield Plot("Seconds, epoch by epoch", "s", rows)


def _paces(compared: Compared) -> Iterator[Plot]:
    """Seconds of each epoch, before and after."""
    name = "before (estimate)" if compared.estimated else "before"
    for row in compared.loaders:
        both = ((name, row.each.before, WAIT), ("after", row.each.after, STEP))
        if len(row.each.after) > 1:
            epochs = range(max(len(seconds) for _, seconds, _ in both))
            rows = [(f"epoch {i + 1}", [Part(what, s[i], c)]) for i in epochs for what, s, c in both if i < len(s)]
            yield Plot(f"Seconds per epoch, {row.name}", "s", rows)
