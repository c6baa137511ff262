"""The command line of a benchmark with contestants of its own: ``run`` in turns, ``one`` of them, the ``table``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stoker.core import resources

ROOT = Path(__file__).parent.parent
LIMIT_S = 300  # for one contestant

Line = dict[str, Any]


def in_turns(benchmark: str, kind: str, names: Iterable[str], rounds: int, *args: str) -> Iterator[Line]:
    """Each contestant once a round, in a process of its own; every other round begins with the last.

    Args:
        benchmark: the module.
        kind: what a line calls its contestant.
        names: the contestants.
        rounds: how many.
        args: what ``one`` gets besides the name.
    """
    names = list(names)
    for r in range(rounds):
        for name in names if r % 2 == 0 else reversed(names):
            command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{benchmark}", "one", name, *args]
            p = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
            if p.returncode:
                raise RuntimeError(f"{name}: {p.stderr}")
            print(f"{benchmark}: round {r + 1}/{rounds} {name}", file=sys.stderr)
            for line in p.stdout.splitlines():
                if line.startswith("{"):  # Ray prints there, too
                    yield {kind: name, "round": r, **json.loads(line)}


def main(
    benchmark: str,
    words: str | None,
    measure: Callable[..., Iterable[Line]],
    table: Callable[[list[Line]], str],
    one: Callable[..., None],
    rounds: int,
    only: Iterable[str] = (),
    **more: Callable[[], None],
) -> int:
    """Runs a benchmark's command.

    Args:
        benchmark: the module.
        words: its docstring.
        measure: raw lines, of so many rounds.
        table: of raw lines.
        one: measures the contestant of a name and prints its lines.
        rounds: where nobody says.
        only: names of which ``--only`` picks some; measure gets them behind the rounds.
        more: other commands.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=words)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("run", help="measure, in turns")
    p.add_argument("--rounds", type=int, default=rounds, help=f"(default: {rounds})")
    p.add_argument("--json", type=Path, help="raw lines")
    if only:
        p.add_argument("--only", action="append", choices=list(only), help="this one alone; as often as you like")
    p = commands.add_parser("one", help="one contestant")
    p.add_argument("args", nargs="+", metavar="NAME")
    p = commands.add_parser("table", help="the table of raw lines kept earlier")
    p.add_argument("file", type=Path)
    for name, act in more.items():
        commands.add_parser(name, help=act.__doc__)
    a = parser.parse_args()
    if a.command == "one":
        one(*a.args)
    elif a.command == "table":
        print(table([json.loads(x) for x in a.file.read_text().splitlines()][1:]))
    elif a.command == "run":
        _run(benchmark, measure(a.rounds, *([a.only or list(only)] if only else [])), table, a.json)
    else:
        more[a.command]()
    return 0


def _run(benchmark: str, lines: Iterable[Line], table: Callable[[list[Line]], str], out: Path | None) -> None:
    folder = ROOT / "benchmarks" / "results" / "local"
    out = out or folder / time.strftime(f"{benchmark}-%Y%m%d-%H%M%S.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    seen = []
    with open(out, "w") as file:
        file.write(json.dumps({"machine": resources.read().as_dict(), "load": os.getloadavg()}) + "\n")
        for line in lines:
            seen.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
    print(table(seen))
    print(f"raw lines: {out}")
