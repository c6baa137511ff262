"""The example reports of docs/reports: ``python -m benchmarks.reports [NAME]...`` makes them anew, in a minute or two.

Six are what ``stoker run --html`` makes of scripts whose causes are known (tests/diagnosis/cases). ``train_lazy`` is
the stored run of ``benchmarks.demo`` and is not run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from stoker.core.files import write
from stoker.diagnosis.report import html
from stoker.diagnosis.report.schema import RunReport

from . import demo

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "diagnosis" / "cases"
OUT = ROOT / "docs" / "reports"
PRICES = ["--gpu-price", "2.10", "--gpus", "8"]
EXAMPLES = {  # by case: options of stoker run, and what the page is about
    "slow_decode_jpeg": ([], "a decoder takes most of the time"),
    "too_few_workers": (PRICES, "one worker where two cores are granted, and what that costs"),
    "slow_transform_in_getitem": ([], "one line of `__getitem__` takes most of the time"),
    "slow_storage_latency": ([], "each read waits for the storage"),
    "worker_startup": ([], "each epoch begins with a pause while workers start"),
    "healthy_computing_step": ([], "a loop that computes: nothing to do"),
}
PAGE = """# Example reports

What `stoker run --html FILE` writes for six scripts with known causes ([cases](../../tests/diagnosis/cases)), on two
cores without a GPU, and for the README's run. `python -m benchmarks.reports` makes them again.

| page | options | what it shows |
| --- | --- | --- |
| [train_lazy](train_lazy.html) | --apply | before and after: photographs are decoded once and cached |
"""


def made(name: str, options: list[str]) -> str:
    """The page of one case, run now."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(CASES), os.environ.get("PYTHONPATH")]))}
        line = [sys.executable, "-m", "stoker", "run", *options, "--json", str(file), f"{name}.py"]
        subprocess.run(line, cwd=CASES, env={**env, "XDG_CACHE_HOME": folder}, stdout=subprocess.DEVNULL, check=True)
        return html.render(msgspec.json.decode(file.read_text().replace(f"{ROOT}/", ""), type=RunReport))


def stored() -> str:
    """The page of the README's run."""
    kept = json.loads(demo.KEPT.read_text())["report"]
    return html.render(msgspec.convert(kept, RunReport))


def index() -> str:
    """README.md of the folder."""
    rows = [f"| [{name}]({name}.html) | {' '.join(o) or '-'} | {what} |" for name, (o, what) in EXAMPLES.items()]
    return PAGE + "\n".join(rows) + "\n"


def main(names: list[str]) -> int:
    if unknown := set(names) - set(EXAMPLES):
        print(f"{', '.join(sorted(unknown))}: not among {', '.join(EXAMPLES)}", file=sys.stderr)
        return 2
    OUT.mkdir(exist_ok=True)
    for name in names or EXAMPLES:
        write(OUT / f"{name}.html", made(name, EXAMPLES[name][0]))
    write(OUT / "train_lazy.html", stored())
    write(OUT / "README.md", index())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
