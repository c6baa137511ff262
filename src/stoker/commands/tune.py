"""``stoker tune``: what the command line does with ``search.tune``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..core import output
from ..core.options import BATCH_SIZE
from ..core.progress import Progress
from ..tuning import plot
from ..tuning.knobs import ALL_KNOBS, BUDGET_S, KNOBS
from .arguments import count, seconds

EXAMPLE = """examples:
  stoker tune train.py:make_loader                 a function that returns a DataLoader or a Dataset
  stoker tune mypackage.data:train_set --batch-size 64 --plot curve.svg
  stoker tune train.py:loader --knobs num_workers,prefetch_factor --budget-s 60 --json tune.json

train.py is imported, not run: what it keeps behind `if __name__ == "__main__"` stays there.
The answer is kept where num_workers="auto" finds it (--no-save: not)."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    p = commands.add_parser(
        "tune",
        help="find a loader's settings by measuring",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("target", metavar="TARGET", help="path.py:name or package.module:name: a Dataset, a DataLoader, or "
                   "a callable without arguments that returns one")  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="the result as JSON; - is stdout, instead of the text")
    p.add_argument("--plot", type=Path, metavar="FILE", help="samples/s against workers: .png, .svg or .html")
    p.add_argument("--knobs", default=",".join(KNOBS), metavar="A,B", help=f"which may move, of {', '.join(ALL_KNOBS)} "
                   "(default: all but batch_size and cache)")  # fmt: skip
    p.add_argument("--budget-s", type=seconds, default=BUDGET_S, metavar="S", help="seconds it may take "
                   f"(default: {BUDGET_S:g})")  # fmt: skip
    p.add_argument("--batch-size", type=count, metavar="N", help="samples in a batch (default: the loader's; "
                   f"{BATCH_SIZE} for a dataset)")  # fmt: skip
    p.add_argument("--no-save", action="store_true", help='keep no profile for num_workers="auto"')


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: what cannot be tuned.
    """
    if options.plot is not None:
        plot.check(options.plot)
    output.check(options.json)
    from ..loader.variant import find
    from ..tuning.api import tune  # which loads torch

    knobs = [k.strip() for k in options.knobs.split(",") if k.strip()]
    thing = find(options.target)
    progress = Progress(options.target, options.budget_s)
    try:
        result = tune(
            thing,
            knobs=knobs,
            budget_s=options.budget_s,
            batch_size=options.batch_size,
            name=options.target,
            progress=progress,
            save=not options.no_save,
        )
    finally:
        progress.end()
    if options.plot is not None:
        result.plot(options.plot)
    output.give(result.as_dict(), options.json, result.show)
    return 0
