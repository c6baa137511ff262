"""``stoker stats``: what the command line does with ``stats.mean_std``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...core import output
from ...core.errors import StokerError, UsageError
from ...core.progress import Progress
from ..arguments import count, whole, workers

EXAMPLE = """examples:
  stoker stats train.py:train_set
  stoker stats mypackage.data:make_loader --samples 5000 --workers 8
  stoker stats train.py:train_set --key image --json stats.json

TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name. Measure the
images as Normalize gets them: without Normalize itself. Unreadable samples are listed, and the count goes on."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    p = commands.add_parser(
        "stats",
        help="mean and std of an image dataset, and its broken samples",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("target", metavar="TARGET", help="path.py:name or package.module:name")
    p.add_argument("--key", metavar="NAME", help="which part of a sample is the image: a dict's key, a tuple's place, "
                   "a field, with dots to go inside (default: the first image)")  # fmt: skip
    p.add_argument("--samples", type=count, metavar="N", help="read N, drawn at random; of a stream the first N "
                   "(default: all)")  # fmt: skip
    p.add_argument("--seed", type=whole, default=0, metavar="S", help="for --samples and augmentation (default: 0)")
    p.add_argument("--layout", choices=("CHW", "HWC"), help="where channels are, if it is guessed wrong")
    p.add_argument("--workers", type=workers, default="auto", metavar="N|auto", help="worker processes; 0 reads in "
                   "the command's own (default: auto)")  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="the result as JSON; - is stdout, instead of the text")


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: wrong arguments, or no image in the samples.
    """
    output.check(options.json)
    from ...loader.variant import find
    from .reading import mean_std  # which loads torch

    thing = find(options.target)
    progress = Progress(options.target)
    try:
        found = mean_std(
            thing,
            key=options.key,
            samples=options.samples,
            seed=options.seed,
            layout=options.layout,
            num_workers=options.workers,
            name=options.target,
            progress=progress,
        )
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
