"""``python -m benchmarks run|table|gpu``: the runner. Exit codes: 0 targets met, 1 missed or failed, 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stoker.core import resources

from . import table

ROOT = Path(__file__).parent.parent
WORKLOADS = ("jpeg", "transport", "overhead", "leaves", "ragged", "startup", "shuffle", "rows")
WORKLOADS += ("indices", "stragglers", "auto", "memory", "resize", "staged", "state")
LIMIT_S = 300  # for one measurement


def measure(
    workload: str, contestant: str, round_: int, *more: str, module: str = "benchmarks.measure"
) -> list[dict[str, Any]]:
    """Runs one measurement in a process of its own and returns its lines; a failure is a line, too."""
    command = [sys.executable, "-W", "ignore", "-m", module, workload, contestant, *more]
    name = {"workload": workload, "contestant": contestant, "round": round_}
    try:
        p = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return [{**name, "failed": f"longer than {LIMIT_S} s"}]
    lines = [{**name, **json.loads(line)} for line in p.stdout.splitlines() if line.startswith("{")]
    if p.returncode or (not lines and (workload, contestant) != ("resize", "torch")):
        lines.append({**name, "failed": (p.stderr or p.stdout).strip() or f"exit code {p.returncode}"})
    return lines


def run(a: argparse.Namespace) -> int:
    names = [n for n in a.workloads.split(",") if n]
    wrong = [n for n in names if n not in WORKLOADS]
    if wrong or a.rounds < 1:
        print(
            f"unknown workload {wrong[0]!r}; there are {', '.join(WORKLOADS)}" if wrong else "--rounds: at least 1",
            file=sys.stderr,
        )
        return 2
    a.out.mkdir(parents=True, exist_ok=True)
    path = a.json or a.out / time.strftime("%Y%m%d-%H%M%S.jsonl")
    grant = resources.read()
    lines: list[dict[str, Any]] = [
        {"machine": grant.as_dict(), "load": os.getloadavg(), "rounds": a.rounds, "quick": a.quick}
    ]
    quick = ["--quick"] if a.quick else []
    with open(path, "w") as raw:

        def keep(new: list[dict[str, Any]]) -> None:
            lines.extend(new)
            for line in new:
                raw.write(json.dumps(line) + "\n")
            raw.flush()

        raw.write(json.dumps(lines[0]) + "\n")
        for r in range(a.rounds):
            for name in names:
                for contestant in ("stoker", "torch") if r % 2 == 0 else ("torch", "stoker"):
                    began = time.monotonic()
                    keep(measure(name, contestant, r, *quick))
                    print(
                        f"round {r + 1}/{a.rounds} {name} {contestant}: {time.monotonic() - began:.1f} s",
                        file=sys.stderr,
                    )
                if name in ("transport", "jpeg", "staged"):
                    keep(measure(name, "limit", r))
    print(
        f"{grant.cores} cores, {grant.memory >> 30} GiB, python {grant.python}, "
        f"load at the start {lines[0]['load'][0]:.1f}"
    )
    print(table.render(lines))
    print(f"raw lines: {path}")
    return 0 if all(r.met for r in table.rows(lines)) and not any("failed" in line for line in lines) else 1


def show(a: argparse.Namespace) -> int:
    try:
        lines = [json.loads(line) for line in a.file.read_text().splitlines()]
    except (OSError, ValueError) as e:
        print(f"{a.file}: {e}", file=sys.stderr)
        return 2
    if "device" in lines[0]:
        from . import gpu as rows

        print(f"{lines[0]['device']}, {lines[0]['machine']['cores']} cores, torch {lines[0]['torch']}:\n")
        print(rows.table(lines, a.markdown))
    else:
        print(table.render(lines, a.markdown))
    return 0


def gpu(a: argparse.Namespace) -> int:
    """The tests that want a device, then the rows of ``benchmarks.gpu`` and the loops with a copy to the device."""
    import torch

    from . import gpu as rows

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return 0
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], cwd=ROOT, timeout=LIMIT_S).returncode
    device = torch.cuda.get_device_name()
    lines: list[dict[str, Any]] = [
        {"device": device, "torch": torch.__version__, "machine": resources.read().as_dict()}
    ]
    lines[0]["tests"] = tests
    for r in range(a.rounds):
        for contestant in ("stoker", "torch") if r % 2 == 0 else ("torch", "stoker"):
            for name in rows.ROWS:
                lines += measure(name, contestant, r, module="benchmarks.gpu")
            lines += measure("overhead", contestant, r, "--device", "cuda")
    name = f"{time.strftime('%Y-%m-%d')}-{device.lower().replace(' ', '-')}.jsonl"
    out = ROOT / "benchmarks" / "results" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{device}\n{rows.table(lines)}\nraw lines: {out}")
    return 1 if tests or any("failed" in line for line in lines) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    r = commands.add_parser("run", help="measure, alternating the contestants")
    r.add_argument("--rounds", type=int, default=5)
    r.add_argument("--workloads", default=",".join(WORKLOADS))
    r.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "local")
    r.add_argument("--json", type=Path, metavar="FILE", help="raw lines (default: a file named by the time in --out)")
    r.add_argument("--quick", action="store_true", help="fewer batches: does it run at all")
    r.set_defaults(act=run)
    t = commands.add_parser("table", help="the table of raw lines kept earlier")
    t.add_argument("file", type=Path)
    t.add_argument("--markdown", action="store_true")
    t.set_defaults(act=show)
    g = commands.add_parser("gpu", help="with a device, where there is one")
    g.add_argument("--rounds", type=int, default=3)
    g.set_defaults(act=gpu)
    a = parser.parse_args()
    return int(a.act(a))


if __name__ == "__main__":
    sys.exit(main())
