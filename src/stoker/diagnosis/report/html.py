"""Self-contained HTML pages: the report (``stoker run --html FILE``), and what ``stoker tune --html FILE`` found.

``page.html`` and ``tune.html`` are the templates, ``page.css`` goes into them, and ``macros.html`` has the tables and
bars. Jinja escapes all that comes from a script (paths, names of transforms, messages). ``plots`` says what is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import UsageError
from ...core.files import check_writable, write
from ...core.packages import is_users
from ...core.terminal import counted, human_bytes, human_seconds, rate, short
from . import applied as applied_changes
from . import money, plots
from .headline import bypassing_text, headline, main_loader
from .schema import Finding, LoaderReport, RunReport
from .text import rank_sentences, wall_clock

if TYPE_CHECKING:
    import jinja2

    from ...tuning.result import TuneResult

MISSING = "--html needs jinja2: pip install 'stoker[html]'"
MAX_LOADERS = 8  # most loaders drawn; the table has all
MAX_PRINTED = 2  # most loaders drawn on paper, which is two pages if a report has no more than six findings
MAX_LINES = 8  # of code per loader
MAX_DECISIONS = 20
INSTALLED = re.compile(r"/(site|dist)-packages/")  # also of another environment


def check(path: Path) -> None:
    """Raises UsageError, before the script runs, if the page cannot be written or jinja2 is not installed."""
    check_writable(path, "--html")
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise UsageError(MISSING) from None


def save(report: RunReport, path: Path) -> None:
    """Writes the page atomically."""
    write(path, render(report))


def save_tuned(result: TuneResult, path: Path) -> None:
    """Writes what ``stoker tune`` found, atomically. ``tuning.curve`` draws the curve."""
    from markupsafe import Markup

    best = result.best
    tiles = [(str(best.num_workers), "workers")]
    if best.num_workers:
        tiles.append((str(best.prefetch_factor), "batches ahead for each worker"))
    if best.batch_size is not None:
        tiles.append((f"{best.batch_size:,}", "samples in a batch"))
    tiles.append((f"{rate(result.low)}..{rate(result.high)}", "samples a second, window by window"))
    shares = ["-" if g.rate is None else f"{g.rate / result.rate:.0%}" for g in result.guesses]
    page: str = _template("tune.html").render(
        result=result,
        headline=f"{counted(best.num_workers, 'worker')}: {rate(result.rate)} samples a second",
        tiles=tiles,
        drawing=Markup(result.drawing()),  # its texts are escaped there
        guesses=[
            [g.name, g.formula, f"{g.workers:,}", rate(g.rate), share]
            for g, share in zip(result.guesses, shares, strict=True)
        ],
        unmeasured=[f"{g.name} was not measured: {g.why}" for g in result.guesses if g.why],
        text=str(result),
    )
    write(path, page.lstrip() + "\n")


def render(report: RunReport) -> str:
    applied, sentence = report.applied, headline(report)
    loaders = sorted(report.loaders, key=lambda loader: -loader.busy_s)
    saved = {(s.cause, s.loader): s for s in report.money.savings} if report.money else {}
    page: str = _template("page.html").render(
        report=report,
        command=" ".join(report.command),
        headline=sentence[:1].upper() + sentence[1:],
        tiles=list(_tiles(report)),
        picture=plots.picture(report),
        notes=[wall_clock(report), *rank_sentences(report.ranks), *map(bypassing_text, report.bypassing)],
        money=list(money.sentences(report.money)) if report.money else [],
        saved=saved,
        compared=applied_changes.rows(applied.compared) if applied else None,
        applied_notes=[*applied_changes.notes(applied), *applied_changes.reasons(applied)] if applied else [],
        paces=list(plots.paces(applied.compared)) if applied else [],
        loaders=loaders,
        drawn=loaders[:MAX_LOADERS],
        printed=MAX_PRINTED,
        max_decisions=MAX_DECISIONS,
    )
    return page.lstrip() + "\n"


def _template(name: str) -> jinja2.Template:
    """A template of this folder, with the filters that pages need."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        bytes=human_bytes, evidence=_evidence, totals=_totals, lines=_own_lines, loop=plots.loop, epochs=plots.epochs
    )
    return environment.get_template(name)


def _tiles(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yields the numbers that are shown large, each with its caption."""
    yield human_seconds(report.wall_s), "wall clock"
    if report.loaders:
        stats = main_loader(report)
        yield f"{stats.share:.0%}", "of the loop waits for data"
        yield rate(stats.loader.samples_per_s), "samples a second"
    if report.money is not None:
        yield f"{report.money.waiting_per_day:,.2f}", "a day for waiting"


def _totals(loader: LoaderReport) -> list[object]:
    """Returns a loader's row: name, settings, counts, seconds per batch and rate."""
    batches = max(1, loader.batches)
    return [
        short(loader.name),
        loader.settings.num_workers,
        loader.settings.batch_size,
        f"{loader.batches:,}",
        loader.epochs,
        human_seconds(loader.wait_s / batches),
        human_seconds(loader.step_s / batches),
        f"{loader.samples_per_s:,.0f}",
    ]


def _evidence(finding: Finding) -> list[tuple[str, str]]:
    """Returns the rows of a finding's evidence, without empty ones and what did not happen."""
    return [(name, _shown(value, name)) for name, value in finding.evidence.items() if not _is_empty(value)]


def _is_empty(value: object) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _own_lines(loader: LoaderReport) -> list[list[str]]:
    """Returns rows for the user's own lines in which tasks spent their time: not those of stoker or a library."""
    own = [code for code in loader.where if is_users(code.line.rpartition(":")[0]) and not INSTALLED.search(code.line)]
    return [[c.line, c.name, c.kind, f"{c.ran:.1%}", f"{c.waited:.1%}"] for c in own[:MAX_LINES]]


def _shown(value: object, name: str) -> str:
    """Formats a value of a finding's evidence in the unit that its name implies."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v, str(k))}" for k, v in value.items() if not _is_empty(v))
    if isinstance(value, list):
        return ", ".join(_shown(x, name) for x in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith(("bytes", "_min")):
        return human_bytes(float(value))
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"
