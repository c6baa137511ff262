"""``stoker compare``: the command around ``diagnosis.report.compare``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..core import output
from ..core.errors import UsageError
from ..core.terminal import colour_wanted, width
from . import arguments


@arguments.command("compare")
@click.argument("a", metavar="A.json", type=arguments.FILE)
@click.argument("b", metavar="B.json", type=arguments.FILE)
@click.option(
    "--fail-above",
    type=arguments.loss,
    metavar="5%",
    help="Exit with code 1 if a loader's samples/s in B are lower than in A by more than this share, such as 5% or "
    "0.05.",
)
@arguments.json_file
def command(a: Path, b: Path, fail_above: float | None, json_path: Path | None) -> int:
    """Compare two reports of stoker run. Ratios are B over A.

    \b
    Examples:
      stoker compare before.json after.json
      stoker compare main.json branch.json --fail-above 5%        in CI: exit code 1 if it got slower
      stoker compare main.json branch.json --json - | jq .loaders[0].ratio
    """
    from ..diagnosis.report.compare import compare, load

    found = compare(load(a), load(b), fail_above)
    stream = sys.stdout
    output.give(found.as_dict(), json_path, lambda: print(found.text(width(stream), colour_wanted(stream))))
    if fail_above is not None and all(pair.loss is None for pair in found.pairs):
        raise UsageError("--fail-above has nothing to compare: no loader has samples/s or batches in both reports")
    failed = found.losses()
    for reason in failed:
        print(f"stoker: {reason}", file=sys.stderr)
    return int(bool(failed))
