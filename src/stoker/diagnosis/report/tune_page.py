"""What ``stoker tune`` found as one page of HTML, with nothing to fetch: ``stoker tune --html FILE``.

``tune.html`` is the template; the style is that of the report's page. ``tuning.curve`` draws the curve.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...core.files import write
from ...core.terminal import counted, rate
from ...tuning.result import TuneResult
from . import html


def save(result: TuneResult, path: Path) -> None:
    """Writes the page whole or not at all."""
    write(path, render(result))


def render(result: TuneResult) -> str:
    from markupsafe import Markup

    page: str = html.template("tune.html").render(
        result=result,
        headline=f"{counted(result.best.num_workers, 'worker')}: {rate(result.rate)} samples a second",
        tiles=list(_tiles(result)),
        drawing=Markup(result.drawing()),  # its texts are escaped there
        guesses=[
            [
                g.name,
                g.formula,
                f"{g.workers:,}",
                rate(g.rate),
                "-" if g.rate is None else f"{g.rate / result.rate:.0%}",
            ]
            for g in result.guesses
        ],
        unmeasured=[f"{g.name} was not measured: {g.why}" for g in result.guesses if g.why],
        text=str(result),
    )
    return page.lstrip() + "\n"


def _tiles(result: TuneResult) -> Iterator[tuple[str, str]]:
    """Numbers that are shown large, and what each one is."""
    best = result.best
    yield str(best.num_workers), "workers"
    if best.num_workers:
        yield str(best.prefetch_factor), "batches ahead for each worker"
    if best.batch_size is not None:
        yield f"{best.batch_size:,}", "samples in a batch"
    yield f"{rate(result.low)}..{rate(result.high)}", "samples a second, window by window"
