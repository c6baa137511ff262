"""The labelled suite: small scripts, each with a known cause, and a table of truth.

    python -m tests.diagnosis                          all of them, by stoker run
    python -m tests.diagnosis slow_collate --rounds 3 --load 1   beside a process that computes
    python -m tests.diagnosis --tool 'mytool --json {json} {script}'

A tool runs ``{script}`` (its folder is where it finds ``planted``) and writes ``{json}``: an object with ``findings``, a
list of objects with a ``cause``, the costliest first. A script passes when the causes of ``truth.json`` are the first
ones, in any order among themselves, and when one without a cause has no finding at all. ``cacheable_prefix`` is no cause
but a remedy, which may stand anywhere where there is a cause.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.diagnosis.report.patch import FIXED_BY_APPLY
from tests.diagnosis.helpers import NOT_HERE

HERE = Path(__file__).parent
TRUTH: dict[str, list[str]] = json.loads((HERE / "truth.json").read_text())
TOOL = f"{shlex.quote(sys.executable)} -m stoker run --json {{json}} {{script}}"
REMEDY = "cacheable_prefix"
LIMIT_S = 120
BUSY = "import os\nwhile os.getppid() > 1: sum(range(100000))"


class NotHere(Exception):
    """The script's cause cannot be planted on this machine."""


def report(name: str, tool: str = TOOL) -> dict[str, Any]:
    """What a tool says of a script."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        script = HERE / "cases" / f"{name}.py"
        line = tool.format(json=shlex.quote(str(out)), script=shlex.quote(str(script)))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE / "cases"), os.environ.get("PYTHONPATH")])),
        }
        p = subprocess.run(shlex.split(line), cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if p.returncode == NOT_HERE:
            raise NotHere
        if p.returncode or not out.exists():
            raise RuntimeError(f"{name}: exit code {p.returncode}\n{p.stderr[-2000:]}")
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def applied(name: str) -> tuple[float, float] | None:
    """Predicted and measured speed-up of a script under ``stoker run --apply``; None where nothing was predicted."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        for extra in ([], ["--apply"]):
            line = [
                sys.executable,
                "-m",
                "stoker",
                "run",
                *extra,
                "--json",
                "r.json",
                str(HERE / "cases" / f"{name}.py"),
            ]
            env = {**os.environ, "PYTHONPATH": str(HERE / "cases")}
            subprocess.run(line, cwd=folder, env=env, capture_output=True, timeout=LIMIT_S, check=True)
            found = json.loads((Path(folder) / "r.json").read_text())
        before, measured = found["applied"]["before"], list(found["applied"]["speedup"].values())
        predicted = [f["predicted_speedup"] for f in before["findings"] if f["cause"] in FIXED_BY_APPLY]
        predicted = [p for p in predicted if p]  # of what is kept nothing is predicted
        return (predicted[0], measured[0]) if predicted and measured else None


def right(name: str, causes: list[str]) -> bool:
    """Whether these findings are the truth."""
    true = TRUTH[name]
    found = [cause for cause in causes if cause != REMEDY]
    return not causes if not true else set(found[: len(true)]) == set(true)


def compare(names: list[str], rounds: int) -> int:
    errors = []
    for _ in range(rounds):
        for name in names:
            both = applied(name)
            if both is None:
                print(f"{name:28} nothing predicted", flush=True)
                continue
            errors.append(abs(both[1] / both[0] - 1))
            print(f"{name:28} predicted {both[0]:.2f}x, measured {both[1]:.2f}x, {errors[-1]:.0%} apart", flush=True)
    print(f"median error {statistics.median(errors):.0%}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.diagnosis", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tool", default=TOOL)
    parser.add_argument("--apply", action="store_true", help="predicted against measured speed-up of what that mends")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="so many processes compute meanwhile")
    a = parser.parse_args()
    with loaded(a.load):
        return run(a)


@contextlib.contextmanager
def loaded(n: int) -> Iterator[None]:
    """A machine on which somebody else computes."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(n)]
    try:
        yield
    finally:
        for p in busy:
            p.kill()
            p.wait()


def run(a: argparse.Namespace) -> int:
    if a.apply:
        return compare(a.names or [n for n, causes in TRUTH.items() if set(causes) & set(FIXED_BY_APPLY)], a.rounds)
    wrong = 0
    for round_ in range(a.rounds):
        for name in a.names or TRUTH:
            began = time.monotonic()
            try:
                causes = [f"{f['cause']}" for f in report(name, a.tool)["findings"]]
            except NotHere:
                print(f"{round_ + 1} skip  {name:28} cannot be planted on this machine", flush=True)
                continue
            ok = right(name, causes)
            wrong += not ok
            took = time.monotonic() - began
            print(
                f"{round_ + 1} {'ok  ' if ok else 'WRONG'} {name:28} {took:5.1f} s  {', '.join(causes) or '-'}",
                flush=True,
            )
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
