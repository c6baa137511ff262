"""The curve as a picture: samples per second against workers, the model, the knee and the rules of thumb."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from .curve import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".html")
ORANGE = "#c2410c"
BLUE = "#1d4ed8"
GREY = "#6b7280"


def check(path: Path) -> None:
    """Raises before anything is measured where a plot could not be drawn afterwards."""
    if path.suffix not in KINDS:
        raise UsageError(f"--plot {path}: a plot is one of {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("drawing a plot needs matplotlib: pip install 'stoker[plot]'") from None


def draw(curve: Curve, path: Path) -> None:
    """Writes the picture, .png or .svg."""
    _figure(curve).savefig(path, dpi=150)


def svg(curve: Curve) -> str:
    """The picture as SVG, to stand in a page.

    Raises:
        ImportError: matplotlib is not there.
    """
    out = io.StringIO()
    _figure(curve).savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]


def _figure(curve: Curve) -> Figure:
    from matplotlib.figure import Figure  # not pyplot, which opens windows and changes settings of the user's

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ax = figure.add_subplot()
    model = [(p.workers, p.predicted) for p in curve.points if p.predicted is not None]
    if model:
        ax.plot(*zip(*model, strict=True), "--", color=GREY, label="model, from one worker's times")
    measured = [(p.workers, p.rate, p.low or p.rate, p.high or p.rate) for p in curve.points if p.rate is not None]
    x, y, low, high = zip(*measured, strict=True)
    ax.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, label="slowest and fastest window")
    ax.plot(x, y, "o-", color=BLUE, label="measured, median")
    most = max(p.workers for p in curve.points)
    left = curve.best > most / 2
    ax.axvline(curve.best, color=ORANGE, alpha=0.25, linewidth=8)
    ax.annotate(
        f"the knee: {curve.best}",
        (curve.best, curve.rate),
        xytext=(-12 if left else 12, 12),
        textcoords="offset points",
        ha="right" if left else "left",
        color=ORANGE,
        weight="bold",
    )
    ax.set(xlabel="num_workers", ylabel="samples/s", title=curve.name)
    ax.set_xticks([p.workers for p in curve.points])
    ax.set_ylim(0, 1.15 * max(high))
    ax.grid(alpha=0.2)
    ax.legend(loc="best", fontsize=8)
    return figure
