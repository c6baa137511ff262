"""``python -m benchmarks.scale run|simulate|table``: costs measured here, and a simulation of more machines with them.

``run`` needs Ray (``pip install "stoker[ray]"``) and takes half an hour; ``simulate FILE`` asks the model again with
what was measured before; ``table FILE [NAME]`` prints the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from stoker.core import resources

from ..command import ROOT, in_turns
from . import compare, measure

RESULTS = ROOT / "benchmarks" / "results"
ROUNDS = 3


def run(a: argparse.Namespace) -> int:
    path = a.json or RESULTS / "local" / time.strftime("scale-%Y%m%d-%H%M%S.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        file.write(json.dumps({"machine": resources.read().as_dict(), "load": os.getloadavg()}) + "\n")
        for line in in_turns("scale", "name", a.only or measure.NAMES, a.rounds):
            file.write(json.dumps(line) + "\n")
            file.flush()
    if not a.only:
        simulate(argparse.Namespace(file=path))
    print(f"raw lines: {path}")
    return 0


def simulate(a: argparse.Namespace) -> int:
    head = a.file.read_text().splitlines()[0]
    measured = [line for line in compare.read(a.file) if "simulated" not in line]
    found = list(compare.simulated(measured))
    a.file.write_text("\n".join([head, *map(json.dumps, [*measured, *found])]) + "\n")
    return table(argparse.Namespace(file=a.file, name=None))


def table(a: argparse.Namespace) -> int:
    lines = compare.read(a.file)
    names = [a.name] if a.name else list(compare.TABLES)
    print("\n\n".join(compare.TABLES[name](lines) for name in names))
    return 0


def one(a: argparse.Namespace) -> int:
    for line in measure.one(a.name):
        print(json.dumps(line), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("run", help="measure in turns, then simulate")
    p.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default: {ROUNDS})")
    p.add_argument("--json", type=Path, metavar="FILE", help="raw lines")
    p.add_argument("--only", action="append", choices=measure.NAMES, help="this one alone; as often as you like")
    p.set_defaults(act=run)
    p = commands.add_parser("simulate", help="ask the model again, with what was measured before")
    p.add_argument("file", type=Path)
    p.set_defaults(act=simulate)
    p = commands.add_parser("table", help="the tables of raw lines kept earlier")
    p.add_argument("file", type=Path)
    p.add_argument("name", nargs="?", choices=compare.TABLES, help="one of them")
    p.set_defaults(act=table)
    p = commands.add_parser("one", help="one measurement, in this process")
    p.add_argument("name", choices=measure.NAMES)
    p.set_defaults(act=one)
    a = parser.parse_args()
    try:
        return int(a.act(a))
    except (OSError, ValueError, KeyError, IndexError, statistics.StatisticsError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 2
    except (ImportError, RuntimeError) as e:
        print(f'{e}\nRay is measured here: pip install "stoker[ray]"', file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
