"""How cost grows: measures and draws ``docs/growth.svg``. ``--plot FILE.jsonl`` only draws.

Time of a batch against its bytes (1 KB to 256 MB, 2 workers that stay), against the number of workers (1 to 8, a small
batch and one of 10 MB), and time to the first batch of a shuffled epoch against the length of the dataset (10^3 to
10^9, 0 workers; torch's order up to 10^8, beyond which it needs more memory than there is). Contestants alternate;
medians of three rounds are drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SIZES = [1 << n for n in range(10, 29, 3)]
WORKERS = [1, 2, 4, 8]
LENGTHS = [10**n for n in range(3, 10)]
LIMIT_S = 300
TITLES = {
    "bytes": ("bytes of a batch", "time of a batch, ms"),
    "small": ("workers, batch of 1 KB", "time of a batch, ms"),
    "large": ("workers, batch of 10 MB", "time of a batch, ms"),
    "length": ("samples, shuffled", "time to the first batch, ms"),
}


def one(contestant: str, what: str, x: int) -> float:
    """Milliseconds. Runs in a process of its own."""
    import torch

    import stoker

    from . import workloads as w

    loader_class: Any = {
        "stoker": stoker.DataLoader,
        "feistel": stoker.DataLoader,
        "torch": torch.utils.data.DataLoader,
    }[contestant]
    if what == "length":
        order = "feistel" if contestant == "feistel" else True
        next(iter(loader_class(w.Endless(70_000), batch_size=64, shuffle=order)))
        began = time.perf_counter()
        next(iter(loader_class(w.Endless(x), batch_size=64, shuffle=order)))
        return (time.perf_counter() - began) * 1e3
    size, workers = (x, 2) if what == "bytes" else ({"small": 1 << 10, "large": 10**7}[what], x)
    batches = max(24, min(2000, (1 << 31) // size))
    dataset = w.Sized(size // 8, 8 * batches)
    loader = loader_class(dataset, batch_size=8, num_workers=workers, persistent_workers=True)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for batch in loader:
            w.touch(batch)
        times.append((time.perf_counter() - began) / batches * 1e3)
    return statistics.median(times[1:])


def measure(path: Path, rounds: int) -> None:
    cases = [("bytes", x) for x in SIZES] + [("small", x) for x in WORKERS] + [("large", x) for x in WORKERS]
    cases += [("length", x) for x in LENGTHS]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as raw:
        for r in range(rounds):
            for what, x in cases:
                who = ["stoker", "torch"] + (["feistel"] if what == "length" else [])
                if what == "length" and x > 10**8:
                    who = ["feistel"]
                for contestant in who if r % 2 == 0 else reversed(who):
                    command = [
                        sys.executable,
                        "-W",
                        "ignore",
                        "-m",
                        "benchmarks.growth",
                        "--one",
                        contestant,
                        what,
                        str(x),
                    ]
                    p = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
                    line: dict[str, Any] = {"contestant": contestant, "what": what, "x": x, "round": r}
                    line |= {"failed": p.stderr.strip()[-300:]} if p.returncode else {"ms": float(p.stdout)}
                    raw.write(json.dumps(line) + "\n")
                    raw.flush()
                    print(line, file=sys.stderr)


def plot(path: Path, out: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("drawing needs matplotlib: pip install matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "stoker"
    from matplotlib import pyplot as plt

    values: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in map(json.loads, path.read_text().splitlines()):
        if "ms" in line:
            values[line["what"]][line["contestant"]][line["x"]].append(line["ms"])
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), constrained_layout=True)
    for ax, (what, (x_label, y_label)) in zip(axes.flat, TITLES.items(), strict=True):
        for contestant, mark, colour in (
            ("torch", "s--", "#888888"),
            ("stoker", "o-", "#c2410c"),
            ("feistel", "^-", "#1d4ed8"),
        ):
            points = sorted((x, statistics.median(v)) for x, v in values[what][contestant].items())
            if points:
                name = 'stoker, shuffle="feistel"' if contestant == "feistel" else contestant
                ax.plot(*zip(*points, strict=True), mark, color=colour, label=name)
        ax.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
        if what in ("small", "large"):
            ax.set_xscale("log", base=2)
            ax.set_xticks(WORKERS, [str(n) for n in WORKERS])
        ax.grid(True, which="major", alpha=0.3)
        ax.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "local" / "growth.jsonl")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw from raw lines kept earlier")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "growth.svg")
    parser.add_argument("--one", nargs=3, metavar=("CONTESTANT", "WHAT", "X"), help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one:
        print(one(a.one[0], a.one[1], int(a.one[2])))
        return 0
    if not a.plot:
        measure(a.json, a.rounds)
    plot(a.plot or a.json, a.out)
    print(a.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
