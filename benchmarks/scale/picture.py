"""The picture of ``docs/scale.md``, as SVG: more nodes, more ranks, more samples."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .compare import AHEAD, LENGTHS, RANK_COUNTS, SAMPLES, VARIED, WORK, Line, best, of, read
from .measure import KEYED

KEPT = Path(__file__).parent.parent / "results" / "2026-11-25-two-cores-scale.jsonl"


def nodes(ax: Any, lines: list[Line], colours: list[str]) -> None:
    """Batches a second by number of nodes; dotted: what the cores could make."""
    for i, work in enumerate(WORK):
        for gather in (False, True):
            found = [x for x in of(lines, "nodes") if x["work"] == work and x["gather"] == gather]
            x = [line["nodes"] for line in found]
            if not gather:
                ax.plot(x, [line["cores"] for line in found], ":", color=colours[i], linewidth=1)
            if not found:
                continue  # large batches are not packed
            label = f"{work}{', calls filled' if gather else ''}"
            ax.plot(x, [line["rate"] for line in found], "^-" if gather else "o-", color=colours[i], label=label)
    ax.set(xscale="log", yscale="log", xlabel="nodes of 16 cores, one rank", title="batches a second")


def ranks(ax: Any, lines: list[Line], colours: list[str]) -> None:
    """The share of time that all ranks wait for one of them."""
    for (spread, ahead), style in zip(VARIED, ("o:", "o--", "o-", "^-"), strict=True):
        found = [x for x in of(lines, "ranks") if (x["spread"], x["ahead"]) == (spread, ahead)]
        label, colour = f"spread {spread}, {ahead} ahead", colours[ahead != AHEAD]
        ax.plot(RANK_COUNTS, [100 * x["waiting"] for x in found], style, color=colour, label=label)
    ax.set(xscale="log", ylim=(0, None), xlabel="ranks that step together", title="waiting, % of the time")


def shuffles(ax: Any, lines: list[Line], colours: list[str]) -> None:
    """Seconds to the first index by number of samples; dashed: extrapolated."""
    drawn = [best(lines, "drawn_s", randperm=n) for n in LENGTHS]
    ax.plot(LENGTHS, drawn, "o-", color=colours[0], label="torch.randperm")
    ax.plot([LENGTHS[-1], SAMPLES], [drawn[-1], drawn[-1] / LENGTHS[-1] * SAMPLES], "--", color=colours[0])
    keyed = [best(lines, "begin_s", feistel=n) + 4096 * best(lines, "index_s", feistel=n) for n in KEYED]
    ax.plot(KEYED, keyed, "^-", color=colours[1], label='shuffle="feistel"')
    ax.set(xscale="log", yscale="log", xlabel="samples", title="seconds to the first index")


def picture(path: Path, dark: bool) -> str:
    """All three.

    Args:
        path: raw lines, simulated ones included.
        dark: for a page with a dark background.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    ink, colours = ("#e6edf3", ["#f0883e", "#58a6ff"]) if dark else ("#1f2328", ["#bc4c00", "#0969da"])
    settings = {"svg.hashsalt": "stoker", "svg.fonttype": "none", "font.family": "sans-serif", "text.color": ink}
    settings |= {"axes.edgecolor": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    settings |= {"axes.titlesize": "medium", "legend.fontsize": "small", "axes.facecolor": "none"}
    lines, drawn = read(path), io.StringIO()
    with matplotlib.rc_context(settings):
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), constrained_layout=True)
        for ax, draw in zip(axes, (nodes, ranks, shuffles), strict=True):
            draw(ax, lines, colours)
            ax.legend(frameon=False)
            ax.grid(True, which="major", alpha=0.2)
            ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"
