"""What README.md and pages beside it show of results: ``python -m benchmarks.pages`` draws it anew.

Pictures are drawn from ``results/``. A table stands between ``<!-- $ COMMAND -->`` and ``<!-- end -->``: it is what
that command prints. ``docs/report.schema.json`` is made from the types of the report. ``transcripts`` runs the commands
of the how-to pages instead, three minutes; ``runs`` prints a table of the stored results.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from stoker.core.files import write
from stoker.diagnosis.report.schema import SCHEMA, RunReport

from . import demo
from .scale import picture as scale
from .scripts.__main__ import by_round, later, paired

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    DOCS / "versions.md",
    DOCS / "scale.md",
    DOCS / "get-started.md",
    DOCS / "concepts" / "trust.md",
)
TRANSCRIPTS = tuple(  # pages that show what commands print: with times in it, so never the same twice
    DOCS / f"{name}.md"
    for name in (
        "doctor",
        "compare",
        "report",
        "bench",
        "tune",
        "stats",
        "batch-size",
        "staging",
        "resume",
        "faults",
        "money",
    )
)
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-30-two-cores-scripts.jsonl"
MACHINES = {"versions": "a machine for each pair of versions", "nvidia-h100": "16 cores, one H100"}
GAINS = {  # scripts in the picture of gains, and what they are
    "pil_compose": "Pillow, transforms\nof one's own",
    "lightning_module": "Lightning",
    "hf_trainer": "Hugging Face\nTrainer, text",
    "monai_dict": "MONAI, volumes",
}
COMMAND = re.compile(r"(<!-- \$ python (-m benchmarks.*?) -->\n).*?(<!-- end -->\n)", re.DOTALL)
REPORT_SCHEMA = ROOT / "docs" / "report.schema.json"


def gains() -> dict[str, dict[str, tuple[float, float, float]]]:
    """Of the whole script and of each later epoch: seconds plain and applied, and how many times faster, by script.

    Medians over rounds; the ratio is within rounds, as in the table of ``benchmarks.scripts``.
    """
    lines: list[dict[str, Any]] = [json.loads(line) for line in RESULTS.read_text().splitlines()][1:]
    out: dict[str, dict[str, tuple[float, float, float]]] = {}
    for what, value in (("whole script", lambda line: float(line["wall"])), ("each later epoch", later)):
        for name in GAINS:
            plain, applied = (by_round(lines, name, way, value) for way in ("plain", "applied"))
            middle = [statistics.median(values.values()) for values in (plain, applied)]
            out.setdefault(what, {})[name] = (middle[0], middle[1], paired(applied, plain))
    return out


def gains_picture(dark: bool) -> str:
    """Bars of ``gains``, as SVG.

    Args:
        dark: for a page with a dark background.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    ink, before, after = ("#e6edf3", "#6e7681", "#f0883e") if dark else ("#1f2328", "#afb8c1", "#bc4c00")
    settings = {"svg.hashsalt": "stoker", "svg.fonttype": "none", "font.family": "sans-serif", "text.color": ink}
    settings |= {"axes.edgecolor": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    drawn = io.StringIO()
    with matplotlib.rc_context(settings):
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True, sharey=True)
        for ax, (what, scripts) in zip(axes, gains().items(), strict=True):
            for i, (plain, applied, ratio) in enumerate(scripts.values()):
                for offset, seconds, colour, label in (
                    (-0.2, plain, before, f"{plain:.1f} s"),
                    (0.2, applied, after, f"{applied:.1f} s, {ratio:.1f}x"),
                ):
                    bar = ax.barh(i + offset, seconds, 0.38, color=colour)
                    ax.bar_label(bar, [label], padding=4)
            ax.set(title=f"seconds, {what}", yticks=range(len(GAINS)), yticklabels=GAINS.values())
            ax.margins(x=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        axes[0].invert_yaxis()
        bars = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (before, after)]
        names = ["python train.py", "stoker run --apply train.py"]
        figure.legend(bars, names, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"


def filled(page: str) -> str:
    """A page whose commands have been run, with what they printed behind them."""

    def printed(found: re.Match[str]) -> str:
        line = [sys.executable, *shlex.split(found[2])]
        p = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
        return f"{found[1]}{p.stdout.strip()}\n{found[3]}"

    return COMMAND.sub(printed, page)


def pictures() -> dict[str, str]:
    """What lies in docs/, by name."""
    kept = json.loads(demo.KEPT.read_text())
    out = {}
    for shade in ("light", "dark"):
        out[f"demo-{shade}.svg"] = demo.picture(kept, shade == "dark")
        out[f"gains-{shade}.svg"] = gains_picture(shade == "dark")
        out[f"scale-{shade}.svg"] = scale.picture(scale.KEPT, shade == "dark")
    return out


def report_schema() -> str:
    """The JSON Schema (draft 2020-12) of what ``stoker run --json`` writes. Keys that it does not name may appear."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"The report of stoker run, schema {SCHEMA}",
        "$comment": "Made from src/stoker/diagnosis/report/schema.py by python -m benchmarks.pages",
    }

    def anything(kind: type) -> dict[str, Any]:
        """Of ``object``."""
        if kind is object:
            return {"description": "of any type: a user's class may have it"}
        raise NotImplementedError

    return json.dumps({**head, **msgspec.json.schema(RunReport, schema_hook=anything)}, indent=1) + "\n"


def runs() -> str:
    """A table of the stored results: when, on what, which benchmark, how many lines."""
    out = ["| date | machine | benchmark | lines |", "| --- | --- | --- | --- |"]
    for path in sorted(RESULTS.parent.glob("*.jsonl"), reverse=True):
        date, name = path.stem[:10], path.stem[11:]
        what = name.rpartition("two-cores-")[2]
        shown = "two cores, no GPU" if what != name else MACHINES[name]
        out.append(f"| {date} | {shown} | [{what}](../../{path.relative_to(ROOT)}) | {_count(path):,} |")
    return "\n".join(out)


def _count(path: Path) -> int:
    return len(path.read_text().splitlines())


def main(words: list[str]) -> int:
    if words == ["runs"]:
        print(runs())
        return 0
    if words == ["transcripts"]:
        for page in TRANSCRIPTS:
            write(page, filled(page.read_text()))
        return 0
    if words:
        print(__doc__, file=sys.stderr)
        return 2
    write(REPORT_SCHEMA, report_schema())
    for name, drawn in pictures().items():
        write(ROOT / "docs" / name, drawn)
    for page in PAGES:
        write(page, filled(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
