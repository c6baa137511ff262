"""Two commits of stoker against each other, in turns: ``python -m benchmarks.paired run COMMIT [--only overhead]``.

Each measurement is ``benchmarks.measure`` of the commit's own tree, so a workload must be in both. *scripts* are those
of this tree's ``benchmarks/scripts`` that need no framework, under the commit's ``stoker run --apply``, each in a home
of its own. Ratios are turned so that more than 1 means that this tree is faster than COMMIT.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from stoker.core import resources

from . import table

ROOT = Path(__file__).parent.parent
WORKLOADS = ("overhead", "transport", "startup", "jpeg", "staged", "scripts")
SCRIPTS = ("pil_compose", "mosaic", "in_ram", "stream", "compute_bound")
LIMIT_S = 300  # for one measurement
Line = dict[str, Any]


def measure(tree: Path, commit: str, workload: str, round_: int) -> list[Line]:
    """The lines of one measurement of one tree, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.measure", workload, "stoker"]
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    p = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if p.returncode:
        raise RuntimeError(f"{workload} of {commit}: {p.stderr or p.stdout}")
    return [
        {"contestant": commit, "workload": workload, "round": round_, **json.loads(line)}
        for line in p.stdout.splitlines()
        if line.startswith("{")
    ]


def measure_scripts(tree: Path, commit: str, round_: int) -> list[Line]:
    """Seconds of whole scripts, and of their later epochs, by the lines that they print."""
    lines: list[Line] = []
    for name in SCRIPTS:
        with tempfile.TemporaryDirectory() as home:
            env = {**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "PHOTOS": str(ROOT / "examples" / "data")}
            env["PYTHONPATH"] = os.pathsep.join(map(str, (tree / "src", ROOT / "benchmarks" / "scripts")))
            script = str(ROOT / "benchmarks" / "scripts" / f"{name}.py")
            command = [sys.executable, "-m", "stoker", "run", "--apply", "--json", f"{home}/report.json", script]
            began, ends = time.perf_counter(), []
            with subprocess.Popen(
                command, cwd=home, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as p:
                assert p.stdout is not None
                ends = [time.perf_counter() for text in p.stdout if text.startswith("epoch ")]
            if p.returncode:
                raise RuntimeError(f"{name} of {commit}: exit code {p.returncode}")
            common = {"contestant": commit, "workload": "scripts", "round": round_}
            lines.append(
                {**common, "metric": f"scripts {name}: whole", "epoch": 1, "value": time.perf_counter() - began}
            )
            for epoch, (one, two) in enumerate(itertools.pairwise(ends), 2):
                lines.append({**common, "metric": f"scripts {name}: later epochs", "epoch": epoch, "value": two - one})
    return lines


def render(lines: list[Line]) -> str:
    """One row a metric: medians of both commits, the ratio of the medians, and the ratios of the rounds."""
    values: dict[str, dict[str, dict[int, dict[int, float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for line in lines:
        if "metric" in line:
            values[line["metric"]][line["contestant"]][line["round"]][line["epoch"]] = line["value"]
    out = ["| metric | unit | before | after | ratio | of each round |", "|---|---|---|---|---|---|"]
    for metric, by in values.items():
        if len(by) < 2:
            continue
        unit = "MB" if metric.endswith(": memory") else table.UNITS.get(metric.split()[0], "batches/s")
        rounds = sorted(set(by["before"]) & set(by["after"]))
        before, after = ([table.value_of(metric, by[c][r]) for r in rounds] for c in ("before", "after"))
        pairs = [b / a if unit in table.LESS else a / b for b, a in zip(before, after, strict=True)]
        b, a = statistics.median(before), statistics.median(after)
        ratio = b / a if unit in table.LESS else a / b
        out.append(f"| {metric} | {unit} | {b:,.4g} | {a:,.4g} | {ratio:.2f} | {min(pairs):.2f} to {max(pairs):.2f} |")
    return "\n".join(out)


def run(a: argparse.Namespace) -> None:
    """Measures both trees in turns, keeps the raw lines, and prints the table."""
    photos = ROOT / "examples" / "data"
    if not photos.exists():
        raise SystemExit(f"no photographs in {photos}: python examples/make_photos.py --out examples/data makes them")
    lines: list[Line] = [{"machine": resources.read().as_dict(), "load": os.getloadavg(), "before": a.commit}]
    a.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open(a.json, "w") as raw:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), a.commit], cwd=ROOT, check=True)
        (tree / "examples" / "data").symlink_to(photos)
        trees = {"before": tree, "after": ROOT}
        for each in trees.values():  # as an installation does; else processes that import stoker compile it
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(each / "src")], check=True)
        raw.write(json.dumps(lines[0]) + "\n")
        try:
            for r in range(a.rounds):
                for workload in a.only or WORKLOADS:
                    for name in trees if r % 2 == 0 else reversed(trees):
                        if workload == "scripts":
                            new = measure_scripts(trees[name], name, r)
                        else:
                            new = measure(trees[name], name, workload, r)
                        lines += new
                        raw.writelines(json.dumps(line) + "\n" for line in new)
                        raw.flush()
                    print(f"paired: round {r + 1}/{a.rounds} {workload}", file=sys.stderr)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print(render(lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paired", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("run", help="measure, in turns")
    p.add_argument("commit", help="the tree that this one is compared with")
    p.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    p.add_argument("--only", action="append", choices=WORKLOADS, help="this one alone; as often as you like")
    p.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "local" / "paired.jsonl")
    p = commands.add_parser("table", help="the table of raw lines kept earlier")
    p.add_argument("file", type=Path)
    a = parser.parse_args()
    if a.command == "run":
        run(a)
    else:
        print(render([json.loads(line) for line in a.file.read_text().splitlines()]))


if __name__ == "__main__":
    main()
