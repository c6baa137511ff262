"""The transcript at the top of the README: ``python -m benchmarks.demo run|render``.

``run`` trains on the demo's photographs, plain under ``stoker run`` and then with ``--apply``, and keeps what both
printed and what the report says in ``demo.json``; ``render`` writes the README's lines from that file, as ``run`` does
at its end. The lines are this version's: a test renders them again and compares.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stoker.core.files import write
from stoker.diagnosis.report import text

ROOT = Path(__file__).parent.parent
README, KEPT = ROOT / "README.md", ROOT / "benchmarks" / "results" / "demo.json"
BEGIN, END = "<!-- transcript: python -m benchmarks.demo run -->\n", "<!-- end -->\n"
SCRIPT = "examples/train_lazy.py"
COLUMNS = 100
SHOWN = ("command", "exit_code", "wall_s", "partial", "bypassing", "verdict", "findings", "applied", "diff")
LOADER = ("name", "batches", "samples", "epochs", "wait_s", "step_s", "loop_s", "samples_per_s", "settings", "epoch_s")


def measured() -> dict[str, Any]:
    """What the two runs printed, and of the second one's report what the text is made of."""
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        for name, extra in (("plain", []), ("applied", ["--apply"])):
            line = [sys.executable, "-m", "stoker", "run", *extra, "--json", str(file), SCRIPT]
            p = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            out[name] = p.stdout
        report = json.loads(file.read_text())
    out["report"] = {key: report[key] for key in SHOWN}
    out["report"]["machine"] = {"cores": report["machine"]["cores"]}
    keys = (*LOADER, "stages", "decisions", "cache", "faults", "device", "memory")
    out["report"]["loaders"] = [{key: e[key] for key in keys} for e in report["loaders"]]
    return out


class _Page(io.StringIO):
    encoding = "utf-8"


def transcript(kept: dict[str, Any]) -> str:
    """The README's lines.

    Args:
        kept: see ``measured``.
    """
    said = text.render(kept["report"], None, _Page(), COLUMNS)
    lines = [f"$ stoker run --apply {SCRIPT}", *kept["applied"].splitlines(), *said.splitlines()]
    return BEGIN + "```console\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n" + END


def parts(readme: str) -> tuple[str, str, str]:
    """What stands before the transcript, the transcript, and what stands behind it."""
    before, _, rest = readme.partition(BEGIN)
    own, _, behind = rest.partition(END)
    return before, BEGIN + own + END, behind


def main(words: list[str]) -> int:
    if words not in (["run"], ["render"]):
        print(__doc__, file=sys.stderr)
        return 2
    if words == ["run"]:
        write(KEPT, json.dumps(measured(), indent=1).replace(f"{ROOT}/", "") + "\n")
    before, _, behind = parts(README.read_text())
    README.write_text(before + transcript(json.loads(KEPT.read_text())) + behind)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
