"""``stoker batch-size``: the command around ``tuning.batch_size.largest``."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from ..core import output
from ..core.progress import Progress
from . import arguments


@arguments.command("batch-size")
@arguments.target
@click.option("--step", metavar="PATH.PY:NAME", help="Function to call with each batch: forward and backward.")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Share of the free memory to keep free.",
)
@arguments.time_limit(default=60.0)
@arguments.json_file
def command(target: str, step: str | None, margin: float, time_limit: float, json_path: Path | None) -> int:
    """Find the largest batch that fits the accelerator.

    TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name.

    \b
    Examples:
      stoker batch-size train.py:make_loader
      stoker batch-size train.py:make_loader --step train.py:step --json -
    """
    from ..loader.variant import as_loader, find
    from ..tuning.batch_size import Step, largest  # imports torch

    loader = as_loader(find(target), name=target)
    step_function = None if step is None else cast(Step, find(step))
    with Progress(target, time_limit) as progress:
        found = largest(loader, step_function, margin, time_limit, progress)
    output.give(found.as_dict(), json_path, lambda: print(found))
    return 0
