"""``python -m benchmarks.peers setup|run|table``: other loaders beside stoker, each in an environment of its own."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stoker.core import resources

from .drive import BATCH, DRIVERS, JPEG_ONLY

ROOT = Path(__file__).parent.parent.parent
HOME = ROOT / ".peers"
LIMIT_S = 300
ALONE = "--no-deps"
# What each environment gets, one call of pip after the other. stoker and torch run in the project's own. DALI would
# bring CUDA; ffcv is compiled against libturbojpeg and OpenCV, and asks for packages that its loader does not import.
ENVIRONMENTS: dict[str, list[list[str]]] = {
    "torch": [["torch", "torchdata", "spdl", "spdl-core", "spdl-io", "grain", "webdataset", "pillow"]],
    "tf": [["tensorflow-cpu", "pillow", "numpy"]],
    "ray": [["torch", "ray[data]", "pydantic", "pillow"]],
    "dali": [
        [ALONE, "nvidia-dali-cuda120==2.4.0", "nvidia-nvimgcodec-cu12", "nvidia-libnvcomp-cu12==5.3.0.16"],
        ["astunparse", "gast", "six", "optree", "nvtx", "makefun", "libcst", "packaging", "numpy", "pillow"],
    ],
    "ffcv": [
        ["torch"],
        ["numpy<2.3", "numba", "opencv-python-headless", "pillow", "pandas", "tqdm", "setuptools", "wheel"],
        [ALONE, "--no-build-isolation", "ffcv"],
    ],
}
# Not pip's to install; without them these peers are absent. Debian's names.
SYSTEM = {
    "ffcv": "libturbojpeg0-dev libopencv-dev pkg-config g++",
    "torch": "libavdevice59 libavfilter8 (spdl's decoder)",
}
WHERE = {n: "torch" for n in DRIVERS if n.split()[0].strip(",") in ("torchdata", "spdl", "grain", "webdataset")}
WHERE |= {"tf.data": "tf", "ray.data": "ray", "DALI, CPU": "dali", "ffcv": "ffcv"}
UNITS = {"jpeg": "images/s", "transport": "GB/s", "overhead": "batches/s"}


def python_of(peer: str) -> Path:
    """The interpreter that has a peer."""
    return HOME / WHERE[peer] / "bin" / "python" if peer in WHERE else Path(sys.executable)


def setup(a: argparse.Namespace) -> int:
    failed = 0
    for name in a.names or ENVIRONMENTS:
        if name not in ENVIRONMENTS:
            print(f"unknown environment {name!r}; there are {', '.join(ENVIRONMENTS)}", file=sys.stderr)
            return 2
        folder = HOME / name
        print(f"{folder}: {' '.join(itertools.chain(*ENVIRONMENTS[name]))}", file=sys.stderr)
        if name in SYSTEM:
            print(f"wants the system's {SYSTEM[name]}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        for packages in ENVIRONMENTS[name]:
            constraint = ["-c", ROOT / "constraints.txt"] if "torch" in packages else []
            code = subprocess.run([*pip, *constraint, *packages]).returncode
            if code:
                break
        failed += code != 0
        if code:
            print(f"{name}: did not install here; its peers will be shown as absent", file=sys.stderr)
    return 1 if failed else 0


def measure(peer: str, workload: str, round_: int) -> list[dict[str, Any]]:
    name = {"contestant": peer, "workload": workload, "round": round_}
    if not python_of(peer).exists():
        return [{**name, "absent": "not installed here"}]
    command = [python_of(peer), "-W", "ignore", "-m", "benchmarks.peers.drive", peer, workload, "--epochs", "2"]
    try:
        p = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return [{**name, "failed": f"longer than {LIMIT_S} s"}]
    lines = [{**name, **json.loads(line)} for line in p.stdout.splitlines() if line.startswith('{"metric"')]
    if p.returncode or not lines:
        why = (p.stderr.strip().splitlines() or [f"exit code {p.returncode}"])[-1]
        kind = "absent" if "ModuleNotFoundError" in why else "failed"
        lines = [{**name, kind: why}]
    return lines


def run(a: argparse.Namespace) -> int:
    path = a.json or ROOT / "benchmarks" / "results" / "local" / time.strftime("peers-%Y%m%d-%H%M%S.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"machine": resources.read().as_dict(), "rounds": a.rounds}]
    with open(path, "w") as raw:
        raw.write(json.dumps(lines[0]) + "\n")
        for r in range(a.rounds):
            for workload in BATCH:
                who = [p for p in a.peers or DRIVERS if workload == "jpeg" or p not in JPEG_ONLY]
                for peer in who if r % 2 == 0 else reversed(who):
                    new = measure(peer, workload, r)
                    lines += new
                    raw.writelines(json.dumps(line) + "\n" for line in new)
                    raw.flush()
                    print(f"round {r + 1}/{a.rounds} {workload} {peer}", file=sys.stderr)
    print(render(lines))
    print(f"raw lines: {path}")
    return 0


def render(lines: list[dict[str, Any]]) -> str:
    """A table for each workload, the fastest first; medians over rounds of the epochs after the first."""
    out = []
    for workload in BATCH:
        values: dict[str, dict[int, list[float]]] = {}
        for line in lines:
            if line.get("metric") == workload and line["epoch"] > 1:
                values.setdefault(line["contestant"], {}).setdefault(line["round"], []).append(line["value"])
        each = {c: [statistics.median(v) for v in by.values()] for c, by in values.items()}
        torch = statistics.median(each["torch"]) if "torch" in each else None
        out += [f"| {workload} | {UNITS[workload]} | range | of torch |", "| --- | --- | --- | --- |"]
        for c, v in sorted(each.items(), key=lambda item: -statistics.median(item[1])):
            m = statistics.median(v)
            ratio = f"{m / torch:.2f}x" if torch else ""
            out.append(f"| {c} | {m:,.4g} | {min(v):,.4g}..{max(v):,.4g} | {ratio} |")
        for c in DRIVERS:
            gone = [line for line in lines if line.get("contestant") == c and line.get("workload") == workload]
            gone = [line for line in gone if "absent" in line or "failed" in line]
            if gone and c not in each:
                why = gone[0].get("absent") or "failed: " + gone[0]["failed"]
                out.append(f"| {c} | absent: {why[-100:]} | | |")
        out.append("")
    return "\n".join(out)


def show(a: argparse.Namespace) -> int:
    try:
        lines = [json.loads(line) for line in a.file.read_text().splitlines()]
    except (OSError, ValueError) as e:
        print(f"{a.file}: {e}", file=sys.stderr)
        return 2
    print(render(lines))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    commands = parser.add_subparsers(required=True)
    s = commands.add_parser("setup", help="make the environments (all, or those named); gigabytes, minutes")
    s.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    s.set_defaults(act=setup)
    r = commands.add_parser("run", help="measure who is there, alternating")
    r.add_argument("--rounds", type=int, default=3)
    r.add_argument("--peers", nargs="+", choices=DRIVERS, metavar="NAME", help="only these: " + ", ".join(DRIVERS))
    r.add_argument("--json", type=Path, metavar="FILE")
    r.set_defaults(act=run)
    t = commands.add_parser("table", help="the tables of raw lines kept earlier")
    t.add_argument("file", type=Path)
    t.set_defaults(act=show)
    a = parser.parse_args()
    return int(a.act(a))


if __name__ == "__main__":
    sys.exit(main())
