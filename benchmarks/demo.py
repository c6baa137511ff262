"""The run at the top of the README: ``python -m benchmarks.demo run|text|diff``.

``run`` trains on the demo's photographs, plain under ``stoker run`` and then with ``--apply``, keeps what both
printed and what the report says in ``results/demo.json``, and draws the pages anew (``benchmarks.pages``). ``text``
prints what the second one printed, ``diff`` the diff of its report.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from stoker.core.files import write
from stoker.diagnosis.report import text
from stoker.diagnosis.report.schema import RunReport

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "benchmarks" / "results" / "demo.json"
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


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@contextmanager
def _in_colour() -> Iterator[None]:
    """The picture has colours whatever the terminal is that draws it."""
    before = dict(os.environ)
    os.environ.update(TERM="xterm-256color")
    os.environ.pop("NO_COLOR", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def transcript(kept: dict[str, Any]) -> str:
    """What ``stoker run --apply`` printed, with its colours, up to the diff.

    Args:
        kept: see ``measured``.
    """
    with _in_colour():
        said = text.render(msgspec.convert({**kept["report"], "diff": ""}, RunReport), None, _Terminal(), COLUMNS)
    return "\n".join([f"$ stoker run --apply {SCRIPT}", *kept["applied"].splitlines(), *said.splitlines()]) + "\n"


def picture(kept: dict[str, Any], dark: bool) -> str:
    """The transcript as SVG.

    Args:
        kept: see ``measured``.
        dark: for a page with a dark background.
    """
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Text.from_ansi(transcript(kept)), end="")
    theme = SVG_EXPORT_THEME if dark else DEFAULT_TERMINAL_THEME
    drawn = console.export_svg(title=f"stoker run --apply {SCRIPT}", theme=theme, unique_id="stoker")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # rich's would be fetched from elsewhere
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def main(words: list[str]) -> int:
    if words == ["run"]:
        from . import pages

        write(KEPT, json.dumps(measured(), indent=1).replace(f"{ROOT}/", "") + "\n")
        return pages.main([])
    if words == ["text"]:
        plain = re.sub(r"\x1b\[[\d;]*m", "", transcript(json.loads(KEPT.read_text())))
        print(f"```console\n{plain.rstrip()}\n```")
        return 0
    if words == ["diff"]:
        print(f"```diff\n{json.loads(KEPT.read_text())['report']['diff'].rstrip()}\n```")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
