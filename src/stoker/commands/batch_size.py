"""``stoker batch-size``: what the command line does with ``batch_size.largest``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..core import output
from ..core.errors import StokerError, UsageError
from ..core.progress import Progress
from .arguments import count, seconds, share

EXAMPLE = """examples:
  stoker batch-size train.py:make_loader
  stoker batch-size train.py:make_loader --step train.py:step --budget 4GB --json -

TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name.
step(batch) does forward and backward. The budget is of the accelerator's memory."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    p = commands.add_parser(
        "batch-size",
        help="the largest batch that fits the device",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("target", metavar="TARGET", help="path.py:name or package.module:name")
    p.add_argument("--step", metavar="PATH.PY:NAME", help="a function called with each batch")
    p.add_argument("--budget", metavar="4GB", help="memory for one batch with its step (default: what is granted)")
    p.add_argument("--most", type=count, default=65536, metavar="N", help="try no larger ones (default: 65536)")
    p.add_argument("--margin", type=share, default=0.1, metavar="SHARE", help="of the budget, kept free (0.1)")
    p.add_argument("--budget-s", type=seconds, default=60.0, metavar="S", help="seconds for all trials (default: 60)")
    p.add_argument("--json", type=Path, metavar="FILE", help="the result as JSON; - for stdout")


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: wrong arguments, or not one sample fits.
    """
    output.check(options.json)
    from ..loader.variant import as_loader, find
    from ..tuning.batch_size import largest  # which loads torch

    loader = as_loader(find(options.target), name=options.target)
    step = None if options.step is None else find(options.step)
    progress = Progress(options.target, options.budget_s)
    try:
        found = largest(loader, step, options.budget, options.most, options.margin, options.budget_s, progress)
    except UsageError:
        raise
    except StokerError as e:
        progress.end()
        print(f"stoker: {e}", file=sys.stderr)
        return 1
    finally:
        progress.end()
    output.give(found.as_dict(), options.json, lambda: print(found))
    return 0
