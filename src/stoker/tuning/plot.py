"""The curve as a picture: samples per second against workers, each with its interval, the model, and the knee."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..core.errors import UsageError
from .curve import Curve

KINDS = (".png", ".svg", ".html")
ANSWER, OTHERS = "#c2410c", "#6b7280"


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


def _figure(curve: Curve) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window, no state of somebody else's

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ax = figure.add_subplot()
    measured = [p for p in curve.points if p.rate is not None]
    x, y = [p.workers for p in measured], [float(p.rate or 0) for p in measured]
    low = [max(0.0, v - float(p.low or v)) for p, v in zip(measured, y, strict=True)]
    high = [max(0.0, float(p.high or v) - v) for p, v in zip(measured, y, strict=True)]
    model = [(p.workers, p.predicted) for p in curve.points if p.predicted is not None]
    if model:
        ax.plot(*zip(*model, strict=True), "--", color=OTHERS, label="model, from one worker's times")
    ax.errorbar(x, y, yerr=[low, high], fmt="o-", color="#1d4ed8", capsize=3, label="measured, 95 %")
    best = curve.best
    ax.axvline(best, color=ANSWER, alpha=0.25, linewidth=8)
    most = max(p.workers for p in curve.points)
    left = best > most / 2
    ax.annotate(
        f"the knee: {best}",
        (best, curve.rate),
        xytext=(-12 if left else 12, 12),
        textcoords="offset points",
        ha="right" if left else "left",
        color=ANSWER,
        weight="bold",
    )
    names: dict[int, list[str]] = {}
    for g in curve.guesses:
        if g.guess.workers is not None and g.guess.workers <= most:
            names.setdefault(g.guess.workers, []).append(g.guess.name)
    for workers, guessed in names.items():  # on the floor, where no curve is
        ax.annotate(
            ", ".join(guessed),
            (workers, 0),
            xytext=(2, 4),
            textcoords="offset points",
            rotation=90,
            va="bottom",
            fontsize=7,
            color=OTHERS,
        )
    ax.set(xlabel="num_workers", ylabel="samples/s", title=curve.name)
    ax.set_xticks([p.workers for p in curve.points])
    ax.set_ylim(0, 1.15 * max([*y, curve.high]))
    ax.grid(alpha=0.2)
    ax.legend(loc="best", fontsize=8)
    return figure
