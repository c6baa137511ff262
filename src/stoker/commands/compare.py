"""``stoker compare``: what the command line does with ``compare``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..core import output
from ..core.errors import UsageError

EXAMPLE = """examples:
  stoker compare before.json after.json
  stoker compare main.json branch.json --fail-above 5%        in CI: exit code 1 when it got slower
  stoker compare main.json branch.json --json - | jq .loaders[0].ratio

A and B are what stoker run --json, stoker bench --json or stoker tune --json wrote. Ratios are B over A."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    p = commands.add_parser(
        "compare",
        help="one report against another",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("a", type=Path, metavar="A.json", help="the report to compare with")
    p.add_argument("b", type=Path, metavar="B.json", help="the report to judge")
    p.add_argument("--fail-above", type=loss, metavar="5%", help="exit code 1 where a loader of B makes fewer "
                   "samples/s than A's by more than that, as 5%% or 0.05")  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="the comparison as JSON; - for stdout")


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: one of the files is no report, or they have nothing in common.
    """
    output.check(options.json)
    from ..diagnosis.report.compare import compare
    from ..diagnosis.report.compare_read import load

    found = compare(load(options.a), load(options.b), options.fail_above)
    output.give(found.as_dict(), options.json, lambda: found.show(sys.stdout))
    if options.fail_above is not None and not found.judged:
        raise UsageError("--fail-above has nothing to judge: no loader of both has samples/s or batches in both")
    for words in found.failed:
        print(f"stoker: {words}", file=sys.stderr)
    return 1 if found.failed else 0


def loss(text: str) -> float:
    """A share, from 0 to less than 1, as ``5%`` or ``0.05``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share, as 5% or 0.05")
    return value
